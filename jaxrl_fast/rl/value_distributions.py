"""Represent values as weighted atoms: interpret a network's outputs, and compute their distance to a target.

A mean is one atom; c51 and hl_gauss learn the weights of fixed atoms, quantile the positions of equally likely atoms.
A target is a set of weighted atoms for all three, so that code that computes targets needs no case distinction.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxrl_fast.options.declare import Part
from jaxrl_fast.options.value import C51, ClippedMean, CustomValue, HLGauss, Quantile
from jaxrl_fast.utils import importing, target


class ValueHead(NamedTuple):
    """The kind of value that a network's outputs represent, and its atoms."""

    kind: str  # mean, c51, hl_gauss or quantile
    num: int  # of atoms, M; a mean has one
    v_min: float | Array  # the lowest of c51's evenly spaced atoms
    v_max: float | Array  # the highest
    sigma: float | Array = 0.0  # of hl_gauss: the deviation of a target, in distances between atoms


class CustomHead:
    """The base of a user's value heads, chosen by `value: package.module:Class`."""

    kind = "custom"

    def __init__(self, num: int):
        self.num = num  # of outputs for each action, M

    def atoms(self, output: Array) -> "Atoms":
        """Return the distribution that outputs [..., A, M] represent, as weighted atoms [..., A, K]."""
        raise NotImplementedError

    def losses(self, output: Array, goal: "Atoms", td_error: Array) -> tuple[Array, Array]:
        """Return the loss of each row [B] between its output [B, M] and its goal, and its error for priorities."""
        raise NotImplementedError


def head_of(options: Part) -> ValueHead | CustomHead:
    """Return the kind of value that the options of an algorithm choose. Raise ValueError for invalid atoms."""
    num = num_atoms(options)
    if isinstance(options, CustomValue):
        made = importing.attribute(options.kind, f"value {options.kind!r}")
        if not (isinstance(made, type) and issubclass(made, CustomHead)):
            got = importing.describe(made)
            raise ValueError(f"value: {options.kind} must be a subclass of CustomHead, got {got}; derive it")
        return made(options.atoms)
    if num is not None and num < 2:
        raise ValueError(f"value.atoms: a distribution requires 2 or more, got {num}; try 51")
    if not isinstance(options, C51):
        return ValueHead(options.kind, num or 1, 0.0, 0.0)
    if not options.v_min < options.v_max:
        raise ValueError(
            f"value.v_min: must be less than v_max ({options.v_max}), got {options.v_min}; use a lower value"
        )
    sigma = options.smoothing if isinstance(options, HLGauss) else 0.0
    return ValueHead(options.kind, options.atoms, options.v_min, options.v_max, sigma)


def num_atoms(options: Part) -> int | None:
    """Return the number of atoms of a distribution, or None for a mean."""
    return options.atoms if isinstance(options, C51 | Quantile | CustomValue) else None


class Atoms(NamedTuple):
    """A distribution of returns, as weighted atoms."""

    atom: Array  # [..., K]
    weight: Array  # [..., K], summing to 1

    @property
    def mean(self) -> Array:
        """Return the mean, f32 [...]."""
        return (self.atom * self.weight).sum(-1)


def from_outputs(form: ValueHead | CustomHead, output: Array) -> Atoms:
    """Return the atoms [..., A, M] of the network's output: [..., A] for means, else [..., A, M]."""
    if isinstance(form, CustomHead):
        return form.atoms(output)
    if form.kind == "mean":
        return Atoms(output[..., None], jnp.ones((*output.shape, 1)))
    if form.kind == "quantile":
        return Atoms(output, jnp.full(output.shape, 1 / output.shape[-1]))
    return Atoms(jnp.broadcast_to(support(form), output.shape), jax.nn.softmax(output))


def mean(form: ValueHead | CustomHead, output: Array) -> Array:
    """Return the expected returns [..., A] of the network's output."""
    return output if form.kind == "mean" else from_outputs(form, output).mean


def minimum(form: ValueHead | CustomHead, output: Array) -> Atoms:
    """Return the atoms [B, K] of outputs [C, B (, M)]: in each row, the output with the lowest mean of the C.

    This is the minimum of clipped double Q-learning (Fujimoto et al. 2018, eq. 10), for distributions as in FastTD3
    (Seo et al. 2025).
    """
    if form.kind == "mean":
        return from_outputs(form, output.min(0))
    row = jnp.argmin(mean(form, output), axis=0)
    return from_outputs(form, jnp.take_along_axis(output, row[None, :, None], axis=0)[0])


def truncated(output: Array, num_dropped: int) -> Atoms:
    """Return equally likely atoms [B, C (M - d)]: quantiles [C, B, M] of all C, less the d C largest of each row.

    d = `num_dropped` (Kuznetsov et al. 2020, TQC).
    """
    num, rows, size = output.shape
    atom = jnp.sort(jnp.moveaxis(output, 0, 1).reshape(rows, num * size), axis=-1)[:, : num * (size - num_dropped)]
    return Atoms(atom, jnp.full(atom.shape, 1 / atom.shape[-1]))


