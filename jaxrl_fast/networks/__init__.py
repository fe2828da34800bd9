"""Make networks: a torso chosen by the shape of the observation, and linear heads.

A network is a record of pure functions. Observations are [..., *shape] with any leading axes. Parameters and outputs
are float32, whatever `dtype` intermediate results have. Layers are computed by `jaxrl_fast.kernels`.

    mlp      any shape, flattened: dense layers of widths `hidden`
    minatar  [H, W, C] small boards: 16 3x3 convolutions, one dense layer (Young & Tian 2019, "MinAtar", section 3)
    nature   [H, W, C] images of at least 36x36 (Mnih et al. 2015, "Human-level control ...", methods)
    dqn2013  the same, with a third of the work: two convolutions (Mnih et al. 2013, "Playing Atari ...", section 4.1)
    impala   [H, W, C]: three residual stages (Espeholt et al. 2018, "IMPALA", figure 3, the deep network)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.networks import torso
from jaxrl_fast.networks.dense import Dense, NoisyDense
from jaxrl_fast.networks.init import init_params, layer_noise
from jaxrl_fast.types import Key, PyTree


class Network(NamedTuple):
    """A function of observations that has parameters."""

    init: Callable[[Key], PyTree]
    apply: Callable[..., Array]  # (params, obs [..., *shape], noise=()) -> [..., num_outputs (, num_atoms)]
    noise: Callable[[Key, tuple[int, ...]], PyTree]  # of each noisy layer, [*shape, K]; () without any


class ActorCritic(NamedTuple):
    """The outputs of a policy (logits, means ...) and a value, from one tree of parameters."""

    init: Callable[[Key], PyTree]
    actor: Callable[[PyTree, PyTree], Array]  # (params, obs) -> [..., num_outputs]
    critic: Callable[[PyTree, PyTree], Array]  # (params, obs) -> [...]
    both: Callable[[PyTree, PyTree], tuple[Array, Array]]


def options_of(config: Any) -> dict[str, Any]:
    """Return the options that every algorithm has, from its Config, as `network` and `actor_critic` name them."""
    return dict(
        kind=config.network,
        arguments=config.network_options,
        observations=config.observations,
        hidden=config.hidden_sizes,
        activation=config.activation,
        kernel_init=config.kernel_init,
        dtype=jnp.dtype(config.compute_dtype),
    )


def network(
    obs: PyTree,
    num_outputs: int,
    *,
    num_atoms: int | None = None,
    dueling: bool = False,
    gain: float = 1.0,
    kernel_init: str = "orthogonal",
    **options,
) -> Network:
    """Return a torso with a linear head, for observations like `obs` (ShapeDtypeStruct). Other options: `torso.make`.

    `kernel_init` is one of `init.KINDS`.

    With `num_atoms`, each output is a distribution of `num_atoms` numbers. With `dueling`, two streams each have the
    last dense layer and a head: one gives the state's value, the other the advantage of each output, less their mean
    (Wang et al. 2016, "Dueling network architectures", eq. 9). Without noise, noisy layers use their means.
    """
    streams = [torso.make_part(obs, slice(-1, None), **options) for _ in range(2)] if dueling else []
    trunk = torso.make(obs, **options) if not dueling else torso.make_part(obs, slice(None, -1), **options)
    module: Any = _Outputs(trunk, streams, num_outputs, num_atoms, gain, options.get("noisy", False))

    def apply(params, obs, noise=()):
        return module.apply({**params, "noise": noise} if noise else params, obs)

    inputs = torso.with_action(obs, options.get("action_size", 0))
    return Network(
        init=lambda key: init_params(module, inputs, key, kernel_init),
        apply=apply,
        noise=lambda key, shape: layer_noise(module, inputs, key, shape),
    )


def actor_critic(
    obs: PyTree,
    num_outputs: int,
    *,
    kind: str = "auto",
    observations: str = "auto",
    shared: bool | None = None,
    actor_gain: float = 0.01,
    critic_gain: float = 1.0,
    kernel_init: str = "orthogonal",
    **options,
) -> ActorCritic:
    """Return a policy and a value, for observations like `obs` (ShapeDtypeStruct). Other options: `torso.make`.

    By default the two share a torso with convolutions, and have one each if it is an mlp.
    """
    kind = torso.choose_kind(obs, kind, observations)
    options |= {"kind": kind, "observations": observations}
    shared = kind != "mlp" if shared is None else shared
    critic_torso = None if shared else torso.make(obs, **options)
    module: Any = _ActorCritic(torso.make(obs, **options), critic_torso, num_outputs, actor_gain, critic_gain)
    return ActorCritic(
        init=lambda key: init_params(module, obs, key, kernel_init),
        actor=lambda params, obs: module.apply(params, obs, method="actor"),
        critic=lambda params, obs: module.apply(params, obs, method="critic"),
        both=module.apply,
    )


class _Outputs(nn.Module):
    """Linear heads on a torso, in float32: [..., num_outputs], or [..., num_outputs, num_atoms]."""

    torso: nn.Module
    streams: list[nn.Module]  # none, or those of the state's value and of the advantages
    num_outputs: int
    num_atoms: int | None
    gain: float
    noisy: bool

    def setup(self):
        widths = (1, self.num_outputs) if self.streams else (self.num_outputs,)
        layer = NoisyDense if self.noisy else Dense
        self.heads = [layer(width * (self.num_atoms or 1), self.gain) for width in widths]

    def __call__(self, obs):
        features = self.torso(obs)
        if not self.streams:
            return self._shape(self.heads[0](features), self.num_outputs)
        value, advantage = (head(stream(features)) for head, stream in zip(self.heads, self.streams, strict=True))
        value, advantage = self._shape(value, 1), self._shape(advantage, self.num_outputs)
        return value + advantage - advantage.mean(axis=-1 if self.num_atoms is None else -2, keepdims=True)

    def _shape(self, x, width):
        return x if self.num_atoms is None else x.reshape(*x.shape[:-1], width, self.num_atoms)


class _ActorCritic(nn.Module):
    """Linear heads of a policy, [..., num_outputs], and of a value, [...]."""

    torso: nn.Module
    critic_torso: nn.Module | None  # None: the critic has `torso` too
    num_outputs: int
    actor_gain: float
    critic_gain: float

    def setup(self):
        self.actor_head = Dense(self.num_outputs, self.actor_gain)
        self.critic_head = Dense(1, self.critic_gain)

    def actor(self, obs):
        return self.actor_head(self.torso(obs))

    def critic(self, obs):
        return self.critic_head((self.critic_torso or self.torso)(obs))[..., 0]

    def __call__(self, obs):
        features = self.torso(obs)
        critic_features = self.critic_torso(obs) if self.critic_torso else features
        return self.actor_head(features), self.critic_head(critic_features)[..., 0]
