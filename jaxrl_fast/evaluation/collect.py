"""Play the episodes of an evaluation and write their steps to a file, as a dataset that others can read.

The file is an `.npz` with these arrays of B steps, one episode after another, without reset steps:

observations, next_observations  as the environment returns them; of a Dict or a Tuple an array for each part,
                                 "observations/position"
actions                          as the environment takes them, with parts as above
rewards                          f32 [B], as the environment returns them
terminations, truncations        bool [B]: the episode ended with this step, in a terminal state or before one
action_masks                     bool [B, entries], if actions are masked
metadata                         JSON text: the environment, the policy and the form of the observations

The successor of an episode's last step is the true one, not the first observation of the next episode.
"""

import contextlib
import errno
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.envs import raw_form
from jaxrl_fast.evaluation.saved_run import SavedRun
from jaxrl_fast.runs import fingerprint
from jaxrl_fast.training import evaluator
from jaxrl_fast.types import Agent, Learning, PyTree, Transition
from jaxrl_fast.utils import files
from jaxrl_fast.utils.errors import add_remedy
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.formatting import counted
from jaxrl_fast.utils.memory import format_bytes, host_free_bytes, nbytes
from jaxrl_fast.utils.signals import interruptible

OPTION, ENDINGS = "collect", (".npz",)
COPIES = 3  # of all steps: as they were played, together, and in order


class Steps(NamedTuple):
    """Steps of N environments, [T, N, ...]."""

    row: Transition  # with whole observations
    next_obs: PyTree
    counts: jax.Array  # bool: the step belongs to one of the first K episodes of its environment


def check(options: Any) -> None:
    """Raise ValueError unless the file of `collect` is new and can be written."""
    path = path_of(options.collect, OPTION)
    files.check_out(path, ENDINGS, OPTION)
    if path.exists():
        raise ValueError(f"{OPTION}: must be a new file, got {options.collect}, which exists; choose another name")
    if options.against:
        raise ValueError(f"{OPTION}: cannot be used with against, got {options.against}; leave one out")


