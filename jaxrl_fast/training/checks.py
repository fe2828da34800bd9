"""Check the options of a run against its devices, its environments and its algorithm."""

from collections.abc import Mapping
from importlib import util
from typing import TYPE_CHECKING, Any

from jaxrl_fast.config.population import LABEL
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.envs.schedules import METRIC
from jaxrl_fast.options.declare import options_of, value_of
from jaxrl_fast.options.host import RAY
from jaxrl_fast.options.run import Options
from jaxrl_fast.parallel import team
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.importing import install
from jaxrl_fast.utils.parsing import parse_period

if TYPE_CHECKING:
    from jaxrl_fast.runs.checkpoint import Checkpoint
    from jaxrl_fast.types import Agent, Env

RESERVED_METRICS = (  # names in every record, which an agent's metrics cannot have
    "episodes",
    "valid_steps",
    "return_sum",
    "return_mean",
    "return_min",
    "return_max",
    "length_sum",
    "episode_length_mean",
    "longest_episode",
    "seed",
    "env_steps",
    "num_updates",
    "wall_time_s",
    "train_time_s",
    "env_steps_per_s",
)


def check_services(options: Options) -> None:
    """Raise ValueError if a requested logging service is not installed."""
    for service in options.loggers:
        if service != "tensorboard" and util.find_spec(service) is None:
            raise ValueError(f"loggers: {service} is not installed; {install(service)}")


def check_evaluation(options: Options) -> None:
    """Raise ValueError for a period of evaluations that have no episodes."""
    if options.eval_every and not options.max_eval_episodes:
        raise ValueError(f"eval_every: must be 0 where eval_episodes is 0, got {options.eval_every}; leave one out")


def check_devices(options: Options) -> None:
    """Configure JAX's devices. Raise ValueError if it cannot train on them with these options."""
    if options.host.overlap and not options.host.async_pools:
        raise ValueError("host.overlap: requires async_pools, got 0; set async_pools to 1 or more")
    devices.configure_cpu_devices(options.devices)
    devices.reserve_gpu_memory(options.gpu_memory)
    devices.check_device()
    devices.check_settings()


def check_ahead(settings: Settings, saved: "Checkpoint | None") -> None:
    """Raise ValueError for options with which no environment can step ahead of the learner."""
    options, host = settings.options, settings.options.host
    if not host.ahead:
        return
    from jaxrl_fast.envs.host.config import num_workers_ahead, workers_of  # imports jax

    if settings.agent.replay is None:
        problem, remedy = f"requires an algorithm with a replay, got {settings.algo}", "use dqn, sac, td3 or ddpg"
        raise ValueError(f"host.ahead: {problem}; {remedy}")
    if host.async_pools:  # overlap requires them
        raise ValueError(f"host.ahead: makes a pool of each worker, got async_pools {host.async_pools}; leave it out")
    if (count := team.current().count) > 1:
        raise ValueError(f"host.ahead: requires one process, got {count}; leave out distributed")
    if options.devices not in ("auto", 1):
        raise ValueError(f"host.ahead: requires one device, got devices {options.devices}; use 1")
    number = num_workers_ahead(options.num_envs, workers_of(host.workers, 0.0))
    if saved:
        before = num_workers_ahead(options.num_envs, workers_of(saved.manifest["config"]["host"]["workers"], 0.0))
        if number != before:
            remedy = f"use {before} or {RAY}{before}"
            raise ValueError(f"host.workers: a run with host.ahead keeps its workers, got {host.workers}; {remedy}")


def check_unsolved(options: Options, saved: "Checkpoint") -> None:
    """Raise ValueError for more steps of a run that has stopped as solved: no seed is left to train."""
    if not options.stop_when_solved:
        return
    if saved.manifest["config"]["solved_threshold"] != options.solved_threshold:
        return
    scores = saved.manifest["host"]["scores"]
    settled = all(solved or lost is not None for solved, lost in zip(scores["solved"], scores["diverged"], strict=True))
    if settled and options.total_steps > saved.manifest["config"]["total_steps"]:
        raise ValueError(
            f"total_steps: cannot extend a run that stopped as solved, got {options.total_steps}; "
            "use stop_when_solved false"
        )


def count_updates(options: Options, steps_per_update: int, saved: "Checkpoint | None") -> int:
    """Return the updates of the whole run. Raise ValueError if there are too many, or fewer than already made."""
    total_steps = options.total_steps
    num_updates = -(-total_steps // steps_per_update)
    if num_updates >= 2**31:
        raise ValueError(f"total_steps: must be at most {2**31 - 1} updates, got {num_updates}")
    if saved and saved.manifest["host"]["scores"]["updates"] > num_updates:
        made = saved.manifest["env_steps"]
        raise ValueError(f"total_steps: must be at least the {made} steps that this run has made, got {total_steps}")
    return num_updates


def check_on_device(options: Options, env: "Env") -> None:
    """Raise ValueError for an option of host environments."""
    for name, option in options_of(options.host).items():
        if (value := value_of(options.host, name)) != option.default:
            raise ValueError(f"host.{name}: {env.spec.id} runs on the device, got {value}; leave it out")


def check_on_host(settings: Settings, env: "Env", agent: "Agent") -> None:
    """Raise ValueError for options that host environments do not support."""
    options = settings.options
    if options.num_seeds > 1:
        raise ValueError(
            f"num_seeds: must be 1 for the host environment {env.spec.id}, got {options.num_seeds}; "
            "python -m jaxrl_fast.sweep --seed 0..4 trains several one after another"
        )
    if options.host.overlap and agent.learning.gradient_steps is None:
        raise ValueError(
            f"host.overlap: requires an algorithm that learns from whole rollouts, got {settings.algo}; "
            "use async_pools alone"
        )
    if options.host.exact_resume and options.host.bridge == "ffi":
        raise ValueError("host.exact_resume: requires host.bridge callback, got ffi; use callback")
    if options.host.exact_resume and not parse_period(str(options.save_every))[0]:  # resets must come at fixed steps
        raise ValueError(f"host.exact_resume: requires save_every in environment steps (1M), got {options.save_every}")


def check_update(algo: str, state: Any, result: Any) -> None:
    """Raise ValueError if a custom algorithm's update changes the state's form, or its metrics are not scalars."""
    import jax

    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        got = type(result).__name__
        raise ValueError(f"algorithm {algo!r}: update must return a state and a dict of metrics, got {got}")
    leaves = jax.tree_util.tree_leaves_with_path
    said = lambda tree: {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves(tree)}
    before, after, metrics = said(state), said(result[0]), result[1]
    for name in before | after:
        was, now = before.get(name, "nothing"), after.get(name, "nothing")
        if was != now:
            raise ValueError(f"algorithm {algo!r}: update must keep state{name} as init makes it, {was}, got {now}")
    wrong = [f"{name} has shape {list(x.shape)}" for name, x in metrics.items() if x.shape]
    if wrong:
        raise ValueError(f"algorithm {algo!r}: metrics must be scalars, but {' and '.join(wrong)}; return means")
    taken = [name for name in metrics if name in RESERVED_METRICS or name.startswith(("eval_", METRIC, LABEL))]
    if taken:
        raise ValueError(f"algorithm {algo!r}: the metric name {' and '.join(taken)} is reserved; rename it")
