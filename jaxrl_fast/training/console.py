"""Print a run's settings, progress and results."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any

from jaxrl_fast import __version__
from jaxrl_fast.config import paths, presets
from jaxrl_fast.config.sources import PROGRAM
from jaxrl_fast.loggers.terminal import Console
from jaxrl_fast.options.algorithm import network_of
from jaxrl_fast.parallel import team
from jaxrl_fast.runs import files, fingerprint
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.utils import devices, formatting, memory, warnings
from jaxrl_fast.utils.devices import device

if TYPE_CHECKING:
    from jaxrl_fast.parallel.program import Program


def announce(plan: Plan, terminal: Console) -> None:
    """Print the settings of a run before it starts."""
    options = plan.settings.options
    if plan.settings.by_default:
        how_long = " until it is solved" if options.stop_when_solved else ""
        terminal.print(f"training preset {plan.settings.preset}{how_long}; {PROGRAM} --help lists all options")
    for line in (_title(plan), *_learner(plan)):
        terminal.print(line)
    _warn(plan)
    protocol = [f"trained and evaluated by the {plan.env.protocol} protocol"] if plan.env.protocol else []
    for note in dict.fromkeys((*plan.env.view.info, *plan.eval_env.view.info, *protocol)):
        terminal.print(note)
    _print_sizes(plan, terminal)
    if plan.start:
        terminal.print(f"start  {plan.start.note}")
    if options.resume:
        terminal.print(f"resume  {_from_where(plan)}")
    folder = plan.shown(plan.folder)
    watch = f"   watch: uvx tensorboard --logdir {quote(str(folder.parent))}"
    terminal.print(f"run  {folder}{watch * ('tensorboard' in options.loggers)}")
    if why := why_no_c():
        terminal.print(f"C kernels are unavailable ({why}); layers are computed by XLA, which is slower")
    if gpu_unused():
        warnings.warn('there is a GPU, but JAX uses the CPU; pip install "jax[cuda12]"')


def _title(plan: Plan) -> str:
    """Return the line that names the versions, the algorithm, the environment, the seeds and the device."""
    import jax

    options = plan.settings.options
    backend, _, name = plan.env.spec.id.rpartition("/")
    last_seed = options.seed + options.num_seeds - 1
    seeds = f"seed {options.seed}" if options.num_seeds == 1 else f"seeds {options.seed} to {last_seed}"
    seeds = f"{len(plan.members)} members" if len(plan.members) > 1 else seeds
    num_devices = max(plan.placement.num_shards, plan.placement.num_grad_workers)
    several = f" x {num_devices}" if num_devices > 1 else ""
    if (num_processes := team.current().count) > 1:
        several += f" in {num_processes} processes"
    where = f"{devices.device()}{several} (jax {jax.__version__})"
    parts = [plan.settings.algo, name, backend, formatting.counted(options.num_envs, "env"), seeds, where]
    return f"jaxrl_fast {__version__}   {' · '.join(p for p in parts if p)}"


def _learner(plan: Plan) -> Iterator[str]:
    """Yield lines about the players, the algorithm and the network."""
    from jaxrl_fast import players

    agent, options = plan.settings.agent, plan.settings.options
    if plan.env.spec.players:
        how = players.mode_of(options.players)
        yield f"players  {' and '.join(plan.env.spec.players)}, {how}; a step is one of the game"
    if description := agent.describe(options.num_envs):
        yield description
    if network := network_of(agent):
        reading, remembered = _reading(plan, network), ""
        if agent.has_memory:
            length = formatting.counted(agent.sequence(), "step")
            remembered = f"   {agent.memory.kind} of {agent.memory.size}, sequences of {length}"
        yield f"network  {reading}{remembered}"


def _reading(plan: Plan, network: Any) -> str:
    """Return which network reads what, for the actor, and for a critic that sees other parts."""
    from jaxrl_fast.networks import torsos, views

    agent, obs = plan.settings.agent, plan.env.spec.obs
    describe = lambda view: torsos.describe(view(obs), network.kind, network.observations)
    of_actor, of_critic = views.views(agent, obs)
    return describe(of_actor) + ("" if of_actor is of_critic else f"   critic {describe(of_critic)}")


def _warn(plan: Plan) -> None:
    """Warn of a run that learns nothing, of options that are probably mistakes, and of what the environments report."""
    num_envs = plan.settings.options.num_envs
    first, last = plan.settings.agent.first_learning(num_envs), plan.num_updates * plan.steps_per_update
    if first >= last:
        warnings.warn(
            f"nothing will be learned: gradient steps begin after step {first}, but the run ends at step {last}"
        )
    found = *plan.settings.agent.warnings(num_envs), *plan.env.view.warnings, *plan.eval_env.view.warnings
    options = plan.settings.options
    if not options.resume:
        found += presets.warnings(plan.settings.preset, options.solved_threshold, options.total_steps)
    for line in dict.fromkeys(found):
        warnings.warn(line)


def _print_sizes(plan: Plan, terminal: Console) -> None:
    """Print the memory and the disk space that a run needs, and the free space."""
    from jaxrl_fast.training import disk

    options = plan.settings.options
    if plan.needs is not None:
        terminal.print(f"memory  {plan.needs}")
    if plan.replay_note:
        terminal.print(f"replay  {plan.replay_note}")
    if gpu_memory := devices.gpu_memory():
        terminal.print(f"gpu memory  {gpu_memory}")
    if plan.needs is not None:
        sizes = options, plan.num_updates, plan.steps_per_update, plan.folder
        on_disk = disk.estimate(plan.needs, plan.placement, *sizes)
        terminal.print(f"disk  {on_disk}")
        if on_disk.free is not None and on_disk.total > on_disk.free and not options.resume:
            warnings.warn(f"the run may not fit on the disk, where {memory.format_bytes(on_disk.free)} are free")


def _from_where(plan: Plan) -> str:
    """Return the step and folder from which a run is resumed. Warn if the resume may not be exact."""
    for wrong in plan.damaged:
        warnings.warn(wrong)
    if plan.saved is None:
        return "from the beginning: there is no checkpoint"
    where = plan.shown(plan.saved.folder)
    before, now = plan.saved.manifest["meta"], fingerprint.fingerprint()
    flat = lambda made: {k: v for k, v in made.items() if k != "versions"} | made["versions"]
    old, new = flat(before), flat(now)
    changed = [f"{k} {old.get(k, 'unknown')} is now {new.get(k)}" for k in old | new if old.get(k) != new.get(k)]
    if changed:
        warnings.warn(f"the resumed run may not be bit-exact: {', '.join(sorted(changed))}")
    total, was = plan.settings.options.total_steps, plan.saved.manifest["config"]
    longer = f"; schedules now end at step {formatting.short_number(total)}" if total != was["total_steps"] else ""
    longer += (
        "; solved is judged from there on" if was["solved_threshold"] != plan.settings.options.solved_threshold else ""
    )
    if plan.saved.manifest["env_steps"] >= plan.num_updates * plan.steps_per_update:
        at = formatting.short_number(plan.saved.manifest["env_steps"])
        return f"at its end, step {at}; more total_steps extend it ({where})"
    resets = plan.settings.options.host.exact_resume or not plan.saved.manifest["exact"]
    restarts = "; its episodes are reset" if resets and not plan.env.on_device else ""
    return f"from step {formatting.short_number(plan.saved.manifest['env_steps'])} ({where}){longer}{restarts}"


@contextlib.contextmanager
def timed(terminal: Console, activity: str, done: str) -> Iterator[None]:
    """Print an activity at its start, and its duration at its end."""
    terminal.print(f"{activity} ...")
    start = time.perf_counter()
    yield
    terminal.print(f"{done} in {formatting.seconds(time.perf_counter() - start)}")


def print_compiled(plan: Plan, terminal: Console, program: "Program", cached: str) -> None:
    """Print the duration of compiling. Raise MemoryError if the program needs more memory than is free."""
    num_devices = plan.placement.num_devices
    needed, free = num_devices * program.memory, memory.free_bytes(num_devices)
    duration = formatting.seconds(program.compile_time_s)
    terminal.print(f"compiled in {duration}{cached}   needs {memory.format_bytes(needed)}")
    if free is not None and needed > free:
        raise MemoryError(memory_needed(plan, program.memory))


def print_dry_run(plan: Plan, terminal: Console) -> None:
    """Print the shapes and the length of a run that is not going to be trained."""
    import jax

    options, spec = plan.settings.options, plan.env.spec
    obs = ", ".join(f"{part.dtype}{list(part.shape)}" for part in jax.tree.leaves(spec.obs))
    rollout = formatting.counted(plan.agent.rollout_length, "step")
    terminal.print(f"shapes  observation {obs}   action {spec.action}   rollout {rollout}")
    steps = formatting.short_number(plan.num_updates * plan.steps_per_update)
    each = formatting.steps_of_rollout(plan.agent.rollout_length, options.num_envs)
    num_updates = formatting.counted(plan.num_updates, "update")
    terminal.print(f"dry run: {num_updates} of {each} ({steps} steps); nothing was trained or written")


def memory_needed(plan: Plan, program_memory: int) -> str:
    """Return a sentence about the memory that the program needs on all devices, and the free memory."""
    num_devices, num_envs = plan.placement.num_devices, plan.settings.options.num_envs
    needed, free = num_devices * program_memory, memory.free_bytes(num_devices)
    there = "" if free is None else f", and {memory.format_bytes(free)} are free"
    if free is not None and needed > free:
        there += f", enough for about {int(num_envs * free / needed)} of the {num_envs} environments"
    return f"the program needs {memory.format_bytes(needed)} of memory{there}"


def print_summary(plan: Plan, terminal: Console, summary: Mapping[str, Any]) -> None:
    """Print the results of a run, and the paths of its files."""
    folder, write = plan.folder, terminal.print
    parts = [f"{formatting.short_number(summary['env_steps'])} steps in {formatting.seconds(summary['train_time_s'])}"]
    if summary["final_return_mean"] is not None:
        parts.append(f"return {summary['final_return_mean']:.1f}")
    if summary["eval_return_mean"] is not None:
        parts.append(f"greedy {summary['eval_return_mean']:.1f}")
    if summary["eval_truncated"]:
        parts.append(f"{formatting.counted(summary['eval_truncated'], 'evaluation episode')} did not end in time")
    if summary["solved"]:
        steps, duration = summary["steps_to_solve"], summary["time_to_solve_s"]
        parts.append(f"solved at {formatting.short_number(steps)} steps, {formatting.seconds(duration)}")
    elif summary["solved_threshold"] is not None:
        num_solved = sum(steps is not None for steps in summary["steps_to_solve_per_seed"])
        parts.append(f"not solved ({num_solved} of {formatting.counted(summary['num_seeds'], 'seed')})")
    with contextlib.suppress(ValueError):  # the file may have been edited
        parts.append(formatting.sparkline([r["return_mean"] for r in files.read_metrics(folder)]))
    write(f"{summary['status']:<9} {' · '.join(p for p in parts if p)}")
    if (folder / paths.CURVE).is_file():
        write(f"  curve  {plan.shown(folder / paths.CURVE)}")
    if command := resume_command(plan, summary):
        write(f"  resume  {command}")


def of_replay(numbers: Mapping[str, float]) -> str:
    """Return a phrase about the observations of a replay that is not on the device: `summary.of_replay`."""
    ratio = numbers["compression_ratio"]
    smaller = f", {ratio:.1f} times smaller" if ratio > 1.05 else ""
    shares = " and ".join(f"{name} took {100 * numbers[f'{name}_share']:.1f}%" for name in ("reading", "compression"))
    return f"{memory.format_bytes(int(numbers['bytes']))} of observations{smaller}; {shares} of the training time"


def resume_command(plan: Plan, summary: Mapping[str, Any]) -> str:
    """Return the command that resumes a run; "" for one that ended because it was solved."""
    options = plan.settings.options
    if not summary["last_checkpoint"] or not isinstance(options.env, str):
        return ""
    command = files.resume_command(plan.folder, plan.place)
    if summary["status"] == "stopped" or plan.members:
        return command if summary["status"] == "stopped" else ""
    complete = summary["status"] == "done" and summary["num_updates"] == plan.num_updates
    return f"{command} --total-steps {formatting.short_number(2 * options.total_steps)}" if complete else ""


def gpu_unused() -> bool:
    """Return whether there is a GPU, but JAX uses the CPU although the user has not requested it."""
    import jax

    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def why_no_c() -> str:
    """Return why the C kernels for the CPU are unavailable; "" if they are available or not used."""
    from jaxrl_fast.kernels import build  # imports jax

    return build.unavailable_reason() if device() == "cpu" and build.enabled() else ""
