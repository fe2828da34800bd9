"""Evaluate the policy of a run in new episodes and write the returns to evaluation.json."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl_fast.evaluation import episode_file
from jaxrl_fast.options.declare import MAX_INDEX, Bounds, option
from jaxrl_fast.utils import files
from jaxrl_fast.utils.plain import as_lists

EVALUATION = "evaluation.json"
PROGRESS_S = 1.0  # seconds between lines about an evaluation that takes long


@dataclass(frozen=True)
class Options:
    """Policy, environments and episodes of the evaluation."""

    episodes: int = option(
        128,
        "Episodes per training seed, rounded up to a multiple of the number of environments.",
        bounds=Bounds(1, 10**6),
    )
    episodes_file: str = option(
        "",
        "File with a line for each episode of a Python environment, instead of a number of episodes: the seed of its "
        'reset, or {"seed": 7, "options": {"level": 3}}.',
    )
    seed: int | None = option(
        None, "Training seed of the run to evaluate; none: all of them.", bounds=Bounds(0, MAX_INDEX)
    )
    member: dict[str, Any] = option(
        {}, "For a run of a sweep with several members: values that select one, such as gamma=0.9."
    )
    play_seed: int = option(0, "Random seed of the episodes, unrelated to training.", bounds=Bounds(0, MAX_INDEX))
    which: Literal["best", "last"] = option(
        "best", "Checkpoint: best = highest mean evaluation return over all seeds; last = newest."
    )
    explore: bool = option(False, "Act as in training instead of greedily.")
    against: str = option(
        "",
        "Opponent in an environment with two players, played on both sides: the directory of another run, or scripted "
        "(the environment's built-in opponent).",
    )
    collect: str = option(
        "", "New file, .npz, for all steps of the episodes: a dataset from which other runs can learn, see bonus bc."
    )
    env_options: dict[str, Any] = option({}, "Parameters of the environment that differ from those of training.")
    protocol: Literal["", "dqn2015", "machado2018"] = option(
        "", "Protocol for Atari, if it differs from that of training."
    )


def open_run(folder: Path, options: Options, env: Any = None) -> Any:
    """Return the run's learners with environments for the evaluation.

    Args:
        folder: The run's folder.
        options: Select the checkpoint, the seed and the member.
        env: The environment, if it cannot be made from its name in config.yaml.

    Returns:
        A `saved_run.SavedRun` with as many environments as evaluations have in training, apart from the number of
        episodes, or as many as training explores in with `options.explore`.

    Raises:
        ValueError: If the run, a checkpoint, the seed or the member does not exist.
    """
    from jaxrl_fast.config import resume
    from jaxrl_fast.evaluation import collect, match, policy, saved_run
    from jaxrl_fast.training import build

    if options.episodes_file and options.against:
        raise ValueError(f"episodes_file: cannot be used with against, got {options.episodes_file}; leave one out")
    if options.collect:
        collect.check(options)
    begins = episode_file.read(options.episodes_file) if options.episodes_file else ()
    run_options, start = resume.of_run(folder).options, files.current_folder()
    as_here = dataclasses.replace(run_options, eval_episodes=options.episodes)
    for_evaluation = lambda on_device: build.num_eval_envs(as_here, as_here.eval_envs, on_device)
    num_envs = policy.num_exploration_envs(run_options) if options.explore else for_evaluation
    settings, envs = saved_run.open_env(folder, env, num_envs, options.play_seed, options.env_options, options.protocol)
    if begins:
        config = build.host_env_config(settings.options, build.WATCHING, options.play_seed)
        envs = episode_file.with_begins(envs, begins, config)
    saved = saved_run.read_run(folder, options.which, settings, envs, options.member, start)
    saved = saved if options.seed is None else saved_run.select_seed(saved, options.seed)
    if options.collect:
        collect.check_run(saved, episode_file.counted(options))
    return saved._replace(opponents=match.open_opponent(saved, options)) if options.against else saved


def evaluate_run(saved: Any, options: Options) -> dict[str, Any]:
    """Evaluate each training seed, write evaluation.json and return its content plus `file`, its path or None.

    With `options.against`, the result is that of `match.play`, in match.json.
    """
    from jaxrl_fast.envs.host.env import original_errors
    from jaxrl_fast.evaluation import collect, match
    from jaxrl_fast.runs import fingerprint
    from jaxrl_fast.training import evaluator, printers
    from jaxrl_fast.utils import compile_cache, devices, warnings

    if options.against:
        result = match.play(saved, options, summarize)
        return result | {"file": write(saved, match.MATCH, result)}
    options, collected = episode_file.counted(options), None
    agent = saved.agent._replace(exploit=saved.agent.explore) if options.explore else saved.agent
    evaluation = evaluator.Evaluator(saved.env, agent, saved.seeds, options.episodes)
    cache = compile_cache.compile_cache(saved.settings.options.compile_cache and saved.env.on_device)
    with cache, original_errors():
        evaluation.report = printers.EvaluationPrinter(warnings.print_stderr, PROGRESS_S)
        if options.collect:
            played, collected = collect.play(saved, agent, options, evaluation.report)
        else:
            played = evaluation.episodes(saved.learners, -1 - options.play_seed)  # training uses 0, 1, 2 ...
    score, length, ended = episode_file.in_order(played, options.episodes) if options.episodes_file else played
    if not saved.env.on_device:
        devices.release_envs([saved.env])
    counted = [i for i, seed in enumerate(saved.seeds) if seed not in saved.diverged] or list(range(len(saved.seeds)))
    if saved.diverged:
        names = ", ".join(f"seed {seed}" for seed in saved.diverged)
        warnings.warn(f"the statistics over all seeds exclude those that diverged: {names}")
    names = saved.env.spec.players
    result = {
        "algo": saved.settings.algo,
        "env_id": saved.env.spec.id,
        "checkpoint": saved.checkpoint.name,
        "env_steps": saved.env_steps,
        "policy": "exploring" if options.explore else "greedy",
        "play_seed": options.play_seed,
        "episodes_file": options.episodes_file or None,
        "member": saved.member,
        "differs_from_training": differences(saved.settings.options, options),
        **summarize(score[counted], length[counted], ended[counted], names),
        "seeds": [
            {
                "seed": seed,
                **summarize(score[i : i + 1], length[i : i + 1], ended[i : i + 1], names),
                **episode_lists(*episodes),
            }
            for i, (seed, *episodes) in enumerate(zip(saved.seeds, score, length, ended))
        ],
        "device": devices.device(),
        "versions": fingerprint.versions(),
    } | ({"collected": collected} if collected else {})
    return result | {"file": write(saved, EVALUATION, result)}


def write(saved: Any, name: str, result: dict[str, Any]) -> str | None:
    """Write the result into the run's folder. Return the file's path, or None with a warning if that fails."""
    from jaxrl_fast.utils import warnings

    path = saved.folder / name
    try:
        with files.inside(saved.start), files.claimed(path) as path:
            path.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        warnings.warn(f"{path} could not be written ({error.strerror})")
        return None
    return str(path)


def differences(trained: Any, options: Options) -> dict[str, Any]:
    """Return the options of the environment, and the protocol, that differ from training."""
    asked = options.env_options | ({"protocol": options.protocol} if options.protocol else {})
    known = {name: as_lists(value) for name, value in trained.env_options.items()} | {"protocol": trained.protocol}
    plain = {name: as_lists(value) for name, value in asked.items()}
    return {name: value for name, value in plain.items() if str(known.get(name)) != str(value)}


def summarize(score: Any, length: Any, ended: Any, players: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return statistics of the episodes that have ended, with a 95% bootstrap interval of their mean return.

    With several seeds, the interval resamples seeds as well as episodes, so that it covers new trainings. With
    several players, `players` has the same statistics for each of them.

    Args:
        score: float [S, E], the returns of E episodes of each of S seeds, one player after another.
        length: int [S, E], their numbers of steps.
        ended: bool [S, E], whether the episode has ended.
        players: The names of P players, or ().
    """
    from jaxrl_fast.metrics import statistics
    from jaxrl_fast.training import evaluator

    known = [s[e] for s, e in zip(score, ended) if e.any()]
    low, high = statistics.mean_interval(known) if known else (None, None)
    found = evaluator.summarize_all(players, score, length, ended)
    found |= {"eval_return_low": statistics.finite(low), "eval_return_high": statistics.finite(high)}
    if players:
        each = zip(*(evaluator.by_player(players, x) for x in (score, length, ended)))
        found["players"] = {player: summarize(*own) for player, own in zip(players, each, strict=True)}
    return found


def episode_lists(score: Any, length: Any, ended: Any) -> dict[str, Any]:
    """Return the returns and lengths of the episodes [E] of one seed that have ended."""
    from jaxrl_fast.metrics import statistics

    return {"returns": [statistics.finite(x) for x in score[ended]], "lengths": length[ended].tolist()}
