"""Plays what a run has learnt: `python -m jaxrl_fast.evaluate RUN [--episodes 128]`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxrl_fast import command, wording
from jaxrl_fast.written import path_of

EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class Options:
    """What is played."""

    episodes: int = 128
    """Episodes of each training seed, rounded up to as many for each environment."""
    seed: int | None = None
    """Only this training seed of the run's; none: all of them."""
    member: dict[str, Any] = field(default_factory=dict)
    """Of a part of a sweep, which of those that were trained in it: agent.gamma=0.9 agent.learning-rate=1e-3."""
    play_seed: int = 0
    """Of the episodes: another one plays others, none of which training has seen."""
    which: Literal["best", "last"] = "best"
    """The checkpoint: the one that evaluated best, all that were trained together taken together, or the last."""
    explore: bool = False
    """Act as in training, and not greedily."""


USAGE = command.Usage(
    "python -m jaxrl_fast.evaluate",
    "RUN",
    Options,
    "Plays a run's policy in fresh environments; prints the returns, and adds evaluation.json to the run's folder.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    return command.run(prepare, act, argv)


def prepare(argv: Sequence[str]) -> tuple[Any, Options]:
    """What the command line asks for, with what the run's folder holds."""
    (folder,), options = command.read(USAGE, argv)
    return open_run(path_of(folder), options), options


def act(ready: tuple[Any, Options]) -> None:
    """Plays and says how it went."""
    result = run(*ready)
    for line in lines(result):
        print(line)


def open_run(folder: Path, options: Options, env: Any = None) -> Any:
    """The run's learners, with environments to play in: its `eval_envs`, or as many as it explores in."""
    from jaxrl_fast import config, policy

    of_run = config.of_run(folder).options
    num_envs = policy.num_exploring(of_run) if options.explore else min(of_run.eval_envs, options.episodes)
    saved = policy.read(folder, options.which, *policy.settle(folder, env, num_envs, options.play_seed), options.member)
    return saved if options.seed is None else policy.only(saved, options.seed)


def run(saved: Any, options: Options) -> dict[str, Any]:
    """Plays, and writes down how it went, for each training seed and in all."""
    from jaxrl_fast import host, play

    agent = saved.agent._replace(exploit=saved.agent.explore) if options.explore else saved.agent
    player = play.Evaluator(saved.env, agent, saved.seeds, options.episodes)
    with host.compile_cache(saved.settings.options.compile_cache and saved.env.on_device):
        score, length, ended = player.episodes(saved.learners, -1 - options.play_seed)  # training counts from 0 up
    if not saved.env.on_device:
        host.forget([saved.env])
    counted = [i for i, seed in enumerate(saved.seeds) if seed not in saved.lost] or list(range(len(saved.seeds)))
    if saved.lost:
        names = ", ".join(f"seed {seed}" for seed in saved.lost)
        host.warn(f"left out of what all seeds come to, for the numbers are not finite: {names}")
    result = {
        "algo": saved.settings.algo,
        "env_id": saved.env.spec.id,
        "checkpoint": saved.checkpoint.name,
        "env_steps": saved.env_steps,
        "policy": "exploring" if options.explore else "greedy",
        "play_seed": options.play_seed,
        "member": saved.member,
        **summarise(score[counted], length[counted], ended[counted]),
        "seeds": [
            {"seed": seed, **summarise(score[i : i + 1], length[i : i + 1], ended[i : i + 1]), **listed(*episodes)}
            for i, (seed, *episodes) in enumerate(zip(saved.seeds, score, length, ended))
        ],
        "device": host.device(),
        "versions": host.versions(),
    }
    path = saved.folder / EVALUATION
    try:
        with command.claimed(path) as path:
            path.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        host.warn(f"{path} cannot be written ({error.strerror})")
        return result | {"file": None}
    return result | {"file": str(path)}


def summarise(score: Any, length: Any, ended: Any) -> dict[str, Any]:
    """Statistics of the episodes [S, E] that have ended, with a 95% interval of their mean.

    That of a single seed is about its episodes. Over several, seeds are drawn anew too: it says how another training
    would do.
    """
    from jaxrl_fast import play, population

    known = [s[e] for s, e in zip(score, ended) if e.any()]
    low, high = population.mean_interval(known) if known else (None, None)
    interval = {"eval_return_low": population.finite(low), "eval_return_high": population.finite(high)}
    return play.summarise(score[ended], length[ended], ended.size) | interval


def listed(score: Any, length: Any, ended: Any) -> dict[str, Any]:
    """Every episode of one seed that has ended."""
    from jaxrl_fast import population

    return {"returns": [population.finite(x) for x in score[ended]], "lengths": length[ended].tolist()}


def lines(result: dict[str, Any]) -> list[str]:
    """For the terminal."""
    steps = wording.short(result["env_steps"])
    about = [result["algo"], result["env_id"], f"{result['policy']} policy of {result['checkpoint']} ({steps} steps)"]
    about += [" ".join(f"{name}={value:g}" for name, value in result["member"].items())] * bool(result["member"])
    rows = [(f"seed {each['seed']}", each) for each in result["seeds"]]
    rows += [(f"{len(rows)} seeds", result)] if len(rows) > 1 else []
    written = [f"written  {result['file']}"] if result["file"] else []
    return [" · ".join(about), *(_line(name, row) for name, row in rows), *written]


def _line(name: str, row: dict[str, Any]) -> str:
    played = wording.counted(row["eval_episodes"], "episode")
    unfinished = f", {row['eval_unfinished']} more did not end in time" if row["eval_unfinished"] else ""
    if row["eval_return_mean"] is None:
        return f"{name:<9} {played}{unfinished}"
    mean, std, low, high, least, most = (
        row[f"eval_return_{what}"] for what in ("mean", "std", "low", "high", "min", "max")
    )
    spread = (
        f" ± {std:.2f}   mean's 95% interval {low:.2f} to {high:.2f}   least {least:.2f}, most {most:.2f}"
        if row["eval_episodes"] > 1
        else ""
    )
    return f"{name:<9} return {mean:.2f}{spread}   length {row['eval_length_mean']:.0f}   {played}{unfinished}"


if __name__ == "__main__":
    command.start(main)
