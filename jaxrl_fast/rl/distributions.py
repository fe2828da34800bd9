"""Distributions over actions: records of parameters that sample, score and compare.

Leading axes are free. The last axis of the parameters is the number of actions A (Categorical, EpsilonGreedy) or the
dimension of one action D (Gaussian, TanhGaussian), over which log-probabilities, entropies and divergences are summed.
They are in nats. `sample_from` takes noise drawn in bulk: `sample(key)` is `sample_from` of fresh noise. `head` gives
the distribution for an action space.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.types import Box, Discrete, Key, MultiDiscrete, PyTree, Space

FORBIDDEN = -1e9  # logit or value of a masked action: finite, so that 0 times it is 0


def chosen(x: Array, action: Array) -> Array:
    """[..., rest] of x [..., A, rest] at int actions [...].

    Selecting by comparison fuses where a gather and its scatter do not.
    """
    axis = action.ndim
    mask = jax.nn.one_hot(action, x.shape[axis], dtype=bool)
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, 0).sum(axis)


def masked(logits: Array, mask: Array | tuple[()] = ()) -> Array:
    """Return logits or action values [..., A] with FORBIDDEN where mask [..., A] is False; () masks nothing."""
    return logits if isinstance(mask, tuple) else jnp.where(mask, logits, FORBIDDEN)


class Categorical(NamedTuple):
    """One of A actions, with probabilities softmax(logits). A logit of -inf or FORBIDDEN forbids an action."""

    logits: Array  # [..., A]

    def sample(self, key: Key) -> Array:
        """int32 [...]"""
        return self.sample_from(jax.random.gumbel(key, self.logits.shape))

    def sample_from(self, noise: Array) -> Array:
        """int32 [...] from standard Gumbel noise [..., A] (the Gumbel-max trick)."""
        return jnp.argmax(self.logits + noise, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        """f32 [...] of int actions [...]."""
        return chosen(jax.nn.log_softmax(self.logits), action)

    def entropy(self) -> Array:
        """f32 [...]: -sum p log p, where 0 log 0 = 0."""
        return -_expect(self.logits, jax.nn.log_softmax(self.logits))

    def mode(self) -> Array:
        """int32 [...]: the most probable action, the first of equals."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def kl(self, other: "Categorical") -> Array:
        """f32 [...]: KL(self || other)."""
        return _expect(self.logits, jax.nn.log_softmax(self.logits) - jax.nn.log_softmax(other.logits))


@partial(jax.tree_util.register_dataclass, data_fields=["logits"], meta_fields=["nums"])
@dataclass(frozen=True)
class MultiCategorical:
    """k independent choices: a Categorical for each, their logits side by side."""

    logits: Array  # [..., sum(nums)]
    nums: tuple[int, ...]

    def sample(self, key: Key) -> Array:
        """int32 [..., k]"""
        return self.sample_from(jax.random.gumbel(key, self.logits.shape))

    def sample_from(self, noise: Array) -> Array:
        """int32 [..., k] from standard Gumbel noise [..., sum(nums)]."""
        return self._stack(one.sample_from(part) for one, part in zip(self.parts, self._split(noise), strict=True))

    def log_prob(self, action: Array) -> Array:
        """f32 [...] of int actions [..., k]."""
        return jnp.stack([one.log_prob(action[..., i]) for i, one in enumerate(self.parts)]).sum(0)

    def entropy(self) -> Array:
        """f32 [...]"""
        return jnp.stack([one.entropy() for one in self.parts]).sum(0)

    def mode(self) -> Array:
        """int32 [..., k]"""
        return self._stack(one.mode() for one in self.parts)

    def kl(self, other: "MultiCategorical") -> Array:
        """f32 [...]: KL(self || other)."""
        return jnp.stack([one.kl(two) for one, two in zip(self.parts, other.parts, strict=True)]).sum(0)

    @property
    def parts(self) -> list[Categorical]:
        """One distribution for each choice."""
        return [Categorical(logits) for logits in self._split(self.logits)]

    def _split(self, x: Array) -> list[Array]:
        return jnp.split(x, np.cumsum(self.nums)[:-1], axis=-1)

    def _stack(self, actions: Any) -> Array:
        return jnp.stack(list(actions), axis=-1)


