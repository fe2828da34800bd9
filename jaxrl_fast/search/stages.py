"""Choose how long trials train, and which continue: successive halving, Hyperband, and population-based training.

Numbers and names of trials only: `rounds` trains them. A `score` [trials, seeds] is larger if it is better, and NaN if
the seed has diverged.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_fast.options.declare import Part
from jaxrl_fast.options.search import PBT, Halving, Hyperband
from jaxrl_fast.search import spaces
from jaxrl_fast.search.spaces import Dimension


class Copy(NamedTuple):
    """A trial that continues with the state and perhaps the hyperparameters of others."""

    state_of: int  # place of the trial from which the training state comes
    values: Mapping[str, Any]  # hyperparameters from here on


def until(scheduler: Part, total_steps: int, round: int) -> list[int]:
    """Return the environment steps of each seed at the ends of the stages of a round; the last is `total_steps`."""
    if isinstance(scheduler, PBT):
        return [math.ceil(total_steps * i / scheduler.intervals) for i in range(1, scheduler.intervals + 1)]
    if not isinstance(scheduler, Halving):
        return [total_steps]
    steps = [math.ceil(total_steps / scheduler.factor**i) for i in reversed(range(scheduler.rungs))]
    return steps[_first_rung(scheduler, round) :]


def _first_rung(scheduler: Halving, round: int) -> int:
    """Return the rung at which a round begins: 0, or with Hyperband one after the other."""
    return round % scheduler.rungs if isinstance(scheduler, Hyperband) else 0


def size(scheduler: Part, batch: int, round: int) -> int:
    """Return the trials of a round: fewer if Hyperband begins it at a later rung, so that rounds cost about the same.

    Li et al. 2018, algorithm 1: n = ceil((s_max + 1) / (s + 1) factor^s), relative to the first round's n.
    """
    if not isinstance(scheduler, Hyperband):
        return batch
    longest, s = scheduler.rungs, scheduler.rungs - 1 - _first_rung(scheduler, round)
    share = longest / (s + 1) * float(scheduler.factor) ** (s + 1 - longest)
    return max(1, round_half_up(batch * share))


def round_half_up(x: float) -> int:
    """Return the nearest whole number."""
    return math.floor(x + 0.5)


def order(score: np.ndarray, judge: str) -> list[int]:
    """Return the places of trials [trials, seeds], the best first; a trial with a diverged seed comes after all others.

    With judge "probability", the order is that of the probability that a seed of the trial has a higher score than one
    of another trial (ties count half), else that of the mean over seeds. Equal trials keep their order.
    """
    worth = np.where(np.isnan(score), -np.inf, score)
    if judge == "probability":
        flat = worth[:, None, :, None], worth[None, :, None, :]
        better = np.mean((flat[0] > flat[1]) + 0.5 * (flat[0] == flat[1]), axis=(2, 3))
        value = (better.sum(1) - 0.5) / max(len(score) - 1, 1)
        value = np.where(np.isinf(worth).any(1), -np.inf, value)
    else:
        value = worth.mean(1)
    return [int(i) for i in np.argsort(-value, kind="stable")]


def kept(scheduler: Halving, ranked: Sequence[int]) -> list[int]:
    """Return the places of the trials that continue to the next rung, in their old order; at least one."""
    return sorted(ranked[: max(1, len(ranked) // scheduler.factor)])


def evolve(
    scheduler: PBT,
    space: Sequence[Dimension],
    values: Sequence[Mapping[str, Any]],
    score: np.ndarray,
    judge: str,
    stage: int,
    seed: Sequence[int],
) -> list[Copy]:
    """Return how each trial continues after stage number `stage`, counted from 0.

    The population has one part for each frequency, of neighbors in order. In a part whose turn it is, the worst share
    become changed copies of the best (Jaderberg et al. 2017, truncation selection). Then, as in MF-PBT (Doulazmi et al.
    2025, section 4), trials of the third quarter take the state of a better trial of another part: with its
    hyperparameters if that part is selected less often, with those of the own part's best if it is selected more often.
    """
    random = np.random.default_rng([*seed, stage])
    parts = np.array_split(np.arange(len(values)), len(scheduler.frequencies))
    ranked = order(score, judge)
    place = {trial: i for i, trial in enumerate(ranked)}
    part_of = {int(trial): i for i, part in enumerate(parts) for trial in part}
    copies = [Copy(i, own) for i, own in enumerate(values)]
    for i, frequency in enumerate(scheduler.frequencies):
        own = [trial for trial in ranked if part_of[trial] == i]
        if (stage + 1) % frequency or len(own) < 2:
            continue
        number = max(1, int(len(own) * scheduler.share))
        for worst, best in zip(own[-number:], own):
            changed = {d.name: _changed(scheduler, d, values[best][d.name], random) for d in space}
            copies[worst] = Copy(best, {**values[best], **changed})
        quarter, others = len(own) // 4, [trial for trial in ranked if part_of[trial] != i]
        for trial in own[2 * quarter : 3 * quarter]:
            if not others or place[others[0]] > place[trial]:
                break
            migrant = others.pop(0)
            theirs = scheduler.frequencies[part_of[migrant]]
            source = migrant if theirs > frequency else own[0] if theirs < frequency else trial
            copies[trial] = Copy(migrant, values[source])
    return copies


def _changed(scheduler: PBT, dimension: Dimension, value: Any, random: np.random.Generator) -> Any:
    """Return another value of a hyperparameter: a random one, or one near the old one."""
    if random.random() < scheduler.resample:
        return spaces.resample(dimension, random)
    return spaces.perturb(dimension, value, random)
