"""Faster CPU versions of a few operations, each with its XLA body in the same file."""
