"""Define the options of values: what a value network learns of the return. `rl.value_distributions` uses them."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_fast.options.declare import POSITIVE, Bounds, Part, choice, option

ATOMS = Bounds(2, 2**16)
Loss = Literal["squared", "huber"]


@dataclass(frozen=True)
class Mean(Part):
    """The mean return."""


@dataclass(frozen=True)
class RescaledMean(Mean):
    """The mean return, perhaps rescaled."""

    loss: Loss = option(
        "squared",
        "Loss of the temporal-difference error. huber is linear beyond errors of 1, so keep rewards near 1.",
    )
    rescaling: bool = option(
        False,
        "Learn h(Q), close to sign(Q) sqrt|Q|, instead of Q: large rewards need no clipping (Pohlen et al. 2018).",
    )


@dataclass(frozen=True)
class ClippedMean(Mean):
    """The mean return, whose changes in an update may be clipped."""

    clip_vloss: bool = option(True, "Clip new values to within clip_coef of the old ones in the value loss.")


@dataclass(frozen=True)
class C51(Part):
    """A distribution of returns on fixed atoms (Bellemare et al. 2017)."""

    atoms: int = option(51, "Number of atoms.", bounds=ATOMS)
    v_min: float = option(-10.0, "Lowest return that the atoms represent.")  # not traced: compared with each other
    v_max: float = option(10.0, "Highest return that the atoms represent.")


@dataclass(frozen=True)
class HLGauss(C51):
    """The mean return, learned as a classification over atoms (Imani & White 2018, Farebrother et al. 2024)."""

    smoothing: float = option(
        0.75,
        "Standard deviation of the target's distribution, in distances between atoms.",
        bounds=POSITIVE,
        traced=True,
    )


@dataclass(frozen=True)
class Quantile(Part):
    """Quantiles of the return (Dabney et al. 2018)."""

    atoms: int = option(51, "Number of quantiles.", bounds=ATOMS)


@dataclass(frozen=True)
class QuantileRegression(Quantile):
    """Quantiles of the return, as QR-DQN learns them."""

    loss: Loss = option("squared", "Loss of quantile regression: its absolute error (squared), or Huber's.")


@dataclass(frozen=True)
class TruncatedQuantile(Quantile):
    """Quantiles of the return by several critics, of which a target drops the largest (Kuznetsov et al. 2020)."""

    drop: int = option(2, "Quantiles per critic that the target drops: the largest of the pooled ones.", bounds=(0,))


@dataclass(frozen=True)
class CustomValue(Part):
    """A value head of a user."""

    atoms: int = option(1, "Number of outputs for each action.", bounds=Bounds(1, 2**16))


def value_of_actions() -> Any:
    """Return a field for the values of discrete actions."""
    return choice(
        "mean",
        "What is learned of the return: its mean, a distribution on fixed atoms (c51, Bellemare et al. 2017) or "
        "quantiles (Dabney et al. 2018). package.module:Class is a rl.value_distributions.CustomHead.",
        custom=CustomValue(),
        mean=RescaledMean(),
        c51=C51(),
        quantile=QuantileRegression(),
    )


def value_of_critics() -> Any:
    """Return a field for the values that several critics learn."""
    return choice(
        "mean",
        "What critics learn of the return: its mean, a distribution on fixed atoms (c51; the target uses the critic "
        "with the lowest mean: FastTD3, Seo et al. 2025), quantiles (the target pools those of all critics: TQC, "
        "Kuznetsov et al. 2020), or the mean by a classification over atoms (hl_gauss, Farebrother et al. 2024).",
        mean=Mean(),
        c51=C51(atoms=25),
        hl_gauss=HLGauss(atoms=101),
        quantile=TruncatedQuantile(atoms=25),
    )


def value_of_states() -> Any:
    """Return a field for the values of states that a policy gradient needs."""
    return choice(
        "mean",
        "How the value of a state is learned: as a number (mean), or by a classification over atoms (hl_gauss, Imani & "
        "White 2018, Farebrother et al. 2024).",
        mean=ClippedMean(),
        hl_gauss=HLGauss(atoms=101),
    )


def value_of_pairs() -> Any:
    """Return a field for the values of pairs of a state and an action, on which a policy gradient depends."""
    return choice(
        "hl_gauss",
        "How values are learned: by a classification over atoms (hl_gauss, Imani & White 2018, Farebrother et al. "
        "2024), or as a number (mean).",
        mean=Mean(),
        hl_gauss=HLGauss(atoms=151, v_min=-100.0, v_max=100.0),
    )
