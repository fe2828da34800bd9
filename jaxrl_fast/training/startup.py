"""Bring a run to its first update: create host environments, compile the program, make or restore the state."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxrl_fast.loggers.terminal import Console, make_console
from jaxrl_fast.loop import TrainState
from jaxrl_fast.parallel import program, team
from jaxrl_fast.runs import files, replay_dir
from jaxrl_fast.training import console, gpu_report, init_from, summary
from jaxrl_fast.training.kept import Kept
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.training.progress import RunProgress
from jaxrl_fast.training.run_logger import NoLogger, RunLogger
from jaxrl_fast.utils import compile_cache, formatting
from jaxrl_fast.utils.errors import add_remedy
from jaxrl_fast.utils.memory import format_bytes

ONE_ENV = "evaluations have environments of their own: use eval_episodes 0, or num_envs 1 with eval_every 0"


def open_envs(plan: Plan, terminal: Console) -> None:
    """Create the host environments: the program is compiled for their addresses."""
    if plan.env.host is None:
        return
    is_later = plan.settings.options.host.exact_resume  # that of evaluations is reseeded first
    is_elsewhere = not team.current().leads  # process 0 evaluates
    opened = [plan.env] if is_later or plan.shares_env or is_elsewhere else [plan.env, plan.eval_env]
    count = sum(env.spec.num_envs * env.parallelism.num_shards for env in opened)
    with console.timed(terminal, f"making {formatting.counted(count, 'environment')}", "made"):
        for env in opened:
            assert env.host, "both run on the host"
            try:
                env.host.open()
            except Exception as error:  # environments may raise anything
                if env is not plan.env:
                    add_remedy(error, ONE_ENV)
                raise


@contextlib.contextmanager
def advised(plan: Plan) -> Iterator[None]:
    """Add the way to resume to an OSError in the context that is about a replay's files."""
    folders = [plan.folder / resource.name for resource in plan.agent.learning.resources]
    try:
        yield
    except OSError as error:
        path = Path(str(error.filename))
        if path in folders or path.parent in folders:
            error.filename = str(plan.shown(path))
            is_lost = isinstance(error, FileNotFoundError)
            first = "the run's folder was deleted or moved: move it back" if is_lost else "make space"
            again = files.resume_command(plan.folder, plan.place)
            add_remedy(error, f"{first}, then continue from the last checkpoint with {again}")
        raise


@contextlib.contextmanager
def opened_resources(progress: RunProgress, terminal: Console) -> Iterator[None]:
    """Open the host resources of the agent for the context, then print the size of each.

    Without keep_replay, the files of a run that is done are deleted once its last checkpoint is on the disk.
    """
    plan = progress.plan
    try:
        progress.checkpoints.open_resources()
        yield
        if plan.agent.learning.resources:
            seconds = progress.times["train"] - progress.train_time_before
            progress.of_replay = summary.of_replay([x.report() for x in plan.agent.learning.resources], seconds)
            terminal.print(f"replay  {console.of_replay(progress.of_replay)}")
    finally:
        progress.join_checkpoint()
        for resource in plan.agent.learning.resources:
            resource.close()
    if not plan.agent.learning.resources or plan.settings.options.keep_replay:
        return
    names = [resource.name for resource in plan.agent.learning.resources]
    of_all = team.current().gather(names if progress.is_done_and_saved else None)  # all have closed their files
    if team.current().leads and None not in of_all:
        num_bytes = replay_dir.delete(plan.folder, [name for names in of_all for name in names or ()])
        terminal.print(f"deleted the files of the replay, {format_bytes(num_bytes)} (keep_replay false)")


def compile_program(
    progress: RunProgress, terminal: Console, cache: Path | None, kept: Kept | None = None
) -> program.Program:
    """Compile the training program, or take what is kept. Print the duration and the memory needed."""
    plan, kept = progress.plan, kept or Kept()
    terminal.print("compiling ...")
    with compile_cache.watch(cache) as use:
        built = program.build(plan.env, plan.agent, plan.num_updates, plan.placement, plan.varied, kept.program)
    kept.add(progress, built)
    progress.times["compile"], progress.program_memory = built.compile_time_s, built.memory
    team.current().gather(None)  # no process waits in a collective for one that compiles
    cached = " (from the cache)" * use.from_cache + " (cached for next time)" * use.added
    console.print_compiled(plan, terminal, built, cached)
    return built


def first_state(progress: RunProgress, compiled: program.Program) -> TrainState:
    """Return the initial state or the saved one, and open the run's log at its step.

    From here on a resumed run trains, so its config.yaml is rewritten. The log reads the run's id from it.
    """
    plan, seeds = progress.plan, np.asarray(progress.seeds, np.int32)
    size = env_steps = None
    if plan.saved is None:
        state = compiled.init(seeds if len(seeds) > 1 else seeds[0])
        if plan.start:
            state = init_from.apply(plan.start, state, plan.placement)
            if plan.env.pools:  # their first actions have been sent
                progress.curriculum.restart_envs(0)
                state = compiled.restart(state)
        size = 0 if plan.settings.options.resume else None
    else:
        state, host_state = progress.checkpoints.restore(plan.saved, compiled)
        progress.resume(host_state)
        if progress.checkpoints.resets_envs:
            progress.curriculum.restart_envs(progress.finished)
            state = compiled.restart(state)
        else:
            progress.curriculum.continue_envs()
        size, env_steps = host_state["metrics_size"], progress.env_steps
    leads = team.current().leads
    if plan.settings.options.resume and leads:
        summary.write_config(plan)
    progress.logger = RunLogger(plan, size, env_steps) if leads else NoLogger()
    return state


def dry_run(plan: Plan) -> None:
    """Compile the program of a run, and print the resources it would need. Nothing is trained or written."""
    level = plan.settings.options.log_level if team.current().leads else "quiet"
    with contextlib.closing(make_console(level)) as terminal:
        if plan.gpu:
            return gpu_report.print_report(plan, terminal)
        console.announce(plan, terminal)
        open_envs(plan, terminal)
        compile_program(RunProgress(plan), terminal, None)
        console.print_dry_run(plan, terminal)
