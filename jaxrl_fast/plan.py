"""From settings to a plan: all checks, the environments and agents, and the run's folder. Nothing is compiled yet."""

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from importlib import util
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_fast import config, host
from jaxrl_fast.agents import configs
from jaxrl_fast.members import Member, Varied, vary
from jaxrl_fast.spelling import parse_period
from jaxrl_fast.written import leads_elsewhere, path_of

if TYPE_CHECKING:
    from jaxrl_fast.checkpoint import Checkpoint
    from jaxrl_fast.memory import Need
    from jaxrl_fast.types import Agent, Env

RESERVED = (  # names that a record has already
    *("episodes", "valid_steps", "return_sum", "return_mean", "return_min", "return_max", "length_sum", "length_mean"),
    *("longest_game", "seed", "env_steps", "updates", "wall_time_s", "train_time_s", "env_steps_per_s"),
)
TRAINING, EVALUATION, WATCHING = 0, 1, 2  # what environments are for; each has chance of its own
# Rows of a gradient step that are work enough for a core, by the network that sees them. With less in a shard waiting
# costs more than sharing saves, and with less in a seed it is better computed along with others.
LEAST_ROWS = {"mlp": 512, "minatar": 64, "nature": 8, "dqn2013": 8, "impala": 8}


class Plan(NamedTuple):
    """A run that has passed every check; nothing is compiled yet."""

    settings: config.Settings
    env: "Env"  # one shard
    agent: "Agent"
    num_shards: int
    eval_env: "Env"
    num_updates: int
    steps_per_update: int
    folder: Path
    lock: host.Lock | None = None  # on the folder
    needs: "Need | None" = None
    saved: "Checkpoint | None" = None  # to go on from
    damaged: tuple[str, ...] = ()  # what is wrong with newer checkpoints
    members: tuple[Member, ...] = ()  # what is trained together, if not seeds in line
    varied: Varied | None = None  # where more than their seeds differ
    in_turn: bool = False  # members that share devices advance one after another

    def release(self) -> None:
        """Gives the folder back."""
        if self.lock:
            self.lock.release()


def prepare(settings: config.Settings) -> Plan:
    """Everything that can be refused is refused here, by a ValueError of one sentence. Then the folder is made."""
    options = settings.options
    check_services(options)
    lock = claim(Path(options.resume)) if options.resume else None
    if not options.resume:
        check_folder(chosen_folder(options))
    try:
        ready = check(settings)
        folder = ready.folder if options.resume else make_folder(ready.settings, ready.env)
    except BaseException:
        if lock:  # a notebook keeps the error, and with it all that it saw
            lock.release()
        raise
    return ready._replace(folder=folder, lock=lock or claim(folder))


