"""Define the distribution over actions of choices and numbers: a product of a categorical and a (tanh-)Gaussian.

An action is float32 [..., k + D], the choices as whole numbers before the numbers; see `types.spaces.Hybrid`. Choices
and numbers are independent given the state, so log-probabilities, entropies and divergences are sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.rl.distributions import Gaussian, MultiCategorical, TanhGaussian
from jaxrl_fast.rl.heads import GaussianHead, Head, MultiCategoricalHead, StateGaussianHead
from jaxrl_fast.types import Box, Key, MultiDiscrete, PyTree, SampleNoise


class Noise(NamedTuple):
    """Random numbers for decisions."""

    gumbel: Array  # [..., sum(nums)]
    normal: Array  # [..., D]


class Product(NamedTuple):
    """k choices and D numbers. A TanhGaussian's numbers are those before the tanh."""

    choices: MultiCategorical
    numbers: Gaussian | TanhGaussian

    def sample(self, key: Key) -> Array:
        """Sample actions, f32 [..., k + D]."""
        key_choices, key_numbers = jax.random.split(key)
        return _joined(self.choices.sample(key_choices), self.numbers.sample(key_numbers))

    def sample_from(self, noise: Noise) -> Array:
        """Sample actions, f32 [..., k + D]."""
        return _joined(self.choices.sample_from(noise.gumbel), self.numbers.sample_from(noise.normal))

    def log_prob(self, action: Array) -> Array:
        """Return the log-densities of actions [..., k + D], f32 [...]."""
        num = len(self.choices.nums)
        return self.choices.log_prob(action[..., :num].astype(jnp.int32)) + self.numbers.log_prob(action[..., num:])

    def entropy(self) -> Array:
        """Return the entropies, f32 [...]."""
        return self.choices.entropy() + self.numbers.entropy()

    def mode(self) -> Array:
        """Return the most probable choices and the numbers' modes, f32 [..., k + D]."""
        return _joined(self.choices.mode(), self.numbers.mode())

    def kl(self, other: "Product") -> Array:
        """Return the divergences KL(self || other), f32 [...]."""
        same: Any = other.numbers  # of the same kind
        return self.choices.kl(other.choices) + self.numbers.kl(same)


@dataclass(frozen=True)
class ProductHead(Head):
    """A Product, with the logits as the first outputs. The standard deviations are those of a Gaussian alone."""

    squash: bool = False
    offset: float | Array | None = None  # of log standard deviations that depend on the state; None: they do not

    @cached_property
    def choices(self) -> MultiCategoricalHead:
        return MultiCategoricalHead(MultiDiscrete(self.space.nums))

    @cached_property
    def numbers(self) -> GaussianHead:
        box = Box((self.space.size,))
        return (
            GaussianHead(box, self.squash) if self.offset is None else StateGaussianHead(box, self.squash, self.offset)
        )

    @property
    def num_outputs(self) -> int:
        return self.choices.num_outputs + self.numbers.num_outputs

    @property
    def sample_noise(self) -> Callable[[Key, int, int], PyTree]:
        return SampleNoise(self._noise, ("gumbel", "normal"))

    def _noise(self, key: Key, num_steps: int, num_envs: int) -> Noise:
        keys = jax.random.split(key)
        return Noise(
            *(head.sample_noise(k, num_steps, num_envs) for head, k in zip((self.choices, self.numbers), keys))
        )

    def init(self, log_std: float) -> PyTree:
        return self.numbers.init(log_std)

    def make(self, outputs: Array, params: PyTree, mask: Array | None = None) -> Product:
        logits, rest = jnp.split(outputs, [self.choices.num_outputs], axis=-1)
        return Product(self.choices.make(logits, None, mask), self.numbers.make(rest, params))

    def to_action(self, sample: Array) -> Array:
        num = len(self.space.nums)
        return jnp.concatenate([sample[..., :num], self.numbers.to_action(sample[..., num:])], axis=-1)


def _joined(choices: Array, numbers: Array) -> Array:
    return jnp.concatenate([choices.astype(jnp.float32), numbers], axis=-1)
