"""Define the options of a search for hyperparameters."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_fast.options.declare import COUNT, FRACTION, NON_NEGATIVE, SIZE, Bounds, Part, choice, option
from jaxrl_fast.options.run import Launch


@dataclass(frozen=True)
class WholeRuns(Part):
    """Every trial trains for all steps."""


@dataclass(frozen=True)
class Halving(Part):
    """Successive halving: the best trials of each rung train further (Jamieson & Talwalkar 2016)."""

    factor: int = option(
        3, "One trial in this many continues to the next rung, which has as many times the steps.", bounds=Bounds(2, 64)
    )
    rungs: int = option(3, "Number of rungs; the last one has all steps.", bounds=Bounds(2, 16))


@dataclass(frozen=True)
class Hyperband(Halving):
    """Successive halving in rounds that begin at different rungs (Li et al. 2018)."""


@dataclass(frozen=True)
class PBT(Part):
    """Population-based training: the worst trials continue as changed copies of the best (Jaderberg et al. 2017)."""

    intervals: int = option(20, "Number of intervals of training; a selection follows each but the last.", bounds=SIZE)
    frequencies: tuple[int, ...] = option(
        (1, 5),
        "Intervals between the selections of each part of the population (MF-PBT, Doulazmi et al. 2025); 1: plain PBT.",
        bounds=COUNT,
    )
    share: float = option(
        0.25, "Share of trials that are replaced by copies in a selection.", bounds=Bounds(0, 0.5, exclusive_min=True)
    )
    resample: float = option(
        0.25,
        "Probability that a copy's hyperparameter is drawn at random instead of changed by a step.",
        bounds=FRACTION,
    )


@dataclass(frozen=True)
class SearchOptions(Launch):
    """The search: what is varied, how trials are chosen and judged."""

    over: tuple[str, ...] = option(
        (),
        "Hyperparameters and their ranges: learning-rate=1e-5..1e-2 network.activation=tanh,relu. default: the space "
        "that is shipped for the algorithm.",
        sweepable=False,
    )
    trials: int = option(64, "Number of trials; each is one choice of the hyperparameters.", bounds=SIZE)
    seeds: int = option(4, "Seeds that each trial is trained with, from seed on.", bounds=SIZE)
    test_seeds: int = option(
        10, "Further seeds that the winners and the default settings are trained with at the end.", bounds=NON_NEGATIVE
    )
    winners: int = option(3, "Number of best trials that are trained with the test seeds.", bounds=SIZE)
    sampler: Literal["tpe", "random", "cmaes", "grid"] = option(
        "tpe",
        "How values are drawn: by a tree-structured Parzen estimator (tpe), at random, by CMA-ES or on a grid.",
    )
    batch: int | Literal["auto"] = option(
        "auto",
        "Trials that are drawn and trained together. auto: all for random, grid and pbt, else a quarter, or more if "
        "halving needs more to leave one; divided among several workers.",
        bounds=SIZE,
    )
    scheduler: Part = choice(
        "none",
        "How long trials train: all of them to the end (none), fewer and fewer of them (halving, hyperband), or all, "
        "where the worst continue as changed copies of the best (pbt).",
        none=WholeRuns(),
        halving=Halving(),
        hyperband=Hyperband(),
        pbt=PBT(),
    )
    score: Literal["final", "best", "area"] = option(
        "final", "Score of a seed: its last evaluation (final), its best, or the mean of all (area)."
    )
    judge: Literal["mean", "probability"] = option(
        "mean", "Order of trials: by the mean over seeds, or by the probability that a seed is better than others'."
    )
    workers: int = option(
        1, "Number of tasks of the launcher that draw and train trials of the search at the same time.", bounds=SIZE
    )
    search_dir: str = option(
        "", "Search directory; a bare word NAME is searches/NAME. Default: algorithm, environment and time in searches."
    )
    storage: str = option(
        "",
        "Optuna storage that several searches share, with study: a URL such as sqlite:////shared/study.db. Default: a "
        "journal in the search directory.",
    )
    study: str = option("", "Name of the study in the storage; searches with the same one draw its trials together.")
