"""Recurrent networks: a torso, a cell that carries state from step to step, and a linear head.

step    one observation and the carry -> outputs and the next carry
unroll  T observations in a scan, with the carry reset where an episode ends: what an update recomputes
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_fast.networks import torso
from jaxrl_fast.networks.dense import Dense
from jaxrl_fast.networks.init import init_params
from jaxrl_fast.types import Array, Key, PyTree

CELLS = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}


class RecurrentNetwork(NamedTuple):
    """A function of observations and a carry, with parameters."""

    init: Callable[[Key], PyTree]
    initial_carry: PyTree  # [...] of one environment at the start of an episode: zeros
    step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, Array]]  # (params, carry [N, ...], obs [N, ...])
    unroll: Callable[..., tuple[PyTree, Array]]  # (params, carry [N, ...], obs [T, N, ...], reset [T, N])


def recurrent(
    obs: PyTree, num_outputs: int, *, size: int = 128, cell: str = "gru", gain: float = 1.0, **options: Any
) -> RecurrentNetwork:
    """Return a recurrent network for observations like `obs` (ShapeDtypeStruct). Other options as in `torso.make`.

    `step` returns the next carry and outputs [N, num_outputs]. `unroll` returns the last carry and outputs
    [T, N, num_outputs]; after step t the carry is the initial one where `reset[t]` is True. In a rollout that is
    `~steps.valid`: the row whose action was ignored is followed by the first step of the next episode.
    Raises ValueError for an unknown cell.
    """
    if cell not in CELLS:
        raise ValueError(f"cell: must be one of {', '.join(CELLS)}, got {cell!r}")
    module: Any = _Recurrent(torso.make(obs, **options), CELLS[cell](features=size), num_outputs, gain)
    zeros = jnp.zeros(size)
    initial = (zeros, zeros) if cell == "lstm" else zeros

    def init(key: Key) -> PyTree:
        return init_params(module, (initial, obs), key)

    def step(params: PyTree, carry: PyTree, obs: PyTree) -> tuple[PyTree, Array]:
        return module.apply(params, (carry, obs))

    def unroll(params: PyTree, carry: PyTree, obs: PyTree, reset: Array) -> tuple[PyTree, Array]:
        def one(carry: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
            obs, reset = row
            carry, output = step(params, carry, obs)
            return jax.tree.map(lambda fresh, x: jnp.where(reset[:, None], fresh, x), initial, carry), output

        return jax.lax.scan(one, carry, (obs, reset))

    return RecurrentNetwork(init, initial, step, unroll)


class _Recurrent(nn.Module):
    torso: nn.Module
    cell: nn.Module
    num_outputs: int
    gain: float

    @nn.compact
    def __call__(self, inputs):
        carry, obs = inputs
        carry, features = self.cell(carry, self.torso(obs))
        return carry, Dense(self.num_outputs, self.gain)(features)
