"""Explore by noise that is a function of the state, the same function for many steps (gSDE).

The method is generalized state-dependent exploration (Raffin et al. 2021, "Smooth exploration for robotic reinforcement
learning"). The noise is E z(s), where z [F] are the features of the policy's last layer. Each environment has a matrix
E [F, D] of normal numbers with learned standard deviations sigma [F, D]. So the action has the distribution (section
3.2)

    a_d ~ N(mean_d(s), sum_f (sigma_fd z_f(s))^2)

whose density is exact. E is drawn at the start of each episode, and again after every `sample_freq` steps. With 1, the
noise is independent at each step; with None, an episode has one matrix. As in the authors' program, no gradient flows
from the standard deviation into the features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.kernels.branch import cond
from jaxrl_fast.rl import heads
from jaxrl_fast.rl.distributions import Gaussian, TanhGaussian
from jaxrl_fast.types import Key, PyTree, split_keys

EPSILON = 1e-6  # added to the variance, so that features of 0 have a density


class Carry(NamedTuple):
    """The part of an environment's recurrent state that exploration has."""

    matrix: Array  # f32 [F, D]: standard normal numbers; E is their product with sigma
    age: Array  # int32 []: steps since the start of the episode


@dataclass(frozen=True)
class Head(heads.GaussianHead):
    """The distribution of actions [D], from outputs [..., D + F] of the network: the mean and the features.

    Its parameters are log sigma, f32 [F, D]. Its noise is a PRNG key for each step, from which that step's matrices are
    drawn, if any.
    """

    num_features: int = 0

    @property
    def sample_noise(self) -> Callable[[Key, int, int], Array]:
        return split_keys

    def init(self, log_std: float) -> PyTree:
        return jnp.full((self.num_features, *self.space.shape), log_std, jnp.float32)

    def make(self, outputs: Array, params: PyTree, mask: Array | None = None) -> Gaussian | TanhGaussian:
        mean, features = outputs[..., : self.num_outputs], outputs[..., self.num_outputs :]
        features = jax.lax.stop_gradient(features)
        return self.distribution(mean, 0.5 * jnp.log(features**2 @ jnp.exp(2 * params) + EPSILON))


def initial_carry(head: heads.Head) -> Carry:
    """Return the carry at the start of an episode, before its first matrix is drawn."""
    return Carry(jnp.zeros_like(head.init(0.0)), jnp.int32(0))


def renew(carry: Carry, sample_freq: int | None, key: Key) -> Carry:
    """Return the carry [N, ...] with new matrices where an episode begins or `sample_freq` steps have passed."""
    due = carry.age == 0 if sample_freq is None else carry.age % sample_freq == 0
    draw = lambda: jnp.where(due[:, None, None], jax.random.normal(key, carry.matrix.shape), carry.matrix)
    return Carry(cond(due.any(), draw, lambda: carry.matrix), carry.age + 1)


def noise(output: Array, log_sigma: Array, log_std: Array, matrix: Array) -> Array:
    """Return E z in standard deviations of the action, f32 [N, D], for outputs [N, D + F] of the network.

    The policy's mean plus this times its standard deviation, exp(log_std) [N, D], is the action.
    """
    features = output[:, log_std.shape[-1] :]
    return jnp.einsum("nf,fd,nfd->nd", features, jnp.exp(log_sigma), matrix) * jnp.exp(-log_std)
