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

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.rl import distributions
from jaxrl_fast.types import Box, Key

EPSILON = 1e-6  # added to the variance, so that features of 0 have a density


class Carry(NamedTuple):
    """The part of an environment's recurrent state that exploration has."""

    matrix: Array  # f32 [F, D]: standard normal numbers; E is their product with sigma
    age: Array  # int32 []: steps since the start of the episode


def initial_carry(head: distributions.Head) -> Carry:
    """Return the carry at the start of an episode, before its first matrix is drawn."""
    return Carry(jnp.zeros_like(head.init(0.0)), jnp.int32(0))


def head(space: Box, tanh_squash: bool, num_features: int) -> distributions.Head:
    """Return the distribution of actions [D], from outputs [..., D + F] of the network: the mean and the features.

    Its parameters are log sigma, f32 [F, D]. Raises ValueError for a Box that is not of shape [D].
    """
    plain = distributions.head(space, tanh_squash)
    size = space.num_outputs

    def make(
        output: Array, log_sigma: Array, mask: Array | None = None
    ) -> distributions.Gaussian | distributions.TanhGaussian:
        mean, features = output[..., :size], jax.lax.stop_gradient(output[..., size:])
        log_std = 0.5 * jnp.log(features**2 @ jnp.exp(2 * log_sigma) + EPSILON)
        return distributions.TanhGaussian(mean, log_std) if tanh_squash else distributions.Gaussian(mean, log_std)

    init = partial(jnp.full, (num_features, size), dtype=jnp.float32)
    return plain._replace(init=init, make=make, sample_noise=split_keys)


def split_keys(key: Key, num_steps: int, num_envs: int) -> Key:
    """Return a PRNG key for each of T steps, from which that step's matrices are drawn, if any."""
    return jax.random.split(key, num_steps)


def renew(carry: Carry, sample_freq: int | None, key: Key) -> Carry:
    """Return the carry [N, ...] with new matrices where an episode begins or `sample_freq` steps have passed."""
    due = carry.age == 0 if sample_freq is None else carry.age % sample_freq == 0
    draw = lambda: jnp.where(due[:, None, None], jax.random.normal(key, carry.matrix.shape), carry.matrix)
    return Carry(jax.lax.cond(due.any(), draw, lambda: carry.matrix), carry.age + 1)


def noise(output: Array, log_sigma: Array, log_std: Array, matrix: Array) -> Array:
    """Return E z in standard deviations of the action, f32 [N, D], for outputs [N, D + F] of the network.

    The policy's mean plus this times its standard deviation, exp(log_std) [N, D], is the action.
    """
    features = output[:, log_std.shape[-1] :]
    return jnp.einsum("nf,fd,nfd->nd", features, jnp.exp(log_sigma), matrix) * jnp.exp(-log_std)
