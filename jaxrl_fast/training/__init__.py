"""One run on the host: its plan, its loop and what it writes."""
