"""Make a plan from settings: check them, make environments and agent, and create the run's folder.

Nothing is compiled yet.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_fast.config import resume
from jaxrl_fast.config.population import LABEL, Member
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import options_of, replace, value_of
from jaxrl_fast.options.run import Options
from jaxrl_fast.parallel.population import Varied
from jaxrl_fast.runs import directory, replay_dir
from jaxrl_fast.utils import devices, formatting, locks
from jaxrl_fast.utils.files import current_folder
from jaxrl_fast.utils.parsing import parse_period

if TYPE_CHECKING:
    from jaxrl_fast.parallel.placement import Placement
    from jaxrl_fast.runs.checkpoint import Checkpoint
    from jaxrl_fast.training.memory import MemoryEstimate
    from jaxrl_fast.types import Agent, Env


FOLDERS = ("run_dir", "resume", "replay_dir")  # options
DECIDED = resume.DECIDED_BY_ENV + resume.DECIDED_BY_MEMORY
MAX_UPDATE_STEPS = 2**31 - 1  # rows of an update are counted in int32

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


class Plan(NamedTuple):
    """A run that has passed every check; nothing is compiled yet."""

    settings: Settings
    env: "Env"  # one shard
    agent: "Agent"
    placement: "Placement"
    eval_env: "Env"
    num_updates: int
    steps_per_update: int
    folder: Path  # absolute, because environments and callbacks may change the current directory
    lock: locks.Lock | None = None  # on the folder
    needs: "MemoryEstimate | None" = None
    saved: "Checkpoint | None" = None  # the checkpoint to resume from
    damaged: tuple[str, ...] = ()  # a sentence for each newer checkpoint that is damaged
    members: tuple[Member, ...] = ()  # the members that train together; () for consecutive seeds
    varied: Varied | None = None  # the hyperparameters in which members differ, if any
    replay_note: str = ""  # where the replay's observations lie, if not on the device
    decided: tuple[str, ...] = ()  # options whose values follow from the environment and the free memory
    place: Path | None = None  # the folder as it was given, if it differs

    def shown(self, path: Path) -> Path:
        """Return a path in the run's folder for a message: relative if the folder was given so."""
        return (self.place or self.folder) / path.relative_to(self.folder)

    def release(self) -> None:
        """Release the lock on the folder."""
        if self.lock:
            self.lock.release()


def decide_num_envs(settings: Settings) -> Settings:
    """Return the settings with the best number of environments where num_envs is auto. Nothing is written."""
    if not settings.auto_num_envs:
        return settings
    check_services(settings.options)
    directory.chosen(settings.options)
    check_devices(settings.options)
    from jaxrl_fast.training import calibrate

    with contextlib.chdir("."):  # environments may change the current directory
        return calibrate.choose(settings)


def make_plan(settings: Settings) -> Plan:
    """Check everything, then make the run's folder and lock it. Raise a one-sentence ValueError for any mistake."""
    options, start = settings.options, current_folder()
    check_services(options)
    lock = directory.claim(Path(options.resume)) if options.resume else None
    try:
        if not options.resume:  # refuse a wrong folder before slow imports
            directory.chosen(options)
        of_replay = replay_dir.chosen(options)
        if options.resume:
            replay_dir.check_links(Path(options.resume))
        ready = validate_plan(settings)
        place = Path(options.resume) if options.resume else directory.make(settings, ready.env, start)
    except BaseException:
        if lock:  # a notebook keeps the error, and the error keeps the lock alive
            lock.release()
        raise
    folder = start / place
    if lock is None:
        lock = directory.claim(folder, "run_dir")
        directory.check_free(folder, lock)
        replay_dir.link(folder, of_replay, [resource.name for resource in ready.agent.learning.resources])
    return ready._replace(folder=folder, lock=lock, place=place)


def dry_plan(settings: Settings) -> Plan:
    """Check everything as `make_plan` does, without a folder and a lock. Nothing is written."""
    start = current_folder()
    check_services(settings.options)
    place = Path(settings.options.resume) if settings.options.resume else directory.chosen(settings.options)
    replay_dir.chosen(settings.options)
    if settings.options.resume:
        replay_dir.check_links(Path(settings.options.resume))
    ready = validate_plan(settings)
    place = place or directory.default(settings, ready.env)
    return ready._replace(folder=start / place, place=place)


def validate_plan(settings: Settings, members: tuple[Member, ...] = ()) -> Plan:
    """Return a plan without a new run's folder and without a lock. Nothing is written.

    Its options name folders by absolute paths, because making an environment may change the current directory.
    """
    assert not settings.auto_num_envs, "decide_num_envs comes first"
    check_devices(settings.options)
    saved, damaged = _to_resume(settings, members)
    options = settings.options
    absolute: dict[str, Any] = {
        name: str(Path(text).absolute()) for name in FOLDERS if (text := getattr(options, name))
    }
    folder, asked = Path(options.resume), settings
    settings = settings._replace(options=dataclasses.replace(options, **absolute))
    ready = _fit(*_build(settings, saved), saved, members)
    return ready._replace(
        folder=folder,
        damaged=damaged,
        decided=tuple(name for name in DECIDED if asked.value(name) != ready.settings.value(name)),
    )