class EpsilonGreedy(NamedTuple):
    """The action of the highest value, or with probability epsilon any allowed action, all equally likely."""

    value: Array  # [..., A], FORBIDDEN where masked
    epsilon: float | Array  # [...]
    mask: Array | tuple[()] = ()  # [..., A] bool; (): all actions are allowed

    def sample(self, key: Key) -> Array:
        """int32 [...]"""
        return self.sample_from(jax.random.uniform(key, (2, *self.value.shape[:-1])))

    def sample_from(self, noise: Array) -> Array:
        """int32 [...] from two uniform numbers [2, ...]: a coin for each row, and the action if it says so."""
        coin, which = noise
        if isinstance(self.mask, tuple):
            num_actions = self.value.shape[-1]
            anything = jnp.minimum((which * num_actions).astype(jnp.int32), num_actions - 1)
        else:
            num_allowed = self.mask.sum(-1)
            rank = jnp.minimum((which * num_allowed).astype(jnp.int32), num_allowed - 1)
            anything = jnp.argmax(jnp.cumsum(self.mask, axis=-1) > rank[..., None], axis=-1).astype(jnp.int32)
        return jnp.where(coin < self.epsilon, anything, self.mode())

    def mode(self) -> Array:
        """int32 [...]: the first of equals."""
        return jnp.argmax(self.value, axis=-1).astype(jnp.int32)


class Gaussian(NamedTuple):
    """Independent normal coordinates."""

    mean: Array  # [..., D]
    log_std: Array  # [..., D], or [D] for all states

    def sample(self, key: Key) -> Array:
        """f32 [..., D]"""
        return self.sample_from(jax.random.normal(key, self.mean.shape))

    def sample_from(self, noise: Array) -> Array:
        """f32 [..., D] from standard normal noise [..., D]."""
        return self.mean + jnp.exp(self._log_std) * noise

    def log_prob(self, action: Array) -> Array:
        """f32 [...] of actions [..., D]."""
        score = (action - self.mean) * jnp.exp(-self._log_std)
        return -jnp.sum(0.5 * score**2 + self._log_std + 0.5 * np.log(2 * np.pi), axis=-1)

    def entropy(self) -> Array:
        """f32 [...]"""
        return jnp.sum(self._log_std + 0.5 * np.log(2 * np.pi * np.e), axis=-1)

    def mode(self) -> Array:
        """f32 [..., D]"""
        return self.mean

    def kl(self, other: "Gaussian") -> Array:
        """f32 [...]: KL(self || other)."""
        ratio = self._log_std - other._log_std
        distance = (self.mean - other.mean) * jnp.exp(-other._log_std)
        return 0.5 * jnp.sum(jnp.expm1(2 * ratio) - 2 * ratio + distance**2, axis=-1)

    @property
    def _log_std(self) -> Array:
        return jnp.broadcast_to(self.log_std, self.mean.shape)


