"""Compile a run for a GPU that this machine does not have, and count what the GPU would run."""
