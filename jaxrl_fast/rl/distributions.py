"""Define distributions over actions: records of parameters that sample, score and compare.

Leading axes are arbitrary. The last axis of the parameters is the number of actions A (Categorical, EpsilonGreedy) or
the dimension D of one action (Gaussian, TanhGaussian). Log-probabilities, entropies and divergences are summed over D;
they are in nats. `sample_from` takes noise drawn in bulk; `sample(key)` is `sample_from` with noise drawn from the key.
`heads.head` returns the distribution for an action space.
"""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast.types import Key
from jaxrl_fast.utils import target

MAX_UNROLLED = 8  # actions whose probabilities are computed without a reduction off a CPU
FORBIDDEN = -1e9  # logit or value of a masked action: finite, so that 0 times it is 0


def chosen(x: Array, action: Array) -> Array:
    """Return x [..., A, rest] at int actions [...], as [..., rest].

    XLA fuses a selection by comparison, but not a gather and the scatter of its gradient.
    """
    axis = action.ndim
    mask = jax.nn.one_hot(action, x.shape[axis], dtype=bool)
    return _sum(jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, 0), axis)


def masked(logits: Array, mask: Array | None = None) -> Array:
    """Return logits or action values [..., A] with FORBIDDEN where mask [..., A] is False; None masks nothing."""
    return logits if mask is None else jnp.where(mask, logits, FORBIDDEN)