def check(settings: config.Settings, members: tuple[Member, ...] = ()) -> Plan:
    """All of a plan but a new run's folder and the lock on it: nothing is written."""
    options = settings.options

    from jaxrl_fast import agents, calibrate, checkpoint, envs, memory, program
    from jaxrl_fast.keeper import FOLDER

    if options.overlap and not options.in_flight:
        raise ValueError("--overlap: it wants environments on the host, and --in-flight 1 or more")
    host.offer_cpu_devices(options.devices)
    if host.is_double():
        raise ValueError("JAX's 64 bits (jax_enable_x64) are switched on, and training is in 32; switch them off first")
    if options.num_envs == "auto":
        settings = calibrate.choose(settings)
        options = settings.options
    num_envs = int(options.num_envs)
    saved, damaged = checkpoint.newest(Path(options.resume) / FOLDER) if options.resume else (None, [])
    if damaged and saved is None:  # beginning again would write over metrics that took long to get
        raise ValueError(f"--resume {options.resume}: none of its {len(damaged)} checkpoints is intact ({damaged[0]})")
    if options.resume and saved is None:
        check_nothing_is_lost(Path(options.resume))
    algorithm = agents.load(settings.algo)
    rollout_length = configs.rollout_length(settings.agent, num_envs)
    steps_per_update = rollout_length * num_envs
    num_updates = -(-options.total_steps // steps_per_update)
    if num_updates >= 2**31:
        raise ValueError(f"--total-steps {options.total_steps}: {num_updates} updates are more than {2**31 - 1}")
    if saved is not None:
        check_metrics(Path(options.resume), saved)
    done = saved.manifest["host"]["scores"]["updates"] if saved else 0
    as_before = saved and saved.manifest["num_shards"]
    env, agent, num_shards = divide(settings, algorithm, num_updates, as_before, done)
    if env.protocol and getattr(settings.agent, "clip_rewards", False) is None:  # it is one of the rules
        clipped = dataclasses.replace(settings.agent, clip_rewards=env.protocol == "dqn2015")
        settings = settings._replace(agent=clipped)
        env, agent, num_shards = divide(settings, algorithm, num_updates, as_before, done)
    if options.num_seeds > 1 and not env.on_device:
        raise ValueError(
            f"--num-seeds {options.num_seeds}: {env.spec.id} runs on the host, whose pools are for one seed; "
            "python -m jaxrl_fast.sweep --seed 0..4 runs several one after another"
        )
    if options.overlap and agent.gradient_steps is None:
        raise ValueError(
            f"--overlap: {settings.algo} does not learn from whole rollouts; "
            "--in-flight alone keeps its pools at work while it learns"
        )
    if not env.on_device:
        check_exact(options)
        settings = settings._replace(options=dataclasses.replace(options, protocol=env.protocol))
    if options.total_steps < steps_per_update:
        raise ValueError(
            f"--total-steps {options.total_steps} is less than one update, which is {steps_per_update} steps "
            f"({rollout_length} in each of {num_envs} environments)"
        )
    num_eval_envs = min(options.eval_envs, options.eval_episodes)
    if not env.on_device and options.eval_envs == config.Options().eval_envs:  # each takes time to make
        num_eval_envs = min(num_eval_envs, num_envs)
    eval_env = envs.make(options.env, num_eval_envs, conditions(options, EVALUATION, done), **options.env_options)
    whole = (env, agent) if num_shards == 1 else undivided(settings, algorithm, num_updates)
    in_turn = seeds_in_turn(settings, env)
    dealt = options.num_seeds, num_shards, in_turn
    if settings.algo not in configs.CONFIGS:
        check_metrics_of(settings.algo, program.shapes_of_metrics(*whole))
    needs = memory.need(*whole, program.filled(*dealt), program.num_devices(*dealt))
    memory.check(needs, getattr(settings.agent, "capacity", None), resumed=saved is not None)
    if saved and done > num_updates:
        steps = saved.manifest["env_steps"]
        raise ValueError(f"--total-steps {options.total_steps}: this run has made {steps} steps already")
    check_unsolved(options, saved)
    make = lambda agent_config: algorithm.make(agent_config, env.spec, num_updates)
    varied = vary(members, make, settings.agent) if members else None
    if saved:  # what does not fit is refused before anything is compiled
        checkpoint.unflatten(program.shapes(env, agent, options.num_seeds, num_shards, varied), saved)
    return Plan(
        settings=settings,
        env=env,
        agent=agent,
        num_shards=num_shards,
        eval_env=eval_env,
        num_updates=num_updates,
        steps_per_update=steps_per_update,
        needs=needs,
        folder=Path(options.resume),
        saved=saved,
        damaged=(*damaged,),
        members=members,
        varied=varied,
        in_turn=in_turn,
    )


def check_unsolved(options: config.Options, saved: Any) -> None:
    """A run that stops when solved, and is, by all seeds that are well, has nothing to do with more steps."""
    if saved is None or not options.stop_when_solved:
        return
    scores = saved.manifest["host"]["scores"]
    settled = all(solved or lost is not None for solved, lost in zip(scores["solved"], scores["diverged"], strict=True))
    if settled and options.total_steps > saved.manifest["config"]["total_steps"]:
        raise ValueError(
            f"--total-steps {options.total_steps}: this run stops when it is solved, and it is; "
            "--no-stop-when-solved trains on"
        )


def check_services(options: config.Options) -> None:
    """What was asked to log to is installed."""
    for service in ("wandb", "trackio"):
        if getattr(options, service) and util.find_spec(service) is None:
            raise ValueError(f'--{service}: {service} is not installed here; pip install "jaxrl_fast[{service}]"')


def claim(folder: Path) -> host.Lock:
    """A run's folder for us alone."""
    try:
        return host.Lock(folder)
    except BlockingIOError:
        raise ValueError(f"another process is writing to the run {folder}") from None
    except OSError as error:
        raise ValueError(f"the run folder {folder} cannot be written to ({error.strerror})") from error


def conditions(options: config.Options, purpose: int, done: int = 0, shard: int = 0, num_shards: int = 1) -> Any:
    """How environments on the host are run, for training or evaluation, by a run that goes on after so many updates."""
    from jaxrl_fast.types import Conditions

    path = "callback" if options.exact_resume else options.pool_path
    in_flight = options.in_flight if purpose == TRAINING else 0
    overlap = options.overlap and purpose == TRAINING
    return Conditions((options.seed, purpose, done), options.protocol, path, in_flight, overlap, shard, num_shards)


def check_exact(options: config.Options) -> None:
    """--exact-resume has new games at checkpoints, so these must come at the same steps in every run."""
    if not options.exact_resume:
        return
    if options.pool_path == "ffi":
        raise ValueError("--exact-resume: --pool-path ffi knows its pool by address; callback can have a new one")
    if not parse_period(str(options.save_every))[0]:
        raise ValueError(f"--exact-resume: --save-every {options.save_every} must be in environment steps, such as 1M")


def divide(
    settings: config.Settings, algorithm: Any, num_updates: int, as_before: int | None = None, done: int = 0
) -> tuple:
    """The environment and the agent of one shard, and the number of shards.

    Left to us, it is the number of devices, or fewer where a shard would get too little work for an update. A run that
    goes on after `done` updates has as many `as_before`, on whatever devices there are.
    """
    import jax

    options = settings.options
    whole, agent = undivided(settings, algorithm, num_updates, done)
    num_devices = jax.local_device_count()
    if as_before:
        tries = [as_before] if as_before > 1 else []
    elif options.devices == "auto":
        tried = whole.on_device or jax.default_backend() == "cpu"  # pools on several GPUs: only where asked for
        most = min(num_devices, cores_worth(settings, whole)) if tried else 1
        tries = [n for n in range(most, 1, -1) if options.num_envs % n == 0]
    elif options.devices > num_devices:
        raise ValueError(f"--devices {options.devices}: JAX has {num_devices} here")
    elif options.devices > 1 and not hasattr(settings.agent, "gradient_rows"):
        raise ValueError(
            f"--devices {options.devices}: {settings.algo} says no gradient_rows, so it learns on one device"
        )
    elif options.num_envs % options.devices:
        raise ValueError(f"--devices {options.devices}: {options.num_envs} environments do not divide into so many")
    else:
        tries = [options.devices] if options.devices > 1 else []
    for num_shards in tries:
        try:
            env = shard_of(options, num_shards, done)
            return env, algorithm.make(settings.agent, env.spec, num_updates), num_shards
        except ValueError:
            if as_before or options.devices != "auto":
                raise
    return whole, agent, 1


def cores_worth(settings: config.Settings, env: Any) -> int:
    """How many cores a gradient step is work enough for. `env` may be a shard."""
    from jaxrl_fast import networks

    if not hasattr(settings.agent, "gradient_rows"):  # an algorithm of one's own, which may know nothing of shards
        return 0
    rows = settings.agent.gradient_rows(int(settings.options.num_envs))
    return rows // LEAST_ROWS[networks.choose(env.spec.obs, getattr(settings.agent, "network", "auto"))]


def seeds_in_turn(settings: config.Settings, env: Any) -> bool:
    """A CPU is quicker with one seed after another where each keeps its core busy: less data is in use at a time.

    Not with a replay, which would be copied at each turn.
    """
    import jax

    keeps_little = not hasattr(settings.agent, "capacity")
    return jax.default_backend() == "cpu" and keeps_little and cores_worth(settings, env) >= 1


def shard_of(options: config.Options, num_shards: int, done: int) -> Any:
    """The environment of one of several shards: of any of them on the device, of the one that asks on the host."""
    from jaxrl_fast import envs, program
    from jaxrl_fast.envs import shards

    def make(shard: int) -> Any:
        own = conditions(options, TRAINING, done, shard, num_shards)
        return envs.make(options.env, int(options.num_envs) // num_shards, own, **options.env_options)

    first = make(0)
    if not first.on_device:
        return shards.join([first, *map(make, range(1, num_shards))], program.SHARDS)
    return first._replace(spec=first.spec._replace(axis_name=program.SHARDS, num_shards=num_shards))


def undivided(settings: config.Settings, algorithm: Any, num_updates: int, done: int = 0) -> tuple[Any, Any]:
    """All environments together, and the agent for them."""
    from jaxrl_fast import envs

    options = settings.options
    env = envs.make(options.env, int(options.num_envs), conditions(options, TRAINING, done), **options.env_options)
    return env, algorithm.make(settings.agent, env.spec, num_updates)


def make_folder(settings: config.Settings, env: Any) -> Path:
    """The run's own folder, new and empty. A name of our own gives way to one that is taken."""
    options = settings.options
    env_name = "_".join(filter(None, [env.spec.id.rpartition("/")[2].rpartition(":")[2], env.protocol]))
    ours = config.RUNS / f"{settings.algo_name}_{env_name}_s{options.seed}_{datetime.now():%Y%m%d-%H%M%S}"
    chosen = chosen_folder(options)
    for folder in [chosen] if chosen else [ours, *(ours.with_name(f"{ours.name}-{i}") for i in range(2, 100))]:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            reason = f"cannot be made ({error.strerror})"
            raise ValueError(f"the run folder {folder} {reason}; choose another --run-dir") from error
    raise ValueError(there_already(folder))


def check_folder(folder: Path | None) -> None:
    """Refuses what can be refused before anything is imported."""
    if folder is not None and exists(folder):
        raise ValueError(there_already(folder))


def there_already(folder: Path) -> str:
    """A sentence about a run's folder that exists."""
    on = f", or go on with it by --resume {quote(str(folder))}" if (folder / config.CONFIG).is_file() else ""
    return f"the run folder {folder} exists already; choose another --run-dir or --name{on}"


def exists(folder: Path) -> bool:
    """ValueError where there can be no such folder, for its name is too long."""
    try:
        return folder.exists()
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be made ({error.strerror}); choose another") from error


def check_nothing_is_lost(folder: Path) -> None:
    """A run without a checkpoint begins again, over its metrics, unless they are of one that was saved or ended.

    Those of a run that was killed or failed before its first checkpoint come again, and so do those of one that was
    stopped by then, where a stop saves nothing (`--exact-resume`).
    """
    from jaxrl_fast import checkpoint, report

    metrics, summary = folder / report.METRICS, report.summary_if_any(folder)
    ended = bool(summary) and (summary["status"] in ("done", "diverged") or summary["checkpoints"] > 0)
    known = ended or (folder / checkpoint.SAVED).exists()
    if known and metrics.is_file() and metrics.stat().st_size > 0:
        raise ValueError(
            f"--resume {folder}: there is no checkpoint, and to begin again would write over its {report.METRICS}; "
            f"begin a new run with --config {folder / config.CONFIG}"
        )


def check_metrics_of(algo: str, metrics: Mapping[str, Any]) -> None:
    """An algorithm of one's own says one number of each thing in an update."""
    wrong = [f"{name} has shape {list(x.shape)}" for name, x in metrics.items() if x.shape]
    if wrong:
        raise ValueError(f"algorithm {algo!r}: metrics are single numbers, and {' and '.join(wrong)}")
    taken = [name for name in metrics if name in RESERVED or name.startswith(("eval_", "agent."))]
    if taken:
        raise ValueError(f"algorithm {algo!r}: a metric cannot be named {' or '.join(taken)}, for a record has that")


def check_metrics(folder: Path, saved: Any) -> None:
    """A run goes on behind the lines that there were at its checkpoint."""
    from jaxrl_fast import report

    path, size = folder / report.METRICS, saved.manifest["host"]["others"]["metrics_size"]
    there = path.stat().st_size if path.is_file() else 0
    if there < size:
        raise ValueError(
            f"--resume {folder}: {report.METRICS} has {there} bytes, of {size} when {saved.folder} was saved"
        )


def chosen_folder(options: config.Options) -> Path | None:
    """What the user asked for."""
    if options.run_dir and options.name:
        said = f"--run-dir {options.run_dir}"
        raise ValueError(f"--name {options.name} does not go with {said}, which has the name in it")
    if options.run_dir:
        return path_of(options.run_dir, "--run-dir")
    if leads_elsewhere(options.name):
        raise ValueError(f"--name {options.name}: a name is wanted, without folders; --run-dir takes a path")
    return config.RUNS / options.name if options.name else None
