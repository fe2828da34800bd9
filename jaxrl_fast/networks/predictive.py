"""Make a critic that also predicts the next reward and its own next embedding (REPPO, Voelcker et al. 2025)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.networks import flat, torsos
from jaxrl_fast.networks.dense import Dense, LayerNorm
from jaxrl_fast.networks.init import init_params
from jaxrl_fast.networks.options import Options
from jaxrl_fast.types import Key, PyTree

SHARPNESS = 40.0  # the value head's offset is this times its parameters: one step of Adam moves it 40 times as far


class Output(NamedTuple):
    """The outputs of the critic for pairs of an observation and an action."""

    value: Array  # f32 [...], or with `num_atoms` [..., M]
    embedding: Array  # f32 [..., W]
    next_embedding: Array  # f32 [..., W]: predicted
    reward: Array  # f32 [...]: predicted


class PredictiveCritic(NamedTuple):
    """A function of (observation, action) that has parameters."""

    init: Callable[[Key], PyTree]
    apply: Callable[[PyTree, Any], Output]  # (params, (obs [..., *shape], action [..., D]))


def make(obs: PyTree, action_size: int, width: int, options: Options, offset: Any = None) -> PredictiveCritic:
    """Return a critic for observations like `obs` (ShapeDtypeStruct), whose layers have this width W.

    Two layers embed the pair, and two layers each give the value and the predictions. With `num_atoms`, values are
    distributions of M numbers. `offset` is None or a function of nothing to initial parameters [M]. The value head adds
    SHARPNESS times these to its outputs.
    """
    of_pair = options._replace(action_size=action_size, hidden=(width,))
    module: Any = _Critic(torsos.make(obs, of_pair), width, options.activation, options.num_atoms, offset)
    inputs = of_pair.inputs(obs)

    def init(key: Key) -> PyTree:
        return init_params(module, inputs, key, options.kernel_init)

    return PredictiveCritic(init, lambda params, inputs: module.apply(flat.unpack(params), inputs))


class _Critic(nn.Module):
    """A torso, a linear embedding of its features, and two heads of one hidden layer each on the embedding."""

    torso: nn.Module
    width: int
    activation: str
    num_atoms: int | None
    offset: Any

    @nn.compact
    def __call__(self, inputs):
        embedding = Dense(self.width, 1.0, name="embedding")(self.torso(inputs))
        active = jnp.tanh(embedding) if self.activation == "tanh" else nn.relu(embedding)
        value = Dense(self.num_atoms or 1, 1.0, name="value")(self._hidden(active, "value_hidden"))
        predicted = Dense(self.width + 1, 1.0, name="prediction")(self._hidden(active, "prediction_hidden"))
        if self.offset is not None:
            offset = SHARPNESS * self.param("offset", lambda _: self.offset())
            value = value + offset.reshape(*(1,) * (value.ndim - 1), -1)
        value = value[..., 0] if self.num_atoms is None else value
        return Output(value, embedding, predicted[..., 1:], predicted[..., 0])

    def _hidden(self, x, name):
        return LayerNorm(self.activation, name=f"{name}_norm")(Dense(self.width, np.sqrt(2), name=name)(x))