class Categorical(NamedTuple):
    """One of A actions, with probabilities softmax(logits). A logit of -inf or FORBIDDEN forbids an action."""

    logits: Array  # [..., A]

    def sample(self, key: Key) -> Array:
        """Sample actions, int32 [...]."""
        return self.sample_from(jax.random.gumbel(key, self.logits.shape))

    def sample_from(self, noise: Array) -> Array:
        """Sample actions, int32 [...], from standard Gumbel noise [..., A] (the Gumbel-max trick)."""
        return jnp.argmax(self.logits + noise, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        """Return the log-probabilities of int actions [...], f32 [...]."""
        return chosen(_log_softmax(self.logits), action)

    def entropy(self) -> Array:
        """Return the entropies, f32 [...]: -sum p log p, where 0 log 0 = 0."""
        return -_expect(self.logits, _log_softmax(self.logits))

    def mode(self) -> Array:
        """Return the most probable actions, int32 [...]; ties go to the first."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def probs(self) -> Array:
        """Return the probabilities of all actions, f32 [..., A]."""
        return jnp.exp(self.log_probs())

    def log_probs(self) -> Array:
        """Return the log-probabilities of all actions, f32 [..., A]; FORBIDDEN or less where an action is forbidden."""
        return _log_softmax(self.logits)

    def expect(self, x: Array) -> Array:
        """Return the expectations of x [..., A] over the actions, f32 [...]."""
        return _expect(self.logits, x)

    def kl(self, other: "Categorical") -> Array:
        """Return the divergences KL(self || other), f32 [...]."""
        return _expect(self.logits, _log_softmax(self.logits) - _log_softmax(other.logits))


@partial(jax.tree_util.register_dataclass, data_fields=["logits"], meta_fields=["nums"])
@dataclass(frozen=True)
class MultiCategorical:
    """k independent choices: a Categorical for each, with their logits concatenated."""

    logits: Array  # [..., sum(nums)]
    nums: tuple[int, ...]

    def sample(self, key: Key) -> Array:
        """Sample actions, int32 [..., k]."""
        return self.sample_from(jax.random.gumbel(key, self.logits.shape))

    def sample_from(self, noise: Array) -> Array:
        """Sample actions, int32 [..., k], from standard Gumbel noise [..., sum(nums)]."""
        return self._stack(one.sample_from(part) for one, part in zip(self.parts, self._split(noise), strict=True))

    def log_prob(self, action: Array) -> Array:
        """Return the log-probabilities of int actions [..., k], f32 [...]."""
        return jnp.stack([one.log_prob(action[..., i]) for i, one in enumerate(self.parts)]).sum(0)

    def entropy(self) -> Array:
        """Return the entropies, f32 [...]."""
        return jnp.stack([one.entropy() for one in self.parts]).sum(0)

    def mode(self) -> Array:
        """Return the most probable actions, int32 [..., k]."""
        return self._stack(one.mode() for one in self.parts)

    def kl(self, other: "MultiCategorical") -> Array:
        """Return the divergences KL(self || other), f32 [...]."""
        return jnp.stack([one.kl(two) for one, two in zip(self.parts, other.parts, strict=True)]).sum(0)

    @property
    def parts(self) -> list[Categorical]:
        """Return one distribution for each choice."""
        return [Categorical(logits) for logits in self._split(self.logits)]

    def _split(self, x: Array) -> list[Array]:
        return jnp.split(x, np.cumsum(self.nums)[:-1], axis=-1)

    def _stack(self, actions: Any) -> Array:
        return jnp.stack(list(actions), axis=-1)


class EpsilonGreedy(NamedTuple):
    """The action of the highest value, or with probability epsilon a uniformly random allowed action."""

    value: Array  # [..., A], FORBIDDEN where masked
    epsilon: float | Array  # [...]
    mask: Array | None = None  # [..., A] bool; None: all actions are allowed

    def sample(self, key: Key) -> Array:
        """Sample actions, int32 [...]."""
        return self.sample_from(jax.random.uniform(key, (2, *self.value.shape[:-1])))

    def sample_from(self, noise: Array) -> Array:
        """Sample actions, int32 [...], from uniform numbers [2, ...].

        The first number decides whether the action is random; the second selects the random action.
        """
        coin, which = noise
        if self.mask is None:
            num_actions = self.value.shape[-1]
            anything = jnp.minimum((which * num_actions).astype(jnp.int32), num_actions - 1)
        else:
            num_allowed = self.mask.sum(-1)
            rank = jnp.minimum((which * num_allowed).astype(jnp.int32), num_allowed - 1)
            anything = jnp.argmax(jnp.cumsum(self.mask, axis=-1) > rank[..., None], axis=-1).astype(jnp.int32)
        return jnp.where(coin < self.epsilon, anything, self.mode())

    def mode(self) -> Array:
        """Return the actions of the highest value, int32 [...]; ties go to the first."""
        return jnp.argmax(self.value, axis=-1).astype(jnp.int32)


class Gaussian(NamedTuple):
    """Actions of D independent, normally distributed coordinates."""

    mean: Array  # [..., D]
    log_std: Array  # [..., D], or [D] for all states

    def sample(self, key: Key) -> Array:
        """Sample actions, f32 [..., D]."""
        return self.sample_from(jax.random.normal(key, self.mean.shape))

    def sample_from(self, noise: Array) -> Array:
        """Sample actions, f32 [..., D], from standard normal noise [..., D]."""
        return self.mean + jnp.exp(self._log_std) * noise

    def log_prob(self, action: Array) -> Array:
        """Return the log-densities of actions [..., D], f32 [...]."""
        score = (action - self.mean) * jnp.exp(-self._log_std)
        return -jnp.sum(0.5 * score**2 + self._log_std + 0.5 * np.log(2 * np.pi), axis=-1)

    def entropy(self) -> Array:
        """Return the entropies, f32 [...]."""
        return jnp.sum(self._log_std + 0.5 * np.log(2 * np.pi * np.e), axis=-1)

    def mode(self) -> Array:
        """Return the mean actions, f32 [..., D]."""
        return self.mean

    def kl(self, other: "Gaussian") -> Array:
        """Return the divergences KL(self || other), f32 [...]."""
        ratio = self._log_std - other._log_std
        distance = (self.mean - other.mean) * jnp.exp(-other._log_std)
        return 0.5 * jnp.sum(jnp.expm1(2 * ratio) - 2 * ratio + distance**2, axis=-1)

    @property
    def _log_std(self) -> Array:
        return jnp.broadcast_to(self.log_std, self.mean.shape)


class TanhGaussian(NamedTuple):
    """The tanh of a Gaussian: actions in [-1, 1] (Haarnoja et al. 2018, "Soft Actor-Critic", appendix C).

    All methods represent an action tanh(x) by its x, since x cannot be recovered from the action. float32 rounds
    tanh(x) to 1 for x of 9.1 and more, and near 7 many neighboring x have the same tanh.
    """

    mean: Array  # [..., D] before the tanh
    log_std: Array  # [..., D], or [D] for all states

    def sample(self, key: Key) -> Array:
        """Sample x, f32 [..., D]."""
        return self.gaussian.sample(key)

    def sample_from(self, noise: Array) -> Array:
        """Sample x, f32 [..., D], from standard normal noise [..., D]."""
        return self.gaussian.sample_from(noise)

    def log_prob(self, x: Array) -> Array:
        """Return the log-densities of the actions tanh(x), f32 [...], for x [..., D]."""
        return self.gaussian.log_prob(x) - _log_slope(x).sum(-1)

    def entropy(self) -> Array:
        """Return the entropies, f32 [...]: the Gaussian's plus E[log tanh'], by Gauss-Hermite quadrature.

        The error is at most 1e-4 for standard deviations up to 1.6, 2e-3 up to 2.7, and about 1% beyond.
        """
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        noise = jnp.asarray(nodes, jnp.float32).reshape(*(1,) * (self.mean.ndim - 1), -1, 1)  # for [..., 1, D]
        std = jnp.exp(jnp.broadcast_to(self.log_std, self.mean.shape))
        before = self.mean[..., None, :] + std[..., None, :] * noise
        stretch = jnp.einsum("...kd,k->...", _log_slope(before), jnp.asarray(weights / weights.sum(), jnp.float32))
        return self.gaussian.entropy() + stretch

    def mode(self) -> Array:
        """Return x of the median action tanh(mean), f32 [..., D]. The density may have its maximum at the edges."""
        return self.mean

    def kl(self, other: "TanhGaussian") -> Array:
        """Return the divergences KL(self || other), f32 [...]: the Gaussians', since tanh is a bijection."""
        return self.gaussian.kl(other.gaussian)

    @property
    def gaussian(self) -> Gaussian:
        """Return the distribution of x, before the tanh."""
        return Gaussian(self.mean, self.log_std)


