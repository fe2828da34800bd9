"""Define the options of a run, apart from the algorithm's options, and of a sweep."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jaxrl_fast.options.declare import (
    COUNT,
    MAX_INDEX,
    NON_NEGATIVE,
    SIZE,
    Bounds,
    Part,
    Period,
    Seconds,
    choice,
    option,
    options_of,
    part,
)
from jaxrl_fast.options.host import Host
from jaxrl_fast.utils.plain import as_lists

LAST_SEED = MAX_INDEX  # JAX reads a larger seed modulo 2^32, and a negative one as another
DEFAULT = {"config": "ppo_cartpole", "stop_when_solved": True}  # without an algorithm, a preset or an environment
MAX_EVAL_EPISODES, MIN_EVAL_EPISODES = 128, 10  # of an evaluation, unless the user chooses their number
STEPPING_OPTIONS = ("num_threads", "thread_affinity_offset")  # environment options that do not change its steps

# Options of one process of a run, not of the run itself
NOT_SAVED = ("run_dir", "resume", "dry_run", "replay_dir")

# Options for watching, storing and executing a run, which do not change its results.
system = partial(option, resumable=True, sweepable=False)
evaluation = partial(option, resumable="inexact")  # an evaluation resets host environments where a resume is exact


def same_env(old: Any, new: Any) -> bool:
    """Return whether two ids mean the same environment, with or without a backend. Objects always count as the same."""
    if not isinstance(new, str):
        return True
    (backend, name), (other_backend, other) = (env.rpartition("/")[::2] for env in (str(old), new))
    return name == other and (backend == other_backend or not backend or not other_backend)


def same_episodes(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether environments with these options have the same episodes."""
    deciding = lambda options: {k: as_lists(v) for k, v in options.items() if k not in STEPPING_OPTIONS}
    return deciding(old) == deciding(new)


def written_env(env: Any) -> Any:
    """Return an environment as a file holds it: an id, or the repr of an object without its address."""
    return env if isinstance(env, str) else re.sub(r" at 0x[0-9a-f]+", "", repr(env))


@dataclass(frozen=True)
class OnePlayer(Part):
    """An environment with one player."""


@dataclass(frozen=True)
class Players(Part):
    """Several players, with one policy for all (shared) or one for each (independent)."""


@dataclass(frozen=True)
class SelfPlay(Part):
    """Two players with one policy, against its earlier versions."""

    pool: int = option(8, "Number of earlier policies that are kept as opponents.", bounds=Bounds(1, 2**10))


