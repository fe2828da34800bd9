"""The options of a run that are not the algorithm's own, and what their numbers may be."""

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NewType

MAX_COUNT = 2**30  # environment steps that a schedule may last: they are counted in int32
LAST_SEED = 2**31 - 1  # JAX reads larger ones modulo 2^32 and negative ones as others
Seconds = NewType("Seconds", float)  # may be written with a unit: 30s, 5min, 2h
DEFAULT = {"config": "ppo_cartpole", "stop_when_solved": True}  # without an algorithm, a preset or an environment


@dataclass(frozen=True)
class Task:
    """What is learned, and for how long."""

    env: Any = "CartPole-v1"
    """Environment: an id such as gymnax/CartPole-v1, or package.module:Class for one of your own."""
    env_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the environment, as key=value (more than one: a list, or the option again)."""
    protocol: Literal["", "dqn2015", "machado2018"] = ""
    """Atari's rules: dqn2015 (lost lives end episodes; what Atari gets if left out) or machado2018 (sticky actions)."""
    num_envs: int | Literal["auto"] = 4
    """Environments that step together: more are faster, and want other settings; auto: as many as pay off here."""
    total_steps: int = 500_000
    """Environment steps in all, rounded up to whole updates."""
    seed: int = 0
    """Of everything random; seeds from here on where there are several."""
    num_seeds: int = 1
    """Independent trainings in one program."""
    devices: int | Literal["auto"] = "auto"
    """Devices that the environments are split over."""
    async_pools: int = 0
    """Pools on the host, on each device, that work while the policy thinks for the others; 0: it waits for all."""
    overlap: bool = False
    """Pools in flight play a rollout while PPO or PQN learns from the one before; the policy is an update older."""


@dataclass(frozen=True)
class Evaluation:
    """When and how the greedy policy is tested, in environments of its own."""

    eval_every: int = 0
    """Environment steps between evaluations; 0: only at the end."""
    eval_episodes: int = 128
    """Episodes in an evaluation."""
    eval_envs: int = 128
    """Environments that they are played in; left at 128, on the host as many as train if these are fewer."""
    solved_threshold: float | None = None
    """Mean return of the last 100 training episodes or more (docs/metrics.md) that counts as solved."""
    stop_when_solved: bool = False
    """End the run there."""


@dataclass(frozen=True)
class Output:
    """Where results go."""

    run_dir: str = ""
    """Folder of this run, new or empty; left out, runs/NAME."""
    name: str = ""
    """Name of this run; left out, made of algorithm, environment, seed and time."""
    log_every: int = 0
    """Environment steps between lines of metrics.jsonl; 0: some 500 lines in all."""
    console_every: Seconds = Seconds(1.0)
    """Seconds (or 30s, 5min) between lines on the terminal; later in a long run they are 1% of its time so far."""
    log_level: Literal["info", "quiet"] = "info"
    """quiet: only warnings and errors."""
    tensorboard: bool = True
    """Write TensorBoard events into the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases."""
    trackio: bool = False
    """Log to trackio."""
    project: str = "jaxrl_fast"
    """Project name for wandb and trackio."""


@dataclass(frozen=True)
class System:
    """How this machine is used; nothing of it changes a result."""

    host_bridge: Literal["auto", "ffi", "callback"] = "auto"
    """How compiled programs reach environments on the host: by envpool's own calls, or through Python."""
    compile_cache: bool = True
    """Keep compiled programs in ~/.cache/jaxrl_fast (or JAX_COMPILATION_CACHE_DIR)."""


@dataclass(frozen=True)
class Checkpoints:
    """When the run is saved, and from where it goes on."""

    resume: str = ""
    """Folder of a run to go on with. Only its length, its threads and what it tells of itself may be changed."""
    save_every: int | str = "5min"
    """Environment steps (1M) or time (30s, 5min, 2h) between checkpoints; 0: only at the end and at a stop."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept, beside the best one evaluated."""
    exact_resume: bool = False
    """Environments on the host, which cannot be saved, begin anew at each checkpoint: going on is then exact too."""
    on_nonfinite: Literal["stop", "continue"] = "stop"
    """When a seed's numbers are no longer finite; continue: the other seeds go on."""