def support(form: ValueHead) -> Array:
    """Return the positions of c51's atoms, f32 [M]."""
    return jnp.linspace(form.v_min, form.v_max, form.num, dtype=jnp.float32)


def losses(
    form: ValueHead | CustomHead, output: Array, goal: Atoms, td_error: Array, huber: bool
) -> tuple[Array, Array]:
    """Return the loss of each row [B] between its output ([B], or [B, M]) and its goal, and its error for priorities.

    kind       loss                                                                             error
    mean       Huber or squared loss of the TD error, which is of means                         |TD error|
    c51        cross entropy with the projected goal (Bellemare et al. 2017, algorithm 1)       divergence
    hl_gauss   cross entropy with `gaussian` of the goal's mean                                 |TD error|
    quantile   `quantile_loss`                                                                  |TD error|
    """
    if isinstance(form, CustomHead):
        return form.losses(output, goal, td_error)
    if form.kind == "c51":
        wanted = project(goal, support(form))
        entropy = optax.softmax_cross_entropy(output, wanted)
        return entropy, jnp.maximum(entropy + jax.scipy.special.xlogy(wanted, wanted).sum(-1), 0)
    if form.kind == "hl_gauss":
        return optax.softmax_cross_entropy(output, gaussian(form, goal.mean)), jnp.abs(td_error)
    if form.kind == "quantile":
        return quantile_loss(output, goal, huber), jnp.abs(td_error)
    return optax.huber_loss(td_error) if huber else 0.5 * td_error**2, jnp.abs(td_error)


def loss_of_states(
    options: Part, form: ValueHead, clip_coef: float | Array, output: Array, target: Array, before: Array
) -> Array:
    """Return the loss of each row [...] between PPO's critic's output and the target [...].

    With value mean, it is half the squared error, or with `clip_vloss` the larger one of that and of the value that is
    clipped to near the value `before` the update. With hl_gauss, it is the cross entropy with the target's
    distribution.
    """
    if not isinstance(options, ClippedMean):
        entropy: Array = optax.softmax_cross_entropy(output, gaussian(form, target))
        return entropy
    error = (output - target) ** 2
    if options.clip_vloss:
        near = before + jnp.clip(output - before, -clip_coef, clip_coef)
        error = jnp.maximum(error, (near - target) ** 2)
    return 0.5 * error


def project(goal: Atoms, support: Array) -> Array:
    """Return probabilities [B, M] on evenly spaced atoms [M]; each atom's weight is split between its two neighbors.

    A GPU, where additions to chosen places have no fixed order, sums over all pairs of atoms.
    """
    last = len(support) - 1
    place = last * (jnp.clip(goal.atom, support[0], support[-1]) - support[0]) / (support[-1] - support[0])  # [B, K]
    if target.platform() != "cpu":
        share = jnp.clip(1 - jnp.abs(place[:, None, :] - jnp.arange(last + 1)[None, :, None]), 0, 1)  # [B, M, K]
        return (share * goal.weight[:, None, :]).sum(-1)
    below = jnp.minimum(place.astype(jnp.int32), last - 1)
    share, row = place - below, jnp.arange(len(place))[:, None]
    sums = jnp.zeros((len(place), last + 1)).at[row, below].add(goal.weight * (1 - share))
    return sums.at[row, below + 1].add(goal.weight * share)


def gaussian(form: ValueHead, value: Array) -> Array:
    """Return probabilities [..., M] of hl_gauss's atoms: of a normal distribution around a value [...] within the bins.

    Bins of one width w have the atoms in their middle. With z = Phi((end - value) / (sigma w)) of each end of a bin,
    the probability is the difference of z, divided by that of the first and the last end (Imani & White 2018, section
    3; Farebrother et al. 2024, section 3.1). Values are clipped to the atoms.
    """
    width = (form.v_max - form.v_min) / (form.num - 1)
    ends = form.v_min + width * (jnp.arange(form.num + 1) - 0.5)
    value = jnp.clip(value, form.v_min, form.v_max)[..., None]
    distance = (ends.reshape(*(1,) * (value.ndim - 1), -1) - value) / (form.sigma * width)
    below = jax.lax.erf(distance * np.float32(np.sqrt(0.5)))
    return jnp.diff(below) / (below[..., -1:] - below[..., :1])


def quantile_loss(quantile: Array, goal: Atoms, huber: bool) -> Array:
    """Return the quantile regression loss [B] of quantiles q [B, M], at levels tau = (i + 1/2) / M, for atoms [B, K].

    The loss is sum_i sum_j w_j |tau_i - (u < 0)| L(u), u = atom_j - q_i (Dabney et al. 2018, eq. 10). L is Huber's loss
    with `huber`, else L(u) = |u|, the paper's QR-DQN-0.
    """
    tau = (jnp.arange(quantile.shape[-1]) + 0.5) / quantile.shape[-1]
    u = goal.atom[:, None, :] - quantile[:, :, None]  # [B, M, K]
    size = optax.huber_loss(u) if huber else jnp.abs(u)
    tilt = jnp.abs(tau[None, :, None] - (u < 0))
    return (tilt * size * goal.weight[:, None, :]).sum((-2, -1))
