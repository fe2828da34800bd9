"""Make a plan from settings: check them, make environments and agent, and create the run's folder.

Nothing is compiled yet.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_fast.config import resume
from jaxrl_fast.config.population import Member, in_line
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import replace
from jaxrl_fast.parallel import team
from jaxrl_fast.parallel.population import Varied
from jaxrl_fast.runs import directory, replay_dir
from jaxrl_fast.training import bonus_data, checks
from jaxrl_fast.utils import formatting, locks
from jaxrl_fast.utils.files import current_folder

if TYPE_CHECKING:
    from jaxrl_fast.parallel.placement import Placement
    from jaxrl_fast.runs.checkpoint import Checkpoint
    from jaxrl_fast.training.init_from import Start
    from jaxrl_fast.training.init_source import Source
    from jaxrl_fast.training.memory import MemoryEstimate
    from jaxrl_fast.types import Agent, Env


FOLDERS = ("run_dir", "resume", "replay_dir")  # options
DECIDED = resume.DECIDED_BY_ENV + resume.DECIDED_BY_MEMORY
MAX_UPDATE_STEPS = 2**31 - 1  # rows of an update are counted in int32


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
    start: "Start | None" = None  # of another run: what this one starts from
    gpu: str = ""  # the GPU for which a dry run compiles, if it is not of this machine

    @property
    def shares_env(self) -> bool:
        """Return whether an evaluation uses the host environment of the training, which has then ended."""
        return self.env.host is not None and self.eval_env.host is self.env.host

    def shown(self, path: Path) -> Path:
        """Return a path in the run's folder for a message: relative if the folder was given so."""
        return (self.place or self.folder) / path.relative_to(self.folder)

    def release(self) -> None:
        """Release the lock on the folder."""
        if self.lock:
            self.lock.release()


def make_plan(settings: Settings) -> Plan:
    """Check everything, then make the run's folder and lock it; with `dry_run`, write nothing.

    Raise a one-sentence ValueError for any mistake.
    """
    options, start = settings.options, current_folder()
    resumed, lock = Path(options.resume) if options.resume else None, None
    checks.check_services(options)
    leads = team.current().leads
    if resumed and not options.dry_run and leads:
        lock = directory.claim(resumed)
    try:
        chosen = None if resumed or not leads else directory.chosen(options)  # refuse it before slow imports
        of_replay = replay_dir.chosen(options)
        if resumed:
            replay_dir.check_links(resumed)
        ready = validate_plan(_with_num_envs(settings))
        default = directory.default(settings, ready.env)
        make = lambda: chosen or default if options.dry_run else directory.make(chosen, default, start)
        place = resumed or Path(team.current().decide(lambda: str(make())))
    except BaseException:
        if lock:  # a notebook keeps the error, and the error keeps the lock alive
            lock.release()
        raise
    folder = start / place
    if not options.dry_run:
        directory.check_shared(folder, "resume" if resumed else "run_dir")
    if not resumed and not options.dry_run:
        lock = directory.claim_new(folder) if leads else None
        names = team.current().gather([resource.name for resource in ready.agent.learning.resources])
        team.current().decide(lambda: replay_dir.link(folder, of_replay, list(itertools.chain(*names))))
    return ready._replace(folder=folder, lock=lock, place=place)


def _with_num_envs(settings: Settings) -> Settings:
    """Return the settings with the best number of environments where num_envs is auto."""
    if not settings.auto_num_envs:
        return settings
    if team.current().count > 1:
        raise ValueError("num_envs: cannot be measured by several processes, got auto; give a number")
    checks.check_devices(settings.options)
    from jaxrl_fast.training import calibrate

    with contextlib.chdir("."):  # environments may change the current directory
        return calibrate.choose(settings)


