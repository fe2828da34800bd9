"""Make networks: a torso chosen by the shape of the observation, and linear heads.

A network is a record of pure functions. Observations are [..., *shape] with any leading axes. Parameters and outputs
are float32, whatever `dtype` intermediate results have. Layers are computed by `jaxrl_fast.kernels`.

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

from jaxrl_fast.networks import flat, memory, torsos, views
from jaxrl_fast.networks.batch_renorm import STATS, with_stats
from jaxrl_fast.networks.dense import Dense, NoisyDense
from jaxrl_fast.networks.init import init_params, layer_noise
from jaxrl_fast.networks.options import Options as Options
from jaxrl_fast.networks.options import options_of as options_of
from jaxrl_fast.types import Key, PyTree
from jaxrl_fast.utils import target
from jaxrl_fast.utils.random import key_of_seed


class Network(NamedTuple):
    """A function of observations that has parameters."""

    init: Callable[[Key], PyTree]
    apply: Callable[..., Array]  # (params, obs [..., *shape], noise=()) -> [..., num_outputs (, num_atoms)]; no memory
    noise: Callable[[Key, tuple[int, ...]], PyTree]  # of each noisy layer, [*shape, K]; () without any
    step: Callable[..., tuple[Array, PyTree]]  # (params, obs, carry, noise=()) -> (outputs, carry)
    unroll: Callable[..., tuple[Array, PyTree]]  # (params, obs, carry, reset, noise=()) -> (outputs, carry)
    initial_carry: PyTree = ()
    init_stats: Callable[[], PyTree] = lambda: None  # running statistics of layers that normalize batches
    train: Callable[..., Any] = lambda *_: None  # (params, batch_stats, obs) -> (outputs, batch_stats)
    constrain: Callable[[PyTree], PyTree] = lambda params: params  # what holds after each optimizer step


class ActorCritic(NamedTuple):
    """The outputs of a policy (logits, means ...) and a value, from one tree of parameters.

    With `num_atoms`, a value has an axis [..., M].
    """

    init: Callable[[Key], PyTree]
    actor: Callable[[PyTree, PyTree], Array]  # (params, obs) -> [..., num_outputs]; without memory
    critic: Callable[[PyTree, PyTree], Array]  # (params, obs) -> [...]; without memory
    both: Callable[[PyTree, PyTree], tuple[Array, Array]]  # (params, obs) -> ([..., num_outputs], [...]); no memory
    step: Callable[[PyTree, PyTree, PyTree], tuple[Array, PyTree]]  # (params, obs, carry) -> (actor's output, carry)
    act: Callable[[PyTree, PyTree, PyTree], tuple[Array, PyTree]]  # the same, without the critic's part of the carry
    unroll: Callable[..., tuple[tuple[Array, Array], PyTree]]  # (params, obs, carry, reset) -> (both outputs, carry)
    initial_carry: PyTree = ()
    num_features: int = 0  # F with `with_features`, which the actor's output ends with


def network(obs: PyTree, num_outputs: int | None, options: Options = Options()) -> Network:
    """Return a torso with a linear head, for observations like `obs` (ShapeDtypeStruct).

    With None for `num_outputs`, it has one output, without an axis.
    """
    layer = memory.make(options.memory, options.memory_size)
    trunk = torsos.make(obs, options, whole=not options.dueling)
    streams = [torsos.last_layer(obs, options) for _ in range(2 if options.dueling else 0)]
    module: Any = _Outputs(trunk, layer, streams, num_outputs, options.num_atoms, options.noisy)
    initial_carry = _initial_carry(layer)

    def unroll(params, obs, carry=(), reset=None, noise=()):
        params = flat.unpack(params)
        return module.apply({**params, "noise": noise} if noise else params, (obs, carry, reset))

    def train(params, batch_stats, obs):
        variables = with_stats(flat.unpack(params), flat.unpack(batch_stats))
        (output, _), changed = module.apply(variables, (obs, (), None), mutable=[STATS])
        return output, flat.like(changed[STATS], batch_stats)

    inputs = options.inputs(obs), initial_carry, None
    constrain = torsos.kind_of(torsos.resolve(obs, options).kind).constrain
    return Network(
        init=lambda key: constrain(init_params(module, inputs, key, options.kernel_init)),
        apply=lambda params, obs, noise=(): unroll(params, obs, noise=noise)[0],
        noise=lambda key, shape: layer_noise(module, inputs, key, shape),
        step=lambda params, obs, carry, noise=(): unroll(params, obs, carry, None, noise),
        unroll=unroll,
        initial_carry=initial_carry,
        init_stats=lambda: module.lazy_init(key_of_seed(0), inputs).get(STATS),
        train=train,
        constrain=lambda params: flat.like(constrain(flat.unpack(params)), params),
    )


def actor_critic(
    obs: PyTree,
    num_outputs: int,
    options: Options = Options(),
    *,
    shared: bool | None = None,
    sees: tuple[views.View, views.View] = (views.everything, views.everything),
    actor_gain: float = 0.01,
    with_features: bool = False,
) -> ActorCritic:
    """Return a policy and a value, for observations like `obs` (ShapeDtypeStruct).

    By default, the two share a convolutional torso and its memory. With an mlp, each has a torso and a memory, and the
    carry is a pair, of the actor and of the critic. `sees` selects what each of the two sees of an observation; where
    these differ, they share nothing. With `with_features`, the actor's output ends with the features
    [..., F] that its head reads.
    """
    same = sees[0] is sees[1]
    seen, seen_by_critic = (view(obs) for view in sees)
    default = same and torsos.resolve(seen, options).kind not in torsos.VECTORS
    shared = default if shared is None else shared
    both = torsos.make(seen, options), None if shared else torsos.make(seen_by_critic, options)
    make_memory = partial(memory.make, options.memory, options.memory_size)
    memories = make_memory(), None if shared else make_memory()
    carry = _initial_carry(*memories)
    module: Any = _ActorCritic(*both, *memories, *sees, num_outputs, actor_gain, with_features, options.num_atoms)
    unroll = lambda params, obs, carry=(), reset=None: module.apply(params, (obs, carry, reset))
    num_features = 0
    if with_features:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), (obs, carry))
        output, _ = jax.eval_shape(partial(module.init_with_output, method="actor"), jax.random.key(0), *one)[0]
        num_features = output.shape[-1] - num_outputs
    return ActorCritic(
        init=lambda key: init_params(module, (obs, carry, None), key, options.kernel_init),
        actor=lambda params, obs: module.apply(params, obs, (), method="actor")[0],
        critic=lambda params, obs: module.apply(params, obs, method="critic"),
        both=lambda params, obs: unroll(params, obs)[0],
        step=partial(module.apply, method="step"),
        act=partial(module.apply, method="actor"),
        unroll=unroll,
        initial_carry=carry,
        num_features=num_features,
    )


class _Outputs(nn.Module):
    """Linear heads on a torso, in float32: [..., num_outputs], or [..., num_outputs, num_atoms]."""

    torso: nn.Module
    memory: nn.Module | None
    streams: list[nn.Module]  # none, or dense layers of the state's value and of the advantages
    num_outputs: int | None  # None: one, without an axis
    num_atoms: int | None
    noisy: bool

    def setup(self):
        widths = [1] * bool(self.streams) + [self.num_outputs or 1]
        layer = NoisyDense if self.noisy else Dense
        self.heads = [layer(width * (self.num_atoms or 1), 1.0) for width in widths]

    def __call__(self, inputs):
        obs, carry, reset = inputs
        carry, features = _remember(self.memory, carry, self.torso(obs), reset)
        axis = -1 if self.num_atoms is None else -2  # of the outputs
        if not self.streams:
            output = self._shape(self.heads[0](features))
            return output.squeeze(axis) if self.num_outputs is None else output, carry
        value, advantage = (
            self._shape(head(stream(features))) for head, stream in zip(self.heads, self.streams, strict=True)
        )
        return value + advantage - advantage.mean(axis=axis, keepdims=True), carry

    def _shape(self, x):
        return x if self.num_atoms is None else x.reshape(*x.shape[:-1], -1, self.num_atoms)


class _ActorCritic(nn.Module):
    """Linear heads of a policy, [..., num_outputs], and of a value, [...] or [..., num_atoms].

    The carry has a part for each memory.
    """

    torso: nn.Module
    critic_torso: Any  # None: the critic has `torso` and `memory` too
    memory: nn.Module | None
    critic_memory: nn.Module | None
    see: views.View  # what the actor sees
    critic_sees: views.View
    num_outputs: int
    actor_gain: float
    with_features: bool
    num_atoms: int | None = None

    def setup(self):
        self.actor_head = Dense(self.num_outputs, self.actor_gain)
        self.critic_head = Dense(self.num_atoms or 1, 1.0)

    def actor(self, obs, carry):
        own, features = _remember(self.memory, carry[:1], self.torso(self.see(obs)))
        return self._policy(features), own + carry[1:]

    def step(self, obs, carry):
        output, carry = self.actor(obs, carry)
        if self.critic_memory is not None:
            carry = carry[:1] + _remember(self.critic_memory, carry[1:], self.critic_torso(self.critic_sees(obs)))[0]
        return output, carry

    def critic(self, obs):
        return self._value(self.critic_head((self.critic_torso or self.torso)(self.critic_sees(obs))))

    def __call__(self, inputs):
        obs, carry, reset = inputs
        alike = self.critic_torso is not None and self.see is self.critic_sees
        if alike and not self.is_initializing() and target.platform() != "cpu":
            return self._side_by_side(self.see(obs), carry, reset)
        own, features = _remember(self.memory, carry[:1], self.torso(self.see(obs)), reset)
        critic_own, critic_features = carry[1:], features
        if self.critic_torso is not None:
            features_before = self.critic_torso(self.critic_sees(obs))
            critic_own, critic_features = _remember(self.critic_memory, carry[1:], features_before, reset)
        return (self._policy(features), self._value(self.critic_head(critic_features))), own + critic_own

    def _side_by_side(self, obs, carry, reset):
        """Compute actor and critic in the same kernels, as a batch of two networks with equal shapes."""
        parts: Any = (self.torso, self.critic_torso), (self.memory, self.critic_memory)
        pairs = [(pair[0].clone(parent=None), _stack(*(x.variables for x in pair))) for pair in parts if pair[0]]

        def one(variables, carry):
            torso, *memory = (partial(module.apply, x) for (module, _), x in zip(pairs, variables))
            return _remember(memory[0] if memory else None, carry, torso(obs), reset)

        carries, features = jax.vmap(one)([x for _, x in pairs], _stack(carry[:1], carry[1:]))
        width = max(self.num_outputs, self.num_atoms or 1)
        wide = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
        heads = _stack(*(jax.tree.map(wide, head.variables) for head in (self.actor_head, self.critic_head)))
        output: Any = jax.vmap(self.actor_head.clone(parent=None, features=width).apply)(heads, features)
        policy, value = output[0][..., : self.num_outputs], output[1][..., : self.num_atoms or 1]
        policy = jnp.concatenate([policy, features[0]], axis=-1) if self.with_features else policy
        own, critic_own = jax.tree.map(lambda x: x[0], carries), jax.tree.map(lambda x: x[1], carries)
        return (policy, self._value(value)), own + critic_own

    def _value(self, output):
        return output[..., 0] if self.num_atoms is None else output

    def _policy(self, features):
        output = self.actor_head(features)
        return jnp.concatenate([output, features], axis=-1) if self.with_features else output


def _stack(*trees):
    """Return trees of equal shapes as one, [number of trees, ...]."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _initial_carry(*memories: memory.Memory | None) -> tuple[PyTree, ...]:
    """Return the carry at the start of an episode: a part for each memory."""
    return tuple(layer.initial_carry(layer.size) for layer in memories if layer is not None)


def _remember(memory, carry, features, reset=None):
    """Return the carry in a tuple, and the memory's output for features; without a memory, both arguments unchanged.

    The memory reads features of boards, [..., F, H, W], as vectors.
    """
    if memory is None:
        return carry, features
    batch = jax.tree.leaves(carry)[0].shape[:-1] if reset is None else reset.shape
    after, features = memory(carry[0], features.reshape(*batch, -1), reset)
    return (after,), features