def check_run(saved: SavedRun, options: Any) -> None:
    """Raise ValueError unless a run has one policy, and the episodes, as long as in its last evaluation, fit."""
    spec, (first, *others) = saved.env.spec, saved.seeds
    if spec.players:
        raise ValueError(f"{OPTION}: requires an environment without players, got {spec.id}; leave it out")
    if others:
        raise ValueError(f"{OPTION}: takes the policy of one seed, got {len(saved.seeds)}; add seed {first}")
    each = 2 * nbytes(spec.obs) + nbytes(jax.eval_shape(lambda: spec.action.zeros())) + 6  # bytes of a step
    needed, free = int(COPIES * options.episodes * _usual_length(saved) * each), host_free_bytes()
    if free is not None and needed > free:
        problem = f"{counted(options.episodes, 'episode')} of {spec.id} need about {format_bytes(needed)} of memory"
        fits = max(options.episodes * free // needed, 1)
        raise ValueError(f"{OPTION}: {problem}, got {format_bytes(free)} free; use {fits} episodes or fewer")


def _usual_length(saved: SavedRun) -> float:
    """Return the mean length of an episode in a run's last evaluation, or 1 if it is not known."""
    with files.inside(saved.start), contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        summary = json.loads((saved.folder / "summary.json").read_text(encoding="utf-8"))
        return float(max(summary["eval_length_mean"], 1))
    return 1.0


def play(
    saved: SavedRun, agent: Agent, options: Any, report: Callable[[int, int, float], None]
) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """Play episodes as an evaluation does, and write their steps.

    Args:
        saved: The run's learner of one seed, with environments.
        agent: Its agent; `exploit` acts.
        options: `episodes.Options` with `collect`, the file.
        report: Called now and then with the episodes that have ended, their number in the end, and seconds so far.

    Returns:
        Returns, lengths and whether an episode has ended, [1, episodes] each, as `Evaluator.episodes`, and the
        file's path and number of steps.

    Raises:
        OSError: If the steps do not fit into memory. Nothing is written.
    """
    env, agent = saved.env, agent._replace(learning=Learning())  # whole observations
    each = -(-options.episodes // env.spec.num_games)
    learner = jax.device_put(saved.learners)
    keys = evaluator.keys_of(jnp.int32(saved.seeds[0]), jnp.int32(-1 - options.play_seed))

    def kept(now: evaluator.EvalState, row: Transition, after: evaluator.EvalState) -> Steps:
        counts = row.valid & (now.episodes.finished < each)
        return Steps(row._replace(extras=None), after.actors.timestep.obs, counts)

    begin = jax.jit(lambda key: evaluator.start(env, agent, each, key))
    advance = jax.jit(lambda learner, key, now: evaluator.scan_block(env, agent, learner, key, now, kept))
    now, num_bytes, free, began = interruptible(begin, keys[0]), 0, host_free_bytes(), time.perf_counter()
    blocks: list[tuple[Steps, np.ndarray, np.ndarray]] = []
    while evaluator.is_running(now):
        now, steps = interruptible(advance, learner, keys[1], now)
        blocks.append(_counted(jax.device_get(steps), len(blocks) * evaluator.BLOCK))
        num_bytes += sum(x.nbytes for x in jax.tree.leaves(blocks[-1]))
        ended = int(np.minimum(now.episodes.finished, each).sum())
        report(ended, each * env.spec.num_games, time.perf_counter() - began)
        if free is not None and COPIES * num_bytes > free:
            needed = f"{format_bytes(COPIES * num_bytes)} of memory, of which {format_bytes(free)} are free"
            error = OSError(errno.ENOSPC, f"the steps need more than {needed}", options.collect)
            add_remedy(error, f"use {max(ended, 1)} episodes or fewer")
            raise error
    arrays = in_order(blocks)
    path = write(saved, options, arrays)
    episodes = jax.device_get(now.episodes)
    ended = np.arange(each) < episodes.finished[:, None]
    played = tuple(x.reshape(1, -1) for x in (episodes.score, episodes.length, ended))
    return played, {"file": str(path), "steps": len(arrays["rewards"])}


def _counted(steps: Steps, first: int) -> tuple[Steps, np.ndarray, np.ndarray]:
    """Return the steps [B, ...] that count, of a block [T, N, ...] from time `first` on, their environment and time."""
    row, env = np.nonzero(steps.counts)
    return jax.tree.map(lambda x: x[row, env], steps), env, first + row


def in_order(blocks: Sequence[tuple[Steps, np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Return trees of arrays [B, ...] by the names in a file: environment by environment, in the order of time.

    An episode is truncated before a step that does not count: it has failed, or no step follows.
    """
    steps, env, times = jax.tree.map(lambda *x: np.concatenate(x), *blocks)
    order = np.lexsort((times, env))
    env, times = env[order], times[order]
    row, next_obs, _ = jax.tree.map(lambda x: x[order], steps)
    follows = np.zeros(len(env), bool)
    follows[:-1] = (env[1:] == env[:-1]) & (times[1:] == times[:-1] + 1)
    terminations = row.last & (row.discount == 0)
    arrays = {
        "observations": row.obs,
        "actions": row.action,
        "rewards": row.reward,
        "terminations": terminations,
        "truncations": ~terminations & (row.last | ~follows),
        "next_observations": next_obs,
    }
    return arrays | ({} if row.action_mask is None else {"action_masks": row.action_mask})


def write(saved: SavedRun, options: Any, arrays: dict[str, Any]) -> Path:
    """Write the file, with actions and observations in the environment's form, and return its path.

    If another file has the name by now, the path is a new one. Observations stay as agents see them if they lack a part
    of those that the environment returns.
    """
    env = saved.env
    raw = {name: raw_form.decoded(env, arrays[name]) for name in ("observations", "next_observations")}
    is_raw = all(obs is not None for obs in raw.values())
    arrays |= raw if is_raw else {}
    arrays["actions"] = raw_form.to_env_actions(env, arrays["actions"])
    metadata = {
        "format": 1,
        "env_id": env.spec.id,
        "observations": raw_form.RAW if is_raw else raw_form.SEEN,
        "algorithm": saved.settings.algo,
        "policy": "sampled" if options.explore else "greedy",
        "run": str(saved.folder),
        "checkpoint": saved.checkpoint.name,
        "env_steps": saved.env_steps,
        "seed": saved.seeds[0],
        "play_seed": options.play_seed,
        "env_options": {k: str(v) for k, v in (saved.settings.options.env_options | options.env_options).items()},
        "versions": fingerprint.versions(),
    }
    flat = {full: x for name, tree in arrays.items() for full, x in raw_form.named(name, tree).items()}
    with files.inside(saved.start), files.claimed(path_of(options.collect)) as path:
        with files.atomic_write(path) as aside, aside.open("wb") as file:
            np.savez(file, **flat | {raw_form.METADATA: np.array(json.dumps(metadata))})
        return path.absolute()
