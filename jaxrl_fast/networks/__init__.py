"""Make networks: a torso chosen by the shape of the observation, and linear heads.

A network is a record of pure functions. Observations are [..., *shape] with any leading axes. Parameters and outputs
are float32, whatever `dtype` intermediate results have. Layers are computed by `jaxrl_fast.kernels`.

    mlp      any shape, flattened: dense layers of widths `hidden`
    simba    any shape, flattened: a residual block for each of `hidden`, with layer normalization (Lee et al. 2025)
    minatar  [H, W, C] small boards: 16 3x3 convolutions, one dense layer (Young & Tian 2019, "MinAtar", section 3)
    nature   [H, W, C] images of at least 36x36 (Mnih et al. 2015, "Human-level control ...", methods)
    dqn2013  the same, with a third of the work: two convolutions (Mnih et al. 2013, "Playing Atari ...", section 4.1)
    impala   [H, W, C]: three residual stages (Espeholt et al. 2018, "IMPALA", figure 3, the deep network)

With a memory (`networks.memory`), a recurrent layer follows the torso. `step` and `unroll` then take the carry of each
environment. `initial_carry` is one environment's carry at the start of an episode. Without a memory, carries are ().

    step    one time step: observations [B, ...] and carries before it, to outputs and carries after it
    unroll  sequences of L steps: observations [B, L, ...], carries [B, ...] before the first step, and after which
            steps an episode begins, `reset` bool [B, L]; to outputs [B, L, ...] and carries after the last step
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.networks import memory as memory_module
from jaxrl_fast.networks import torso
from jaxrl_fast.networks.batch_renorm import STATS, with_stats
from jaxrl_fast.networks.dense import Dense, NoisyDense
from jaxrl_fast.networks.init import init_params, layer_noise
from jaxrl_fast.options.algorithm import Algorithm
from jaxrl_fast.options.memory import Recurrent
from jaxrl_fast.types import Key, PyTree
from jaxrl_fast.utils.random import key_of_seed


class Network(NamedTuple):
    """A function of observations that has parameters."""

    init: Callable[[Key], PyTree]
    apply: Callable[..., Array]  # (params, obs [..., *shape], noise=()) -> [..., num_outputs (, num_atoms)]; no memory
    noise: Callable[[Key, tuple[int, ...]], PyTree]  # of each noisy layer, [*shape, K]; () without any
    step: Callable[..., tuple[Array, PyTree]]  # (params, obs, carry, noise=()) -> (outputs, carry)
    unroll: Callable[..., tuple[Array, PyTree]]  # (params, obs, carry, reset, noise=()) -> (outputs, carry)
    initial_carry: PyTree = ()
    init_stats: Callable[[], PyTree] = lambda: None  # running statistics of batch renormalization
    train: Callable[..., Any] = lambda *_: None  # (params, batch_stats, obs) -> (outputs, batch_stats)


class ActorCritic(NamedTuple):
    """The outputs of a policy (logits, means ...) and a value, from one tree of parameters."""

    init: Callable[[Key], PyTree]
    actor: Callable[[PyTree, PyTree], Array]  # (params, obs) -> [..., num_outputs]; without memory
    critic: Callable[[PyTree, PyTree], Array]  # (params, obs) -> [...]; without memory
    both: Callable[[PyTree, PyTree], tuple[Array, Array]]  # without memory
    step: Callable[[PyTree, PyTree, PyTree], tuple[Array, PyTree]]  # (params, obs, carry) -> (actor's output, carry)
    act: Callable[[PyTree, PyTree, PyTree], tuple[Array, PyTree]]  # the same, without the critic's part of the carry
    unroll: Callable[..., tuple[tuple[Array, Array], PyTree]]  # (params, obs, carry, reset) -> (both outputs, carry)
    initial_carry: PyTree = ()
    num_features: int = 0  # F with `with_features`, which the actor's output ends with


def options_of(config: Algorithm) -> dict[str, Any]:
    """Return the options of an algorithm's network, as keywords of `network` and `actor_critic`."""
    chosen = config.network
    return dict(
        kind=chosen.kind,
        arguments=chosen.arguments,
        observations=chosen.observations,
        hidden=chosen.hidden_sizes,
        activation=chosen.activation,
        layer_norm=chosen.layer_norm,
        kernel_init=chosen.kernel_init,
        dtype=jnp.dtype(chosen.compute_dtype),
    )


