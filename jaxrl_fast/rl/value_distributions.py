"""Values as weighted atoms: what a network's outputs mean, and how far they are from what they should be.

A mean is one atom; c51 has weights for atoms that stay where they are, and quantile has equally likely atoms that move.
What a value should be is weighted atoms for all of them, so that whoever makes a target has no cases to tell apart.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array


class ValueHead(NamedTuple):
    """What outputs mean."""

    kind: str  # none: a mean; c51 or quantile
    num: int  # of atoms, M; a mean has one
    v_min: float | Array  # c51's lie evenly from here
    v_max: float | Array  # to here


class Atoms(NamedTuple):
    """A distribution of returns."""

    atom: Array  # [..., K]
    weight: Array  # [..., K], summing to 1

    @property
    def mean(self) -> Array:
        """[...]"""
        return (self.atom * self.weight).sum(-1)


def from_outputs(form: ValueHead, output: Array) -> Atoms:
    """Atoms [..., A, M] of the network's output: [..., A] for means, else [..., A, M]."""
    if form.kind == "none":
        return Atoms(output[..., None], jnp.ones((*output.shape, 1)))
    if form.kind == "quantile":
        return Atoms(output, jnp.full(output.shape, 1 / output.shape[-1]))
    return Atoms(jnp.broadcast_to(support(form), output.shape), jax.nn.softmax(output))


def mean(form: ValueHead, output: Array) -> Array:
    """[..., A] expected returns of the network's output."""
    return output if form.kind == "none" else from_outputs(form, output).mean


def support(form: ValueHead) -> Array:
    """[M] f32: where c51's atoms lie."""
    return jnp.linspace(form.v_min, form.v_max, form.num, dtype=jnp.float32)


def losses(form: ValueHead, output: Array, goal: Atoms, td_error: Array, huber: bool) -> tuple[Array, Array]:
    """Of each row [B], how far its output ([B], or [B, M]) is from its goal; and what its priority goes by.

    none       Huber or squared loss of the TD error, which is of means; by |TD error|
    c51        cross entropy with the projected goal (Bellemare et al. 2017, algorithm 1); by the divergence
    quantile   `quantile_loss`; by |TD error|
    """
    if form.kind == "c51":
        wanted = project(goal, support(form))
        entropy = optax.softmax_cross_entropy(output, wanted)
        return entropy, jnp.maximum(entropy + jax.scipy.special.xlogy(wanted, wanted).sum(-1), 0)
    if form.kind == "quantile":
        return quantile_loss(output, goal, huber), jnp.abs(td_error)
    return optax.huber_loss(td_error) if huber else 0.5 * td_error**2, jnp.abs(td_error)


def project(goal: Atoms, support: Array) -> Array:
    """[B, M] probabilities on the support: each atom's weight is shared by its two neighbors (triangular kernel)."""
    step = support[1] - support[0]
    atom = jnp.clip(goal.atom, support[0], support[-1])
    share = jnp.clip(1 - jnp.abs(atom[:, None, :] - support[None, :, None]) / step, 0, 1)  # [B, M, K]
    return (share * goal.weight[:, None, :]).sum(-1)


def quantile_loss(quantile: Array, goal: Atoms, huber: bool) -> Array:
    """[B]: quantile regression of weighted atoms [B, K] by quantiles q [B, M], of levels tau = (i + 1/2) / M.

    sum_i sum_j w_j |tau_i - (u < 0)| L(u), u = atom_j - q_i (Dabney et al. 2018, eq. 10). With L(u) = |u| where it is
    not Huber's it is the paper's QR-DQN-0.
    """
    tau = (jnp.arange(quantile.shape[-1]) + 0.5) / quantile.shape[-1]
    u = goal.atom[:, None, :] - quantile[:, :, None]  # [B, M, K]
    size = optax.huber_loss(u) if huber else jnp.abs(u)
    tilt = jnp.abs(tau[None, :, None] - (u < 0))
    return (tilt * size * goal.weight[:, None, :]).sum((-2, -1))
