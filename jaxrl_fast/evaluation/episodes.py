"""Play fresh episodes with the policy of a run and write down the returns."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl_fast.utils import files
from jaxrl_fast.utils.option import MAX_INDEX, Bounds, option

EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class Options:
    """Which episodes are played."""

    episodes: int = option(
        128, "Episodes per training seed, rounded up to a multiple of the environments.", bounds=Bounds(1, 10**6)
    )
    seed: int | None = option(
        None, "Training seed of the run to evaluate; none: all of them.", bounds=Bounds(0, MAX_INDEX)
    )
    member: dict[str, Any] = option(
        {}, "In a part of a sweep, the member to evaluate: agent.gamma=0.9 agent.learning-rate=1e-3."
    )
    play_seed: int = option(0, "Random seed of the episodes, unrelated to training.", bounds=Bounds(0, MAX_INDEX))
    which: Literal["best", "last"] = option(
        "best", "Checkpoint: best = highest mean evaluation return over all seeds; last = newest."
    )
    explore: bool = option(False, "Act as in training instead of greedily.")


def open_run(folder: Path, options: Options, env: Any = None) -> Any:
    """The run's learners, with environments to play in: its `eval_envs`, or as many as it explores in."""
    from jaxrl_fast.config import resume
    from jaxrl_fast.evaluation import policy

    of_run = resume.of_run(folder).options
    num_envs = policy.num_exploring(of_run) if options.explore else min(of_run.eval_envs, options.episodes)
    saved = policy.read(folder, options.which, *policy.settle(folder, env, num_envs, options.play_seed), options.member)
    return saved if options.seed is None else policy.only(saved, options.seed)


def run(saved: Any, options: Options) -> dict[str, Any]:
    """Plays, and writes down how it went, for each training seed and in all."""
    from jaxrl_fast.runs import fingerprint
    from jaxrl_fast.training import evaluator
    from jaxrl_fast.utils import compile_cache, devices, warnings

    agent = saved.agent._replace(exploit=saved.agent.explore) if options.explore else saved.agent
    player = evaluator.Evaluator(saved.env, agent, saved.seeds, options.episodes)
    with compile_cache.compile_cache(saved.settings.options.compile_cache and saved.env.on_device):
        score, length, ended = player.episodes(saved.learners, -1 - options.play_seed)  # training counts from 0 up
    if not saved.env.on_device:
        devices.release_envs([saved.env])
    counted = [i for i, seed in enumerate(saved.seeds) if seed not in saved.lost] or list(range(len(saved.seeds)))
    if saved.lost:
        names = ", ".join(f"seed {seed}" for seed in saved.lost)
        warnings.warn(f"left out of what all seeds come to, for the numbers are not finite: {names}")
    result = {
        "algo": saved.settings.algo,
        "env_id": saved.env.spec.id,
        "checkpoint": saved.checkpoint.name,
        "env_steps": saved.env_steps,
        "policy": "exploring" if options.explore else "greedy",
        "play_seed": options.play_seed,
        "member": saved.member,
        **summarize(score[counted], length[counted], ended[counted]),
        "seeds": [
            {"seed": seed, **summarize(score[i : i + 1], length[i : i + 1], ended[i : i + 1]), **listed(*episodes)}
            for i, (seed, *episodes) in enumerate(zip(saved.seeds, score, length, ended))
        ],
        "device": devices.device(),
        "versions": fingerprint.versions(),
    }
    path = saved.folder / EVALUATION
    try:
        with files.claimed(path) as path:
            path.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error.strerror})")
        return result | {"file": None}
    return result | {"file": str(path)}


def summarize(score: Any, length: Any, ended: Any) -> dict[str, Any]:
    """Statistics of the episodes [S, E] that have ended, with a 95% interval of their mean.

    That of a single seed is about its episodes. Over several, seeds are drawn anew too: it says how another training
    would do.
    """
    from jaxrl_fast.metrics import statistics
    from jaxrl_fast.training import evaluator

    known = [s[e] for s, e in zip(score, ended) if e.any()]
    low, high = statistics.mean_interval(known) if known else (None, None)
    interval = {"eval_return_low": statistics.finite(low), "eval_return_high": statistics.finite(high)}
    return evaluator.summarize(score[ended], length[ended], ended.size) | interval


def listed(score: Any, length: Any, ended: Any) -> dict[str, Any]:
    """Every episode of one seed that has ended."""
    from jaxrl_fast.metrics import statistics

    return {"returns": [statistics.finite(x) for x in score[ended]], "lengths": length[ended].tolist()}