def memory_of(config: Algorithm) -> dict[str, Any]:
    """Return the options of an algorithm's memory, as keywords of `network` and `actor_critic`."""
    chosen = config.memory
    return dict(memory=chosen.kind, memory_size=chosen.size) if isinstance(chosen, Recurrent) else {}


def network(
    obs: PyTree,
    num_outputs: int,
    *,
    num_atoms: int | None = None,
    dueling: bool = False,
    gain: float = 1.0,
    kernel_init: str = "orthogonal",
    memory: str = "none",
    memory_size: int = 128,
    **options,
) -> Network:
    """Return a torso with a linear head, for observations like `obs` (ShapeDtypeStruct). `options` are `torso.Options`.

    `kernel_init` is one of `init.KINDS`, `memory` is "none" or one of `networks.memory.KINDS`.

    With `num_atoms`, each output is a distribution of `num_atoms` numbers. With `dueling`, two streams each have the
    last dense layer and a head. One gives the state's value, the other the advantages minus their mean (Wang et al.
    2016, "Dueling network architectures", eq. 9). Without noise, noisy layers use their means.
    """
    layer, initial_carry = _memory(memory, memory_size)
    streams: list[nn.Module] = []
    if dueling:
        trunk, streams = torso.split(obs, 2, layer is not None, **options)
    else:
        trunk = torso.make(obs, **options)
    module: Any = _Outputs(trunk, layer, streams, num_outputs, num_atoms, gain, options.get("noisy", False))

    def unroll(params, obs, carry=(), reset=None, noise=()):
        return module.apply({**params, "noise": noise} if noise else params, (obs, carry, reset))

    def train(params, batch_stats, obs):
        (output, _), changed = module.apply(with_stats(params, batch_stats), (obs, (), None), mutable=[STATS])
        return output, changed[STATS]

    inputs = torso.with_action(obs, options.get("action_size", 0)), initial_carry, None
    return Network(
        init=lambda key: init_params(module, inputs, key, kernel_init),
        apply=lambda params, obs, noise=(): unroll(params, obs, noise=noise)[0],
        noise=lambda key, shape: layer_noise(module, inputs, key, shape),
        step=lambda params, obs, carry, noise=(): unroll(params, obs, carry, None, noise),
        unroll=unroll,
        initial_carry=initial_carry,
        init_stats=lambda: module.lazy_init(key_of_seed(0), inputs).get(STATS),
        train=train,
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
    with_features: bool = False,
    kernel_init: str = "orthogonal",
    memory: str = "none",
    memory_size: int = 128,
    **options,
) -> ActorCritic:
    """Return a policy and a value, for observations like `obs` (ShapeDtypeStruct). Other options: `network`.

    By default, the two share a convolutional torso and its memory. With an mlp, each has a torso and a memory, and the
    carry is a pair, of the actor and of the critic. With `with_features`, the actor's output ends with the features
    [..., F] that its head reads.
    """
    kind = torso.choose_kind(obs, kind, observations)
    options |= {"kind": kind, "observations": observations}
    shared = kind not in torso.VECTORS if shared is None else shared
    torsos = torso.make(obs, **options), None if shared else torso.make(obs, **options)
    layer, carry = _memory(memory, memory_size)
    critic_layer, critic_carry = (None, ()) if shared else _memory(memory, memory_size)
    module: Any = _ActorCritic(*torsos, layer, critic_layer, num_outputs, actor_gain, critic_gain, with_features)
    unroll = lambda params, obs, carry=(), reset=None: module.apply(params, (obs, carry, reset))
    num_features = 0
    if with_features:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), (obs, carry + critic_carry))
        output, _ = jax.eval_shape(partial(module.init_with_output, method="actor"), jax.random.key(0), *one)[0]
        num_features = output.shape[-1] - num_outputs
    return ActorCritic(
        init=lambda key: init_params(module, (obs, carry + critic_carry, None), key, kernel_init),
        actor=lambda params, obs: module.apply(params, obs, (), method="actor")[0],
        critic=lambda params, obs: module.apply(params, obs, method="critic"),
        both=lambda params, obs: unroll(params, obs)[0],
        step=partial(module.apply, method="step"),
        act=partial(module.apply, method="actor"),
        unroll=unroll,
        initial_carry=carry + critic_carry,
        num_features=num_features,
    )


