"""Define what a search records: trials and their scores."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxrl_fast.config.settings import Settings
from jaxrl_fast.search.spaces import Dimension

DEFAULT = -1  # the number of the base settings among the trials that are trained on test seeds

Status = Literal["running", "complete", "stopped", "diverged", "failed"]


class Trial(NamedTuple):
    """One choice of values, trained with the tuning seeds."""

    number: int
    values: Mapping[str, Any]  # by the option's path
    scores: tuple[float, ...]  # of each tuning seed at the last rung that it reached; NaN: diverged
    score: float | None  # the mean over seeds, -inf if one diverged; None: not scored
    steps: int  # environment steps of each seed
    rung: int = 0  # of successive halving: the last one that was reached
    status: Status = "complete"  # stopped: halving has dropped it
    parent: int | None = None  # of population-based training: the trial whose parameters it has copied
    env_steps_at_end: int = 0  # environment steps of the whole search when the trial was scored
    failure: str = ""  # why it failed, in a sentence


class Result(NamedTuple):
    """A search: what was searched, its trials, and the scores of the winners on test seeds."""

    settings: Settings  # of the base run, in which a trial replaces values
    space: tuple[Dimension, ...]
    trials: tuple[Trial, ...]
    test: Mapping[int, tuple[float, ...]]  # scores of each test seed by trial number, and by DEFAULT; NaN: diverged
    sampler: str
    scheduler: str
    score_kind: str  # final, best or area
    seeds: tuple[int, ...]
    test_seeds: tuple[int, ...]
    seconds: float


def score_of(scores: Sequence[float]) -> float:
    """Return the score of a trial: the mean over seeds, or -inf if a seed diverged (NaN or infinite)."""
    return math.fsum(scores) / len(scores) if len(scores) and all(map(math.isfinite, scores)) else -math.inf


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return the scored trials, best first.

    A trial that trained for more steps comes first, since scores after different numbers of steps are not comparable.
    Of equal trials the earlier comes first. Trials that diverged are last.
    """
    scored = [trial for trial in trials if trial.score is not None and trial.status != "running"]
    return sorted(scored, key=lambda t: (t.score == -math.inf, -t.steps, -(t.score or 0.0), t.number))


def best_of(result: Result) -> Trial | None:
    """Return the trial with the best tuning score, or None if no trial has one.

    The test scores do not choose it: they would not be an honest estimate of the chosen trial's score then.
    """
    best = next(iter(ranked(result.trials)), None)
    return best if best and best.score != -math.inf else None
