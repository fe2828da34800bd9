"""Explain why a run cannot continue from numbers that are not finite."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_fast import ahead_rollout, async_rollout, loop
from jaxrl_fast.config.population import LABEL
from jaxrl_fast.options import wrap
from jaxrl_fast.options.run import Options
from jaxrl_fast.parallel import team
from jaxrl_fast.parallel.arrays import local_index, local_rows
from jaxrl_fast.utils import formatting
from jaxrl_fast.utils.importing import name_of


def describe(label: dict[str, Any], problem: str, env_steps: int) -> str:
    """Return which member diverged and when: "seed 3, gamma 0.9: loss is not finite at step 64k"."""
    words = ", ".join(f"{name.removeprefix(LABEL)} {value}" for name, value in label.items())
    return f"{words}: {problem} at step {formatting.short_number(env_steps)}"


def advise(options: Options, last_checkpoint: Path | None, env_is_cause: bool) -> str:
    """Return advice: a lower learning rate, or the wrapper quarantine if the environment is the cause."""
    last = f"the last good checkpoint is {last_checkpoint}" if last_checkpoint else "there is no checkpoint"
    cause = f"{name_of(options.env)} returns NaN or infinite observations or rewards"
    if not env_is_cause:
        return f"{last}; try a lower learning rate, unless {cause}"
    hint = "" if wrap.read(options.wrap).quarantine else "; wrap quarantine resets such an environment"
    return f"{last}; {cause}{hint}"


def envs_are_finite(state: loop.TrainState, member: int | None) -> bool:
    """Return whether current observations and sums of rewards are finite, for one member or a state without members.

    Only current observations are checked, not replaced ones. Of several processes, each checks its rows, and all must
    call this.
    """
    actors = state.actors
    if isinstance(actors, ahead_rollout.AheadActors):
        actors = actors.progress.actors
    parts = [sent.actors for sent in actors.pending] if isinstance(actors, async_rollout.AsyncActors) else [actors]
    own = [_rows(x, member) for x in jax.tree.leaves([(part.timestep.obs, part.score) for part in parts])]
    return all(team.current().gather(all(bool(np.isfinite(rows).all()) for rows in own)))


def _rows(x: Any, member: int | None) -> np.ndarray:
    """Return the elements of an array that this process has: all, or those of one member."""
    rows = local_rows(x)
    if member is None:
        return rows
    at = member - (local_index(x)[0][0] if isinstance(x, jax.Array) else 0)
    return rows[at : at + 1] if at >= 0 else rows[:0]