def _to_resume(settings: Settings, members: Sequence[Member]) -> tuple["Checkpoint | None", tuple[str, ...]]:
    """Return the checkpoint to resume from, if any, and a sentence for each newer one that is damaged."""
    options = settings.options
    if not options.resume:
        return None, ()
    folder = Path(options.resume)
    saved, damaged = directory.checkpoint_to_resume(folder)
    if saved:
        resume.check_unchanged(settings, saved.manifest["config"], folder, saved.folder, decided=not members)
        saved = saved._replace(folder=saved.folder.absolute())
        check_unsolved(options, saved)
    return saved, damaged


def _build(settings: Settings, saved: "Checkpoint | None") -> tuple[Plan, Any]:
    """Return a plan with environments and the agent, its replay on the device, and a function that makes the agent."""
    from jaxrl_fast.parallel import program
    from jaxrl_fast.training import build

    options, algorithm = settings.options, build.load_algorithm(settings)
    rollout_length = settings.agent.length(options.num_envs)
    steps_per_update = rollout_length * options.num_envs
    each = formatting.steps_of_rollout(rollout_length, options.num_envs)
    if steps_per_update > MAX_UPDATE_STEPS:
        raise ValueError(
            f"num_envs: an update must have at most {MAX_UPDATE_STEPS} steps, got {steps_per_update} ({each}); use "
            "fewer environments or a shorter rollout"
        )
    num_updates = count_updates(options, steps_per_update, saved)
    done = saved.manifest["host"]["scores"]["updates"] if saved else 0
    before = saved.manifest if saved else None
    settings, env, agent, placement = build.build(settings, algorithm, num_updates, before, done)
    options = settings.options
    if env.on_device:
        check_on_device(options, env)
    else:
        check_on_host(settings, env, agent)
    if options.total_steps < steps_per_update:
        raise ValueError(
            f"total_steps: must be at least one update of {formatting.counted(steps_per_update, 'step')} ({each}), "
            f"got {options.total_steps}"
        )
    eval_env = build.evaluation_env(options, env, done)
    if settings.algo not in ALGORITHMS:
        with build.blamed(settings.algo, env):
            check_update(settings.algo, *program.shapes_of_update(env, agent))
    make = lambda agent_config: build.make_agent(agent_config, algorithm, env, num_updates)
    return Plan(settings, env, agent, placement, eval_env, num_updates, steps_per_update, Path(options.resume)), make


def _fit(plan: Plan, make: Callable[..., "Agent"], saved: "Checkpoint | None", members: tuple[Member, ...]) -> Plan:
    """Return the plan with the replay in the storage that it fits into. Raise ValueError if the run does not fit."""
    from jaxrl_fast.parallel import program
    from jaxrl_fast.runs import checkpoint
    from jaxrl_fast.training import memory, replay_storage

    resumed = saved is not None
    settings, agent, note = replay_storage.decide(plan.settings, plan.env, plan.agent, plan.placement, make, resumed)
    needs = memory.estimate(plan.env, agent, plan.placement)
    memory.check_fits(needs, settings.agent.replay_size, plan.steps_per_update, resumed)
    varied = vary(members, make, settings.agent) if members else None
    if saved:  # refuse a checkpoint of other shapes before anything is compiled
        checkpoint.unflatten(program.shapes(plan.env, agent, plan.placement, varied), saved)
    return plan._replace(
        settings=settings,
        agent=agent,
        needs=needs,
        saved=saved,
        members=members,
        varied=varied,
        replay_note=note,
    )


def check_services(options: Options) -> None:
    """Raise ValueError if a requested logging service is not installed."""
    for service in options.loggers:
        if service != "tensorboard" and util.find_spec(service) is None:
            raise ValueError(f'loggers: {service} is not installed; pip install "jaxrl_fast[{service}]"')


def check_devices(options: Options) -> None:
    """Configure JAX's devices. Raise ValueError if it cannot train on them with these options."""
    if options.host.overlap and not options.host.async_pools:
        raise ValueError("host.overlap: requires async_pools, got 0; set async_pools to 1 or more")
    devices.configure_cpu_devices(options.devices)
    devices.reserve_gpu_memory(options.gpu_memory)
    devices.check_device()
    if devices.is_double():
        raise ValueError("jax_enable_x64 is on, but training requires 32-bit mode; unset JAX_ENABLE_X64")
    if not devices.compiles():
        raise ValueError("jax_disable_jit is on, but training is one compiled program; unset JAX_DISABLE_JIT")
    for problem in devices.unsupported_settings():
        raise ValueError(problem)


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
    taken = [name for name in metrics if name in RESERVED_METRICS or name.startswith(("eval_", LABEL))]
    if taken:
        raise ValueError(f"algorithm {algo!r}: the metric name {' and '.join(taken)} is reserved; rename it")


def vary(members: Sequence[Member], make: Callable[..., "Agent"], config: Any) -> Varied | None:
    """Return the hyperparameters that differ between members, or None if only seeds do. `make` takes a config."""
    import numpy as np

    first = members[0].values
    differing = [name for name in first if any(m.values[name] != first[name] for m in members)]
    if not differing:
        return None
    values = {name: np.asarray([m.values[name] for m in members], np.float32) for name in differing}
    return Varied(values, lambda values: make(replace(config, values)))
