"""Distribute seeds and shards over devices."""
