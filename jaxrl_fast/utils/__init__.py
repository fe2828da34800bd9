"""Helpers on the standard library: errors, parsing, files, locks, signals, devices."""
