"""Compute the mathematics of reinforcement learning by pure functions of arrays."""