@dataclass(frozen=True)
class SweepOptions:
    """How several trainings are gone through."""

    scale: Literal["none", "learning-rate-linear", "learning-rate-sqrt", "minibatches"] = "none"
    """What follows the number of environments: the learning rate, its square root, or the number of minibatches."""
    workers: int = 1
    """Processes on this machine that share the work."""
    launcher: Literal["local", "slurm"] = "local"
    """slurm: submit the work as an array of jobs, and return."""
    slurm_options: dict[str, Any] = field(default_factory=dict)
    """Of each job, as key=value: timeout_min=600 gpus_per_node=1 slurm_partition=gpu (submitit's names)."""
    sweep_dir: str = ""
    """Folder of this sweep; left out, sweeps/NAME."""
    retry: bool = False
    """Where the sweep goes on: also what has failed is tried once more."""


@dataclass(frozen=True)
class Options(Checkpoints, System, Output, Evaluation, Task):
    """All options of a run that are not the algorithm's own."""


class Bounds(NamedTuple):
    """What a number may be."""

    least: float
    most: float = math.inf
    above: bool = False  # `least` itself is out


COUNT, POSITIVE, FRACTION, NOT_NEGATIVE = Bounds(1), Bounds(0, above=True), Bounds(0, 1), Bounds(0)
SIZE = Bounds(1, LAST_SEED)  # of what there is an array of
# A name means the same in every algorithm.
RANGES = {
    **dict.fromkeys(("num_envs", "num_seeds", "devices", "eval_envs", "keep", "workers", "max_steps"), SIZE),
    "total_steps": COUNT,
    "async_pools": Bounds(0, 64),
    **dict.fromkeys(("eval_every", "log_every", "console_every", "save_every"), NOT_NEGATIVE),
    **dict.fromkeys(("seed", "play_seed"), Bounds(0, LAST_SEED)),
    **dict.fromkeys(("episodes", "eval_episodes"), Bounds(1, 10**6)),
    "fps": Bounds(1, 100),
    **dict.fromkeys(("agent.rollout_length", "agent.num_minibatches", "agent.num_epochs"), COUNT),
    "agent.hidden_sizes": Bounds(1, 2**16),  # more is a mistake, and overflows JAX's sizes
    **dict.fromkeys(("agent.learning_rate", "agent.adam_epsilon", "agent.clip", "agent.target_kl"), POSITIVE),
    **dict.fromkeys(("agent.gamma", "agent.gae_lambda", "agent.q_lambda"), FRACTION),
    **dict.fromkeys(("agent.epsilon_start", "agent.epsilon_end"), FRACTION),
    **dict.fromkeys(("agent.priority_exponent", "agent.importance_exponent"), FRACTION),
    **dict.fromkeys(("agent.max_grad_norm", "agent.value_coef", "agent.entropy_coef"), NOT_NEGATIVE),
    **dict.fromkeys(("agent.apex_alpha", "agent.munchausen_alpha"), NOT_NEGATIVE),
    **dict.fromkeys(("agent.replay_ratio", "agent.munchausen_temperature"), POSITIVE),
    **dict.fromkeys(("agent.batch_size", "agent.n_step"), COUNT),
    **dict.fromkeys(("agent.target_update_interval", "agent.epsilon_steps"), Bounds(1, MAX_COUNT)),
    "agent.learning_starts": Bounds(0, MAX_COUNT),
    "agent.buffer_size": Bounds(1, 2**30),  # places are int32, and so is the sum of two
    "agent.tau": Bounds(0, 1, above=True),
    "agent.num_atoms": Bounds(2, 2**16),
    "agent.munchausen_clip": Bounds(-math.inf, 0),
}


SWITCHES = (bool, bool | None)  # options that need no value: --x and --no-x


def types_of(dataclass_type: type) -> dict[str, Any]:
    """Each field's type by name."""
    hints = typing.get_type_hints(dataclass_type)
    return {f.name: hints[f.name] for f in dataclasses.fields(dataclass_type)}


# These have one value in all of a sweep.
SINGLE = ("config", "num_seeds", *types_of(Output), *types_of(System), *types_of(Checkpoints))