class _Outputs(nn.Module):
    """Linear heads on a torso, in float32: [..., num_outputs], or [..., num_outputs, num_atoms]."""

    torso: nn.Module
    memory: nn.Module | None
    streams: list[nn.Module]  # none, or dense layers of the state's value and of the advantages
    num_outputs: int
    num_atoms: int | None
    gain: float
    noisy: bool

    def setup(self):
        widths = (1, self.num_outputs) if self.streams else (self.num_outputs,)
        layer = NoisyDense if self.noisy else Dense
        self.heads = [layer(width * (self.num_atoms or 1), self.gain) for width in widths]

    def __call__(self, inputs):
        obs, carry, reset = inputs
        carry, features = _remember(self.memory, carry, self.torso(obs), reset)
        if not self.streams:
            return self._shape(self.heads[0](features), self.num_outputs), carry
        value, advantage = (head(stream(features)) for head, stream in zip(self.heads, self.streams, strict=True))
        value, advantage = self._shape(value, 1), self._shape(advantage, self.num_outputs)
        return value + advantage - advantage.mean(axis=-1 if self.num_atoms is None else -2, keepdims=True), carry

    def _shape(self, x, width):
        return x if self.num_atoms is None else x.reshape(*x.shape[:-1], width, self.num_atoms)


class _ActorCritic(nn.Module):
    """Linear heads of a policy, [..., num_outputs], and of a value, [...]. The carry has a part for each memory."""

    torso: nn.Module
    critic_torso: Any  # None: the critic has `torso` and `memory` too
    memory: nn.Module | None
    critic_memory: nn.Module | None
    num_outputs: int
    actor_gain: float
    critic_gain: float
    with_features: bool

    def setup(self):
        self.actor_head = Dense(self.num_outputs, self.actor_gain)
        self.critic_head = Dense(1, self.critic_gain)

    def actor(self, obs, carry):
        own, features = _remember(self.memory, carry[:1], self.torso(obs))
        return self._policy(features), own + carry[1:]

    def step(self, obs, carry):
        output, carry = self.actor(obs, carry)
        if self.critic_memory is not None:
            carry = carry[:1] + _remember(self.critic_memory, carry[1:], self.critic_torso(obs))[0]
        return output, carry

    def critic(self, obs):
        return self.critic_head((self.critic_torso or self.torso)(obs))[..., 0]

    def __call__(self, inputs):
        obs, carry, reset = inputs
        own, features = _remember(self.memory, carry[:1], self.torso(obs), reset)
        critic_own, critic_features = carry[1:], features
        if self.critic_torso is not None:
            critic_own, critic_features = _remember(self.critic_memory, carry[1:], self.critic_torso(obs), reset)
        return (self._policy(features), self.critic_head(critic_features)[..., 0]), own + critic_own

    def _policy(self, features):
        output = self.actor_head(features)
        return jnp.concatenate([output, features], axis=-1) if self.with_features else output


def _memory(kind: str, size: int) -> tuple[nn.Module | None, tuple[PyTree, ...]]:
    """Return a memory and its initial carry in a tuple; None and () for the kind "none"."""
    layer, carry = memory_module.make(kind, size)
    return layer, () if layer is None else (carry,)


def _remember(memory, carry, features, reset=None):
    """Return the carry in a tuple, and the memory's output for features; without a memory, both arguments unchanged.

    The memory reads features of boards, [..., F, H, W], as vectors.
    """
    if memory is None:
        return carry, features
    batch = jax.tree.leaves(carry)[0].shape[:-1] if reset is None else reset.shape
    after, features = memory(carry[0], features.reshape(*batch, -1), reset)
    return (after,), features