@dataclass(frozen=True)
class Task:
    """Environment, length and seeds of a run."""

    env: Any = option(
        "CartPole-v1",
        "Environment: an id such as gymnax/CartPole-v1, or package.module:Class for a custom one.",
        equal=same_env,
    )
    env_options: dict[str, Any] = option(
        {},
        "Parameters or constructor arguments of the environment, such as max_steps_in_episode=200. A number follows a "
        "schedule, gravity=4..12@2M (from 4 to 12 in 2M environment steps, then 12), or a callback, "
        "gravity=4@callback. Evaluations use the last value.",
        equal=same_episodes,
    )
    protocol: Literal["", "dqn2015", "machado2018"] = option(
        "",
        "Protocol for Atari: dqn2015 (its default: a lost life ends an episode, rewards are clipped) or machado2018 "
        "(sticky actions).",
    )
    wrap: tuple[str, ...] = option(
        (),
        "Wrappers: quarantine, hide=PART, previous, time-limit or package.module:function. quarantine: reset an "
        "environment whose observation or reward is not finite, and do not learn from that step; on for physics, "
        "unless no-quarantine. hide: remove a part of the observation, by its index or name, such as velocity. "
        "previous: add the previous action and reward to the observation. time-limit: treat time limits as "
        "terminations.",
        sweepable=False,
        equal=lambda old, new: {*old} == {*new},
    )
    num_envs: int = option(
        4,
        "Number of parallel environments. auto: the number with the best throughput on this machine. Larger values "
        "usually need retuned hyperparameters.",
        bounds=SIZE,
        words=("auto",),
    )
    total_steps: int = option(
        500_000,
        "Environment steps of each seed, summed over its environments; rounded up to whole updates.",
        bounds=COUNT,
        resumable=True,
    )
    seed: int = option(0, "Random seed; with num_seeds K, seeds seed..seed+K-1.", bounds=Bounds(0, LAST_SEED))
    num_seeds: int = option(1, "Number of seeds to train in one compiled program.", bounds=SIZE, sweepable=False)
    players: Part = choice(
        "auto",
        "Policies of an environment with several players: shared (one policy, which observes the player's number), "
        "independent (one policy per player) or self-play (one policy for two players, against its earlier versions). "
        "auto: shared where there are several players.",
        **{"auto": OnePlayer(), "shared": Players(), "independent": Players(), "self-play": SelfPlay()},
    )
    devices: int | Literal["auto"] = option(
        "auto",
        "Number of devices that the environments are split over. auto: all of them, or as many as have enough work. "
        "With --distributed HOST:PORT,COUNT,INDEX in each of several processes, those of all of them.",
        bounds=SIZE,
    )


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of the greedy policy."""

    eval_every: int = evaluation(0, "Environment steps between evaluations; 0: only at the end.", bounds=NON_NEGATIVE)
    eval_episodes: int | Literal["auto"] = evaluation(
        "auto",
        f"Episodes per evaluation; 0: no evaluations. auto: {MAX_EVAL_EPISODES}; for host environments fewer, at least "
        f"{MIN_EVAL_EPISODES}, if these take more than a tenth of the steps of the training.",
        bounds=Bounds(0, 10**6),
    )
    eval_envs: int = evaluation(
        128, "Number of evaluation environments; the default is reduced to num_envs for host environments.", bounds=SIZE
    )
    solved_threshold: float | None = option(
        None,
        "Mean return over at least the last 100 training episodes from which the task counts as solved. none: never.",
        resumable=True,
    )
    stop_when_solved: bool = option(False, "End the run once it is solved.", resumable=True)

    @property
    def max_eval_episodes(self) -> int:
        """Return the most episodes of an evaluation."""
        return MAX_EVAL_EPISODES if self.eval_episodes == "auto" else int(self.eval_episodes)


@dataclass(frozen=True)
class Output:
    """Names, logs and terminal output."""

    run_dir: str = system(
        "",
        "Run directory, new or empty; a bare word NAME is runs/NAME. Default: algorithm, environment, seed and time in "
        "runs.",
    )
    log_every: int = system(
        0, "Environment steps between records in metrics.jsonl; 0: about 500 records per run.", bounds=NON_NEGATIVE
    )
    console_every: Seconds = system(
        Seconds(1.0),
        "Seconds (or 30s, 5min) between progress lines on the terminal; at least 1% of the elapsed time.",
        bounds=NON_NEGATIVE,
    )
    log_level: Literal["info", "quiet"] = system("info", "What to print; quiet: only warnings and errors.")
    loggers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = system(
        ("tensorboard",),
        "What else to log to, besides metrics.jsonl: tensorboard (events in the run directory), wandb (Weights & "
        "Biases) or trackio. none: nothing else.",
    )
    project: str = system("jaxrl_fast", "Project name for wandb and trackio.")
    dry_run: bool = system(
        False,
        "Check the options, compile, and print the memory and disk space needed; train and write nothing. With --for "
        "t4|a100|rtx4090|h100|h200, compile for that GPU and print its kernels (extra gpu-check); 2x8xh200: for two "
        "hosts with eight each.",
    )


@dataclass(frozen=True)
class System:
    """Use of this machine, on which results do not depend."""

    host: Host = part(Host(), "Stepping of environments on the host.")
    gpu_memory: float | None = system(
        None,
        "Fraction of GPU memory that JAX reserves at the start. none: XLA_PYTHON_CLIENT_MEM_FRACTION, or 0.75.",
        bounds=Bounds(0, 1, exclusive_min=True),
    )
    compile_cache: bool = system(True, "Cache compiled programs in ~/.cache/jaxrl_fast (or JAX_COMPILATION_CACHE_DIR).")


@dataclass(frozen=True)
class Checkpoints:
    """Saving and resuming."""

    resume: str = system(
        "",
        "Run directory to resume. Only total_steps and options of evaluation, logging, checkpoints, threads and this "
        "machine may change.",
    )
    init_from: str = option(
        "",
        "Start from the parameters and normalizers of another run: its directory, a checkpoint, an exported policy, or "
        "an .npz or .safetensors file. RUN:PIECE loads one piece: network, actor, critic or torso.",
    )
    save_every: Period = system(
        Period("5min"),
        "Environment steps (1M) or time (30s, 5min, 2h) between checkpoints; 0: only when the run ends or is stopped.",
        resumable="inexact",
    )
    keep_checkpoints: int = system(2, "Number of newest checkpoints to keep, in addition to the best one.", bounds=SIZE)
    keep_replay: bool = system(
        True,
        "Keep the replay files (host or disk storage) of a finished run; without them, the run cannot be extended.",
    )
    replay_dir: str = option(
        "",
        "Folder, new or empty, for the replay files. Default: in the run directory.",
        sweepable=False,
    )
    on_nonfinite: Literal["stop", "continue"] = system(
        "stop",
        "What to do if a seed's losses or parameters become NaN or infinite. stop: end the run. continue: train the "
        "other seeds.",
    )


@dataclass(frozen=True)
class Launch:
    """Where the programs of a sweep, or the tasks of a search, are started."""

    launcher: Literal["local", "slurm", "ray"] = option(
        "local",
        "local: train on this machine. slurm: submit a job array and exit. ray: start Ray tasks, on the nodes of a "
        "cluster or on this machine, and wait for them.",
    )
    slurm_options: dict[str, Any] = option(
        {}, "submitit parameters of each job, such as timeout_min=600 gpus_per_node=1 slurm_partition=gpu."
    )
    ray_options: dict[str, Any] = option(
        {}, "Resources of each Ray task, such as num_cpus=4 num_gpus=1. Default: a CPU, and a GPU if there are any."
    )


@dataclass(frozen=True)
class SweepOptions(Launch):
    """Execution of the runs of a sweep."""

    scale: Literal["none", "learning-rate-linear", "learning-rate-sqrt", "minibatches"] = option(
        "none", "Scale with num_envs: the learning rate (linearly or by the square root) or the number of minibatches."
    )
    workers: int = option(1, "Number of processes on this machine that train the programs of the sweep.", bounds=SIZE)
    sweep_dir: str = option(
        "", "Sweep directory; a bare word NAME is sweeps/NAME. Default: algorithm, environment and time in sweeps."
    )
    retry: bool = option(False, "When resuming, also retry failed runs.")


@dataclass(frozen=True)
class Options(Checkpoints, System, Output, Evaluation, Task):
    """All options of a run, apart from the algorithm's options."""


OF_RUN = options_of(Options)
