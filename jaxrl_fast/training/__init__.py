"""Train one run from the host: its plan, its loop and its output."""