def validate_plan(settings: Settings, members: tuple[Member, ...] = ()) -> Plan:
    """Return a plan without a new run's folder and without a lock. Nothing is written.

    Its options name folders by absolute paths, because making an environment may change the current directory.
    """
    checks.check_evaluation(settings.options)
    checks.check_devices(settings.options)
    saved, damaged = _to_resume(settings, members)
    checks.check_ahead(settings, saved)
    options, source = settings.options, _source(settings.options)
    absolute: dict[str, Any] = {
        name: str(Path(text).absolute()) for name in FOLDERS if (text := getattr(options, name))
    }
    folder, asked = Path(options.resume), settings
    settings = bonus_data.with_absolute_path(settings._replace(options=dataclasses.replace(options, **absolute)))
    ready = _fit(*_build(settings, saved), saved, members)
    return ready._replace(
        start=None if saved else _start(ready, source),
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
        checks.check_unsolved(options, saved)
    return saved, damaged


def _source(options: Any) -> "Source | None":
    """Return the arrays of the other run from which a new run starts, if any."""
    if options.resume or not options.init_from:
        return None
    from jaxrl_fast.training import init_source

    return init_source.read(options.init_from)


def _start(plan: Plan, source: "Source | None") -> "Start | None":
    """Return what the run starts from, if it starts from another run. Raise ValueError if it does not fit."""
    from jaxrl_fast.training import init_from

    options, agent = plan.settings.options, plan.agent
    init_from.check_frozen(plan.settings.value("optimizer.freeze") or (), agent)
    if source is None:
        return init_from.kept(Path(options.resume)) if options.resume and options.init_from else None
    members = plan.members or in_line(options.seed, options.num_seeds)
    return init_from.fit(source, agent, plan.settings.algo, [member.seed for member in members])


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
    num_updates = checks.count_updates(options, steps_per_update, saved)
    done = saved.manifest["host"]["scores"]["updates"] if saved else 0
    before = saved.manifest if saved else None
    settings, env, agent, placement = build.build(settings, algorithm, num_updates, before, done)
    options = settings.options
    if env.on_device:
        checks.check_on_device(options, env)
    else:
        checks.check_on_host(settings, env, agent)
    if options.total_steps < steps_per_update:
        raise ValueError(
            f"total_steps: must be at least one update of {formatting.counted(steps_per_update, 'step')} ({each}), "
            f"got {options.total_steps}"
        )
    eval_env = build.evaluation_env(options, env, done)
    if settings.algo not in ALGORITHMS:
        with build.blamed(settings.algo, env):
            checks.check_update(settings.algo, *program.shapes_of_update(env, agent))
    make = lambda agent_config: build.make_agent(agent_config, algorithm, env, num_updates)
    return Plan(settings, env, agent, placement, eval_env, num_updates, steps_per_update, Path(options.resume)), make


def _fit(plan: Plan, make: Callable[..., "Agent"], saved: "Checkpoint | None", members: tuple[Member, ...]) -> Plan:
    """Return the plan with the replay in the storage that it fits into. Raise ValueError if the run does not fit."""
    from jaxrl_fast.parallel import program
    from jaxrl_fast.runs import checkpoint
    from jaxrl_fast.training import memory, replay_storage

    resumed = saved is not None
    decision = replay_storage.decide(plan.settings, plan.env, plan.agent, plan.placement, make, resumed)
    settings, agent = decision.settings, decision.agent
    needs = memory.estimate(plan.env, agent, plan.placement, bonus_data.of_program(settings.agent))
    needs = needs._replace(files=decision.num_file_bytes)
    memory.check_fits(needs, settings.agent.replay_size, plan.steps_per_update, resumed)
    varied = vary(members, make, settings.agent)
    if saved:  # refuse a checkpoint of other shapes before anything is compiled
        checkpoint.unflatten(program.shapes(plan.env, agent, plan.placement, varied), saved)
    return plan._replace(
        settings=settings,
        agent=agent,
        needs=needs,
        saved=saved,
        members=members,
        varied=varied,
        replay_note=decision.note,
    )


def vary(members: Sequence[Member], make: Callable[..., "Agent"], config: Any) -> Varied | None:
    """Return the hyperparameters that differ between members and the data that all learn from; None without both.

    `make` takes a config.
    """
    import numpy as np

    first = members[0].values if members else {}
    differing = [name for name in first if any(m.values[name] != first[name] for m in members)]
    data = bonus_data.of_program(config)
    if not differing and not data:
        return None
    values = {name: np.asarray([m.values[name] for m in members], np.float32) for name in differing}
    return Varied(values, lambda values: make(replace(config, values)), data)
