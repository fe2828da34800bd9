"""Activations with their derivatives, and random arrays, for the oracles of layers."""

import numpy as np

AFTER = {"none": lambda z: z, "tanh": np.tanh, "relu": lambda z: np.maximum(z, 0)}
SLOPE = {"none": np.ones_like, "tanh": lambda z: 1 - np.tanh(z) ** 2, "relu": lambda z: z > 0}


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5 for shape in shapes]
