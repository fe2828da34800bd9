"""Turn the outputs of a network into a distribution over an action space."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.rl.distributions import Categorical, Gaussian, MultiCategorical, TanhGaussian, masked
from jaxrl_fast.types import Box, Discrete, Key, Law, MultiDiscrete, PyTree, SampleNoise, Space


@dataclass(frozen=True)
class Head:
    """The distribution over an action space, with the outputs, parameters and noise that it requires."""

    space: Any
    law: ClassVar[Law] = "gumbel"  # of the noise

    @property
    def num_outputs(self) -> int:
        """Return the number of the network's outputs."""
        return int(self.space.num_outputs)

    @property
    def sample_noise(self) -> Callable[[Key, int, int], PyTree]:
        """Return the function (key, T, N) to noise for `sample_from`, [T, N, ...]."""
        draw, size = getattr(jax.random, self.law), self.space.num_outputs
        return SampleNoise(lambda key, num_steps, num_envs: draw(key, (num_steps, num_envs, size)), (self.law,))

    def init(self, log_std: float) -> PyTree:
        """Return additional parameters, from a log standard deviation; None if there are none."""
        return None

    def make(self, outputs: Array, params: PyTree, mask: Array | None = None) -> Any:
        """Return the distribution for outputs [..., num_outputs], additional parameters and an action mask."""
        raise NotImplementedError

    def to_action(self, sample: Array) -> Array:
        """Return the action of a sample."""
        return sample


class CategoricalHead(Head):
    """A Categorical with the outputs as logits."""

    def make(self, outputs: Array, params: PyTree, mask: Array | None = None) -> Categorical:
        return Categorical(masked(outputs, mask))


class MultiCategoricalHead(Head):
    """A MultiCategorical with the outputs as logits."""

    def make(self, outputs: Array, params: PyTree, mask: Array | None = None) -> MultiCategorical:
        return MultiCategorical(masked(outputs, mask), self.space.nums)


@dataclass(frozen=True)
class GaussianHead(Head):
    """A Gaussian, or with `squash` a TanhGaussian. Log standard deviations are parameters [D], for all states."""

    squash: bool = False
    law: ClassVar[Law] = "normal"

    def __post_init__(self) -> None:
        if len(self.space.shape) != 1:
            raise ValueError(f"action: requires shape [D], got {list(self.space.shape)}")

    def init(self, log_std: float) -> PyTree:
        return jnp.full(self.space.shape, log_std, jnp.float32)

    def make(self, outputs: Array, params: PyTree, mask: Array | None = None) -> Gaussian | TanhGaussian:
        return self.distribution(outputs, jnp.broadcast_to(params, outputs.shape))

    def distribution(self, mean: Array, log_std: Array) -> Gaussian | TanhGaussian:
        """Return the distribution with these parameters, before the tanh."""
        return TanhGaussian(mean, log_std) if self.squash else Gaussian(mean, log_std)

    def to_action(self, sample: Array) -> Array:
        return jnp.tanh(sample) if self.squash else sample


@dataclass(frozen=True)
class StateGaussianHead(GaussianHead):
    """The same with log standard deviations that depend on the state: further outputs, plus `offset`."""

    offset: float | Array = 0.0

    @property
    def num_outputs(self) -> int:
        return 2 * super().num_outputs

    def init(self, log_std: float) -> PyTree:
        return None

    def make(self, outputs: Array, params: PyTree, mask: Array | None = None) -> Gaussian | TanhGaussian:
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        return self.distribution(mean, log_std + self.offset)


def head(space: Space, tanh_squash: bool = False, log_std_offset: float | Array | None = None) -> Head:
    """Return the distribution over an action space: categorical, multi-categorical, or (tanh-)Gaussian.

    The log standard deviations of a Gaussian are parameters, the same in all states. With `log_std_offset`, they are
    further outputs of the network plus that number. Raises ValueError for a Box that is not of shape [D].
    """
    if isinstance(space, Discrete):
        return CategoricalHead(space)
    if isinstance(space, MultiDiscrete):
        return MultiCategoricalHead(space)
    assert isinstance(space, Box), "`policies.make` has made the head of a Hybrid space"
    if log_std_offset is None:
        return GaussianHead(space, tanh_squash)
    return StateGaussianHead(space, tanh_squash, log_std_offset)
