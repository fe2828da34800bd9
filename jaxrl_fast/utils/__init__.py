"""Provide helpers: errors, parsing, files, locks, signals, devices."""