class TanhGaussian(NamedTuple):
    """The tanh of a Gaussian: actions in [-1, 1] (Haarnoja et al. 2018, "Soft Actor-Critic", appendix C).

    An action tanh(x) is named by its x in all that is drawn, scored and compared here. It could not be found again from
    the action: float32 rounds the tanh of 9.1 and more to 1, and about 7 those of many neighbors to one number.
    """

    mean: Array  # [..., D] before the tanh
    log_std: Array  # [..., D], or [D] for all states

    def sample(self, key: Key) -> Array:
        """x, f32 [..., D]"""
        return self.gaussian.sample(key)

    def sample_from(self, noise: Array) -> Array:
        """x, f32 [..., D], from standard normal noise [..., D]."""
        return self.gaussian.sample_from(noise)

    def log_prob(self, x: Array) -> Array:
        """f32 [...] of the actions tanh(x), x [..., D]."""
        return self.gaussian.log_prob(x) - _log_slope(x).sum(-1)

    def entropy(self) -> Array:
        """f32 [...]: the Gaussian's plus E[log tanh'], by Gauss-Hermite quadrature.

        Right to 1e-4 for standard deviations up to 1.6, to 2e-3 up to 2.7 and to about 1% beyond.
        """
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        noise = jnp.asarray(nodes, jnp.float32).reshape(*(1,) * (self.mean.ndim - 1), -1, 1)  # beside [..., 1, D]
        std = jnp.exp(jnp.broadcast_to(self.log_std, self.mean.shape))
        before = self.mean[..., None, :] + std[..., None, :] * noise
        stretch = jnp.einsum("...kd,k->...", _log_slope(before), jnp.asarray(weights / weights.sum(), jnp.float32))
        return self.gaussian.entropy() + stretch

    def mode(self) -> Array:
        """x, f32 [..., D], of the median action, tanh(mean). The density itself may peak at the edges."""
        return self.mean

    def kl(self, other: "TanhGaussian") -> Array:
        """f32 [...]: KL(self || other), which no bijection changes."""
        return self.gaussian.kl(other.gaussian)

    @property
    def gaussian(self) -> Gaussian:
        """What is drawn before the tanh."""
        return Gaussian(self.mean, self.log_std)


class Head(NamedTuple):
    """The distribution over an action space, and what it needs from a network and an agent."""

    num_outputs: int  # of the network
    init: Callable[[float], PyTree]  # parameters beside the network's, from a log standard deviation: () or f32 [D]
    make: Callable[..., Any]  # (outputs [..., num_outputs], parameters, mask=()) -> distribution
    sample_noise: Callable[[Key, int, int], Array]  # (key, T, N): noise for `sample_from`, [T, N, ...]
    to_action: Callable[[Array], Array]  # from what was sampled to the action


def head(space: Space, tanh_squash: bool = False) -> Head:
    """Return the distribution over an action space: categorical, multi-categorical, or (tanh-)Gaussian.

    Raises ValueError for a Box that is not of shape [D].
    """
    same = lambda x: x
    gumbel = lambda key, num_steps, num_envs: jax.random.gumbel(key, (num_steps, num_envs, space.num_outputs))
    if isinstance(space, Discrete):
        return Head(space.num, lambda _: (), lambda x, _, mask=(): Categorical(masked(x, mask)), gumbel, same)
    if isinstance(space, MultiDiscrete):
        make = lambda x, _, mask=(): MultiCategorical(masked(x, mask), space.nums)
        return Head(space.num_outputs, lambda _: (), make, gumbel, same)
    assert isinstance(space, Box)
    if len(space.shape) != 1:
        raise ValueError(f"action: requires shape [D], got {list(space.shape)}")
    kind = TanhGaussian if tanh_squash else Gaussian
    return Head(
        num_outputs=space.num_outputs,
        init=partial(jnp.full, space.shape, dtype=jnp.float32),
        make=lambda x, log_std, mask=(): kind(x, jnp.broadcast_to(log_std, x.shape)),
        sample_noise=lambda key, num_steps, num_envs: jax.random.normal(key, (num_steps, num_envs, *space.shape)),
        to_action=jnp.tanh if tanh_squash else same,
    )


def _expect(logits: Array, x: Array) -> Array:
    """sum p x over the last axis. Impossible actions count nothing, whatever their x, also in the gradient."""
    probs = jnp.exp(jax.nn.log_softmax(logits))
    return jnp.sum(probs * jnp.where(probs > 0, x, 0), axis=-1)


def _log_slope(x: Array) -> Array:
    """log tanh'(x) = 2 (log 2 - x - softplus(-2 x)), which neither cancels nor overflows."""
    slope: Array = 2 * (np.log(2) - x - jax.nn.softplus(-2 * x))
    return slope
