"""The mathematics of reinforcement learning, as pure functions of arrays."""
