"""Replay buffers: uniform (`ring`) and prioritized (`sum_tree`)."""
