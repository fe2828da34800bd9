"""The folder of one run on disk."""