def _expect(logits: Array, x: Array) -> Array:
    """Return sum p x over the last axis. Where p is 0, x affects neither the sum nor the gradient."""
    probs = jnp.exp(_log_softmax(logits))
    return _sum(probs * jnp.where(probs > 0, x, 0))


def _log_softmax(logits: Array) -> Array:
    """Return the log-probabilities of logits [..., A]."""
    if not _unrolls(logits):
        return jax.nn.log_softmax(logits)
    shifted = logits - jax.lax.stop_gradient(functools.reduce(jnp.maximum, _columns(logits)))[..., None]
    return shifted - jnp.log(_sum(jnp.exp(shifted)))[..., None]


def _sum(x: Array, axis: int = -1) -> Array:
    """Return the sums over an axis. Off a CPU, few terms are added one by one, which XLA fuses with what follows."""
    return functools.reduce(jnp.add, _columns(x, axis)) if _unrolls(x, axis) else x.sum(axis)


def _unrolls(x: Array, axis: int = -1) -> bool:
    return target.platform() != "cpu" and x.shape[axis] <= MAX_UNROLLED


def _columns(x: Array, axis: int = -1) -> list[Array]:
    return [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


def _log_slope(x: Array) -> Array:
    """Return log tanh'(x) = 2 (log 2 - x - softplus(-2 x)), a form without cancellation or overflow."""
    slope: Array = 2 * (np.log(2) - x - jax.nn.softplus(-2 * x))
    return slope
