"""Activations with their derivatives, and random arrays, for the oracles of layers."""

import numpy as np

AFTER = {"none": lambda z: z, "tanh": np.tanh, "relu": lambda z: np.maximum(z, 0)}
SLOPE = {"none": np.ones_like, "tanh": lambda z: 1 - np.tanh(z) ** 2, "relu": lambda z: z > 0}


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5 for shape in shapes]


def check_gradients(oracle, arrays, gradients, g, seed):
    """Compare the gradients of sum(g * oracle(*arrays)) along random directions with central differences in float64."""
    rng, step = np.random.default_rng(seed), 1e-6
    arrays = [z.astype(np.float64) for z in arrays]
    for position, gradient in enumerate(gradients):
        direction = rng.normal(size=arrays[position].shape)
        ahead, behind = (
            oracle(*(z + way * direction if i == position else z for i, z in enumerate(arrays)))
            for way in (step, -step)
        )
        slope = (g * (ahead - behind)).sum() / (2 * step)
        size = np.abs(direction * gradient).sum()
        np.testing.assert_allclose((direction * gradient).sum(), slope, rtol=1e-3, atol=1e-3 * size + 1e-3)
