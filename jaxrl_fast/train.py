"""Trains from the command line: `python -m jaxrl_fast.train [ppo] [--config PRESET] [--env ID] [options]`.

The host's side of a run, where everything impure is: clock, files, signals, screen. It keeps the device busy by
dispatching a chunk of updates before it reads the metrics of the one before. The command line is read before jax is
imported, which is why the imports stand in the functions.
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_fast import __version__, config, sinks

CACHE = "~/.cache/jaxrl_fast"
NUM_RECORDS = 500  # lines of metrics.jsonl for each seed, unless told
LEAST_ROWS = 2048  # of an update in one shard: with less, waiting for each other costs more than sharing saves
CHUNK_S = 0.5  # what a chunk aims at: short enough to stop at once, long enough that the host costs nothing
GROWTH = 8  # of a chunk's length from one to the next
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")


class Plan(NamedTuple):
    """A run that has passed every check; nothing is compiled yet."""

    settings: config.Settings
    env: Any  # one shard
    agent: Any
    num_shards: int
    eval_env: Any
    eval_agent: Any
    num_updates: int
    steps_per_update: int
    folder: Path


class Outcome(NamedTuple):
    """What a run leaves behind."""

    folder: Path
    summary: dict[str, Any]
    agent_state: Any  # what `explore` and `exploit` take, with a leading axis where there are several seeds
    signal: int | None  # what stopped it


class Chunk(NamedTuple):
    """A chunk that the device was given."""

    rows: Any  # metrics, still on the device
    num_updates: int
    began: float  # when it was given
    ended: float | None  # when it was done, if giving it meant waiting for it


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit status."""
    try:
        settings = config.from_command_line(sys.argv[1:] if argv is None else argv)
        plan = prepare(settings)
    except ValueError as error:
        if "\n" in str(error):  # not one of our sentences
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    stopped_by = execute(plan).signal
    return 128 + stopped_by if stopped_by else 0


def prepare(settings: config.Settings) -> Plan:
    """Everything that can be refused is refused here, by a ValueError of one sentence. Then the folder is made."""
    options = settings.options
    for service in ("wandb", "trackio"):
        if getattr(options, service) and util.find_spec(service) is None:
            raise ValueError(f'--{service}: {service} is not installed here; pip install "jaxrl_fast[{service}]"')
    check_folder(chosen_folder(options))

    from jaxrl_fast import agents

    offer_cpu_devices(options.devices)
    algorithm = agents.load(settings.algo)
    steps_per_update = settings.agent.rollout_length * options.num_envs
    num_updates = -(-options.total_steps // steps_per_update)
    if num_updates >= 2**31:
        raise ValueError(f"--total-steps {options.total_steps}: {num_updates} updates are more than {2**31 - 1}")
    env, agent, num_shards = divide(settings, algorithm, num_updates)
    if options.num_seeds > 1 and not env.on_device:
        raise ValueError(
            f"--num-seeds {options.num_seeds}: {env.spec.id} runs on the host, which has one pool for one seed"
        )
    if options.total_steps < steps_per_update:
        raise ValueError(
            f"--total-steps {options.total_steps} is less than one update, which is {steps_per_update} steps "
            f"({settings.agent.rollout_length} in each of {options.num_envs} environments)"
        )
    eval_env, eval_agent = evaluator(settings, algorithm, num_updates)
    folder = make_folder(settings, env.spec.id)
    return Plan(settings, env, agent, num_shards, eval_env, eval_agent, num_updates, steps_per_update, folder)


def offer_cpu_devices(wanted: int | str = "auto") -> None:
    """Lets JAX see every core as a device, which it must be told before it first looks for devices."""
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(RuntimeError):  # too late, as in a notebook that has used JAX: what is there will do
        jax.config.update("jax_num_cpu_devices", cores if wanted == "auto" else int(wanted))


def divide(settings: config.Settings, algorithm: Any, num_updates: int) -> tuple[Any, Any, int]:
    """The environment and the agent of one shard, and the number of shards.

    Left to us, it is the number of devices, or fewer where a shard would get too little work for an update.
    """
    import jax

    from jaxrl_fast import envs, program

    options = settings.options
    make_env = lambda num_envs: envs.make(options.env, num_envs, **options.env_options)
    whole = make_env(options.num_envs)
    agent = algorithm.make(settings.agent, whole.spec, num_updates)
    num_devices = jax.local_device_count()
    if options.devices == "auto":
        rows = settings.agent.rollout_length * options.num_envs
        most = min(num_devices, rows // LEAST_ROWS) if whole.on_device else 1
        tries = [n for n in range(most, 1, -1) if options.num_envs % n == 0]
    elif options.devices > num_devices:
        raise ValueError(f"--devices {options.devices}: JAX has {num_devices} here")
    elif options.num_envs % options.devices:
        raise ValueError(f"--devices {options.devices}: {options.num_envs} environments do not divide into so many")
    else:
        tries = [options.devices] if options.devices > 1 else []
    for num_shards in tries:
        env = make_env(options.num_envs // num_shards)
        env = env._replace(spec=env.spec._replace(axis_name=program.SHARDS))
        try:
            return env, algorithm.make(settings.agent, env.spec, num_updates), num_shards
        except ValueError:
            if options.devices != "auto":
                raise
    return whole, agent, 1


def evaluator(settings: config.Settings, algorithm: Any, num_updates: int) -> tuple[Any, Any]:
    """Environments to evaluate in, and the agent for that many of them."""
    from jaxrl_fast import envs

    options = settings.options
    count = min(options.eval_envs, options.eval_episodes)
    for num_envs in (count, -(-count // options.num_envs) * options.num_envs):
        env = envs.make(options.env, num_envs, **options.env_options)
        try:
            return env, algorithm.make(settings.agent, env.spec, num_updates)
        except ValueError:  # such as a rollout of that many that does not divide; any multiple of num_envs does
            continue
    raise ValueError(f"--eval-envs {options.eval_envs} do not suit this algorithm; try {options.num_envs}")


def make_folder(settings: config.Settings, env_id: str) -> Path:
    """The run's own folder, new and empty. A name of our own gives way to one that is taken."""
    options = settings.options
    env_name = env_id.rpartition("/")[2].rpartition(":")[2]
    ours = Path("runs") / f"{settings.algo}_{env_name}_s{options.seed}_{datetime.now():%Y%m%d-%H%M%S}"
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
    raise ValueError(f"the run folder {chosen or ours} exists already; choose another --run-dir or --name")


def check_folder(folder: Path | None) -> None:
    """Refuses what can be refused before anything is imported."""
    try:
        exists = folder is not None and folder.exists()
    except OSError as error:
        raise ValueError(f"the run folder {folder} cannot be made ({error.strerror}); choose another") from error
    if exists:
        raise ValueError(f"the run folder {folder} exists already; choose another --run-dir or --name")


def chosen_folder(options: config.Options) -> Path | None:
    """What the user asked for."""
    if options.run_dir:
        return Path(options.run_dir).expanduser()
    if Path(options.name).name != options.name:
        raise ValueError(f"--name {options.name}: a name is wanted, without folders; --run-dir takes a path")
    return Path("runs") / options.name if options.name else None


def execute(plan: Plan) -> Outcome:
    """Compiles, trains, evaluates and writes everything down."""
    terminal = sinks.terminal(plan.settings.options.log_level)
    try:
        return Trainer(plan, terminal).run()
    finally:
        terminal.close()


class Trainer:
    """One run under way."""

    def __init__(self, plan: Plan, terminal: sinks.Terminal):
        from jaxrl_fast import population

        self.plan, self.options, self.terminal = plan, plan.settings.options, terminal
        self.seeds = [self.options.seed + i for i in range(self.options.num_seeds)]
        self.began = time.perf_counter()
        self.record_length = _updates(self.options.log_every, plan) or -(-plan.num_updates // NUM_RECORDS)
        self.ledger = population.Ledger(self.record_length)
        self.screen = population.Ledger(sys.maxsize)  # since the last line on the terminal
        self.windows = [population.Window() for _ in self.seeds]
        self.solved: list[tuple[int, float] | None] = [None] * len(self.seeds)  # environment steps, seconds
        self.valid_steps = [0] * len(self.seeds)
        self.queue: deque[Chunk] = deque()
        self.dispatched = self.finished = self.recorded = 0  # updates
        self.chunk_length, self.rate = 1, 0.0  # updates, updates a second
        self.train_time = self.compile_time = self.eval_time = self.idle_time = 0.0
        self.recorded_time = 0.0
        self.shown = 0, 0.0  # updates and seconds at the last line on the terminal
        self.evals: list[dict[str, Any]] = []
        self.sparks: list[float | None] = []
        self.signal: int | None = None
        self.play: Any = None
        self.status = "failed"

    def run(self) -> Outcome:
        announce(self.plan, self.terminal)
        write_config(self.plan)
        try:
            self.compile()
            self.sinks = open_sinks(self.plan)
            with stop_signals(self):
                self.train()
            if self.finished == self.plan.num_updates:
                self.signal = None  # it came too late to stop anything
            self.status = "stopped" if self.signal else "done"
        finally:
            self.close()
        self.say_done()
        return Outcome(self.plan.folder, self.summary, self.program.learner(self.state), self.signal)

    def compile(self) -> None:
        import numpy as np

        from jaxrl_fast import program

        cache = use_compile_cache(self.plan) if self.options.compile_cache else None
        before = _entries(cache)
        self.program = program.build(
            self.plan.env, self.plan.agent, len(self.seeds), self.plan.num_updates, self.plan.num_shards
        )
        self.compile_time = self.program.compile_time_s
        kept = " (cached for next time)" if _entries(cache) > before else " (from the cache)" if before else ""
        needs = f"needs {_bytes(self.program.memory)}"
        self.terminal.say(f"compiling ... {sinks.seconds(self.compile_time)}{kept}   {needs}")
        seeds = np.asarray(self.seeds, np.int32)
        self.state = self.program.init(seeds if len(self.seeds) > 1 else seeds[0])

    def train(self) -> None:
        """Chunks up to each evaluation, until all updates are made or something says stop."""
        every = _updates(self.options.eval_every, self.plan) or self.plan.num_updates
        self.pace = sinks.Pace(self.options.report_every)
        while self.finished < self.plan.num_updates and not self.stopping():
            self.advance(min(self.plan.num_updates, self.finished // every * every + every))
            at_evaluation = self.finished % every == 0 or self.finished == self.plan.num_updates
            last = self.finished == self.plan.num_updates or self.stopping()
            evaluation = self.evaluate() if (at_evaluation or last) and not self.signal else {}
            self.record(everything=at_evaluation or last, extra=evaluation)

    def advance(self, boundary: int) -> None:
        """Runs to update `boundary`, one chunk always waiting behind the one that is computed."""
        self.free_since = time.perf_counter()
        while self.queue or self.dispatched < boundary and not self.stopping():
            while len(self.queue) < 2 and self.dispatched < boundary and not self.stopping():
                self.dispatch(boundary)
            self.read(self.queue.popleft())
            if self.queue or self.dispatched < boundary and not self.stopping():
                self.record()  # else an evaluation may follow, which belongs to the last record

    def dispatch(self, boundary: int) -> None:
        """Gives the device a chunk of about CHUNK_S.

        A run that stops when solved makes a chunk of each record, so that where it stops does not depend on the clock.
        """
        import numpy as np

        by_clock = max(min(int(self.rate * CHUNK_S), self.chunk_length * GROWTH), 1)
        aim = self.record_length if self.options.stop_when_solved else by_clock
        self.chunk_length = min(aim, self.program.capacity, boundary - self.dispatched)
        began = time.perf_counter()
        self.state, rows = self.program.chunk(self.state, np.asarray(self.chunk_length, np.int32))
        ended = time.perf_counter() if _ready(rows) else None
        self.queue.append(Chunk(rows, self.chunk_length, began, ended))
        self.latest_began = began
        self.dispatched += self.chunk_length

    def read(self, chunk: Chunk) -> None:
        """Waits for a chunk and takes down its metrics."""
        import jax
        import numpy as np

        # If it is done already, nobody knows since when: the device may have idled until the next one was given.
        idle_until = self.latest_began if chunk.ended is None and _ready(chunk.rows) else chunk.began
        self.idle_time += max(idle_until - self.free_since, 0.0)
        rows = jax.device_get(jax.block_until_ready(chunk.rows))
        now = chunk.ended or time.perf_counter()
        elapsed = now - self.free_since
        self.free_since = now
        self.rate = chunk.num_updates / max(elapsed, 1e-9)
        self.train_time += elapsed
        self.finished += chunk.num_updates
        rows = {k: x.reshape(len(self.seeds), -1)[:, : chunk.num_updates] for k, x in rows.items()}
        fractions = np.arange(1, chunk.num_updates + 1) / chunk.num_updates
        clock = np.broadcast_to(self.train_time - elapsed * (1 - fractions), (len(self.seeds), chunk.num_updates))
        wall = clock + (now - self.began - self.train_time)
        self.ledger.add(rows | {"train_time_s": clock, "wall_time_s": wall})
        self.show(rows)

    def record(self, everything: bool = False, extra: dict[str, Any] | None = None) -> None:
        """Writes the records that are complete; an evaluation goes into the last one."""
        from jaxrl_fast import population

        complete = list(self.ledger.take(everything))
        for rows in complete:
            clock, wall = float(rows["train_time_s"][0, -1]), float(rows["wall_time_s"][0, -1])
            length = rows["train_time_s"].shape[1]
            self.recorded += length
            speed = length * self.plan.steps_per_update * len(self.seeds) / max(clock - self.recorded_time, 1e-9)
            self.recorded_time = clock
            common = {
                "env_steps": self.recorded * self.plan.steps_per_update,
                "updates": self.recorded,
                "wall_time_s": round(wall, 4),
                "train_time_s": round(clock, 4),
                "env_steps_per_s": round(speed, 1),
            }
            means = population.summarise({k: x for k, x in rows.items() if k not in ("train_time_s", "wall_time_s")})
            for i, scores in enumerate(means):
                self.windows[i].add(scores["episodes"], float(rows["return_sum"][i].astype("float64").sum()))
                self.valid_steps[i] += int(rows["valid_steps"][i].astype("int64").sum())
                self.check_solved(i, common)
            self.sparks.append(population.summarise(population.merge_seeds(rows))[0]["return_mean"])
            records = [
                {"seed": seed} | common | {"valid_steps": valid} | scores
                for seed, valid, scores in zip(self.seeds, self.valid_steps, means, strict=True)
            ]
            if rows is complete[-1] and extra:
                records = [r | e for r, e in zip(records, extra["seeds"])]
            for sink in self.sinks:
                sink.write(records)

    def check_solved(self, i: int, common: dict[str, Any]) -> None:
        window = self.windows[i]
        goal, mean = self.options.solved, window.mean
        if self.solved[i] is None and goal is not None and mean is not None and window.full and mean >= goal:
            self.solved[i] = common["env_steps"], common["train_time_s"]

    def show(self, rows: Any) -> None:
        """A line on the terminal, if it is time."""
        from jaxrl_fast import population

        self.screen.add(rows)
        if not self.pace.due() and self.finished < self.plan.num_updates:
            return
        for merged in map(population.merge_seeds, self.screen.take(everything=True)):
            record = population.summarise(merged)[0]
            steps = self.plan.steps_per_update
            speed = (self.finished - self.shown[0]) / max(self.train_time - self.shown[1], 1e-9)
            self.shown = self.finished, self.train_time
            record |= {"env_steps": self.finished * steps, "env_steps_per_s": speed * steps * len(self.seeds)}
            self.terminal.progress(sinks.line(record), self.finished / self.plan.num_updates)

    def evaluate(self) -> dict[str, Any]:
        """Plays the greedy policy of every seed, and says how it went."""
        import jax
        import numpy as np

        from jaxrl_fast import evaluate

        began = time.perf_counter()
        seeds = np.asarray(self.seeds, np.int32)
        arguments = self.program.learner(self.state), (seeds if len(seeds) > 1 else seeds[0]), np.int32(len(self.evals))
        if self.play is None:
            num_envs = self.plan.eval_env.spec.num_envs
            each = -(-self.options.eval_episodes // num_envs)
            play = lambda *given: evaluate.play(self.plan.eval_env, self.plan.eval_agent, each, *given)
            play = jax.vmap(play, in_axes=(0, 0, None)) if len(seeds) > 1 else play
            self.play = jax.jit(play).lower(*arguments).compile()
            self.compile_time += time.perf_counter() - began
            began = time.perf_counter()
        episodes = jax.device_get(self.play(*arguments))
        self.eval_time += time.perf_counter() - began
        ended = np.arange(episodes.score.shape[-1]) < episodes.finished[..., None]
        shape = (len(seeds), -1)
        score, length, ended = (x.reshape(shape) for x in (episodes.score, episodes.length, ended))
        each_seed = [_evaluation(s[e], n[e], e.size) for s, n, e in zip(score, length, ended)]
        total = _evaluation(score[ended], length[ended], ended.size)
        self.evals.append({"env_steps": self.finished * self.plan.steps_per_update} | total)
        return {"seeds": each_seed}

    def stopping(self) -> bool:
        return self.signal is not None or self.options.stop_when_solved and all(self.solved)

    def close(self) -> None:
        """Whatever happened, what is known is written."""
        for sink in getattr(self, "sinks", []):
            sink.close()
        self.summary = summarise(self)
        text = json.dumps(self.summary, indent=2, allow_nan=False) + "\n"
        (self.plan.folder / "summary.json").write_text(text, encoding="utf-8")
        if self.recorded:
            picture(self.plan.folder).savefig(self.plan.folder / "curve.png")

    def say_done(self) -> None:
        summary = self.summary
        parts = [f"{sinks.short(summary['env_steps'])} steps in {sinks.seconds(summary['train_time_s'])}"]
        if summary["final_return_mean"] is not None:
            parts.append(f"return {summary['final_return_mean']:.1f}")
        if summary["eval_return_mean"] is not None:
            parts.append(f"greedy {summary['eval_return_mean']:.1f}")
        if summary["eval_unfinished"]:
            parts.append(f"{summary['eval_unfinished']} evaluation episodes did not end in time and are not counted")
        if summary["solved"]:
            steps, duration = summary["steps_to_solve"], summary["time_to_solve_s"]
            parts.append(f"solved at {sinks.short(steps)} steps, {sinks.seconds(duration)}")
        elif self.options.solved is not None:
            parts.append(f"not solved ({sum(s is not None for s in self.solved)} of {len(self.seeds)} seeds)")
        parts.append(sinks.sparkline(self.sparks))
        self.terminal.say(f"{self.status:<9} {' · '.join(p for p in parts if p)}")
        self.terminal.say(f"  curve  {self.plan.folder / 'curve.png'}")


def summarise(trainer: Trainer) -> dict[str, Any]:
    """What summary.json holds. Times are seconds; env_steps are those of one seed, env_steps_per_s those of all."""
    import numpy as np

    from jaxrl_fast import population

    plan, options = trainer.plan, trainer.options
    steps = trainer.finished * plan.steps_per_update
    per_seed = [population.finite(w.mean) for w in trainer.windows]
    finals = [mean for mean in per_seed if mean is not None]
    last = trainer.evals[-1] if trainer.evals else {}
    finished = [e for e in trainer.evals if e["eval_return_mean"] is not None]
    best = max(finished, key=lambda e: e["eval_return_mean"], default={})
    solved = [s for s in trainer.solved if s is not None]
    all_solved = len(solved) == options.num_seeds
    return {
        "status": trainer.status,
        "algo": plan.settings.algo,
        "env_id": plan.env.spec.id,
        "num_envs": options.num_envs,
        "seed": options.seed,
        "num_seeds": options.num_seeds,
        "env_steps": steps,
        "updates": trainer.finished,
        "valid_steps": trainer.valid_steps,
        "train_time_s": round(trainer.train_time, 4),
        "compile_time_s": round(trainer.compile_time, 4),
        "eval_time_s": round(trainer.eval_time, 4),
        "wall_time_s": round(time.perf_counter() - trainer.began, 4),
        "env_steps_per_s": round(steps * options.num_seeds / trainer.train_time, 1) if steps else None,
        "peak_memory_mb": peak_memory_mb(),
        "host_share": round(trainer.idle_time / trainer.train_time, 5) if steps else None,
        "final_return_mean": population.finite(np.mean(finals)) if finals else None,
        "final_return_std": population.finite(np.std(finals, ddof=1)) if len(finals) > 1 else None,
        "final_return_iqm": population.finite(population.iqm(np.array(finals))) if finals else None,
        "final_return_per_seed": per_seed,
        "eval_return_mean": last.get("eval_return_mean"),
        "eval_return_std": last.get("eval_return_std"),
        "eval_length_mean": last.get("eval_length_mean"),
        "eval_episodes": last.get("eval_episodes"),
        "eval_unfinished": last.get("eval_unfinished"),
        "best_eval_return_mean": best.get("eval_return_mean"),
        "best_eval_env_steps": best.get("env_steps"),
        "evaluations": finished,
        "solved_threshold": options.solved,
        "solved": all_solved if options.solved is not None else None,
        "steps_to_solve": int(np.median([s[0] for s in solved])) if all_solved else None,
        "time_to_solve_s": population.finite(np.median([s[1] for s in solved])) if all_solved else None,
        "steps_to_solve_per_seed": [s and s[0] for s in trainer.solved],
        "num_shards": plan.num_shards,
        "device": device(),
        "versions": versions(),
    }


def announce(plan: Plan, terminal: sinks.Terminal) -> None:
    """What was chosen, before it starts."""
    import jax

    options = plan.settings.options
    backend, _, name = plan.env.spec.id.rpartition("/")
    last_seed = options.seed + options.num_seeds - 1
    seeds = f"seed {options.seed}" if options.num_seeds == 1 else f"seeds {options.seed} to {last_seed}"
    shards = f" x {plan.num_shards}" if plan.num_shards > 1 else ""
    where = f"{device()}{shards} (jax {jax.__version__})"
    parts = [plan.settings.algo, name, backend, f"{options.num_envs} envs", seeds, where]
    if plan.settings.by_default:
        terminal.say(f"training preset {plan.settings.preset} until it is solved; --help lists what else there is")
    terminal.say(f"jaxrl_fast {__version__}   {' · '.join(p for p in parts if p)}")
    watch = f"   watch: uvx tensorboard --logdir {plan.folder.parent}" if options.tensorboard else ""
    terminal.say(f"run  {plan.folder}{watch}")
    if gpu_unused():
        print('warning: there is a GPU, but JAX uses the CPU; pip install "jax[cuda12]"', file=sys.stderr)


def gpu_unused() -> bool:
    """A GPU is here, JAX computes on the CPU, and nobody asked it to."""
    import jax

    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def write_config(plan: Plan) -> None:
    """Everything, resolved. It is a preset too: --config runs/NAME/config.yaml."""
    import yaml

    made = {
        "preset": plan.settings.preset,
        "env_id": plan.env.spec.id,
        "num_shards": plan.num_shards,
        "device": device(),
        "versions": versions(),
    }
    content = config.to_mapping(plan.settings) | {"env": plan.env.spec.id, "made": made}
    (plan.folder / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def open_sinks(plan: Plan) -> list[sinks.Sink]:
    options = plan.settings.options
    opened: list[sinks.Sink] = [sinks.JsonLines(plan.folder / "metrics.jsonl")]
    if options.tensorboard:
        opened.append(sinks.TensorBoard(plan.folder))
    for service in ("wandb", "trackio"):
        if getattr(options, service):
            opened.append(sinks.Tracker(service, options.project, plan.folder.name, config.to_mapping(plan.settings)))
    return opened


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    with open(folder / "metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(text) for text in file]


def picture(folder: Path) -> Any:
    """A run's learning curve as a matplotlib figure."""
    import numpy as np

    from jaxrl_fast import plot, population

    records = read_metrics(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    seeds = list(dict.fromkeys(r["seed"] for r in records))
    names = "env_steps", "return_mean", "episodes"
    at, means, counts = (np.array([[r[k] or 0 for r in records if r["seed"] == s] for s in seeds]) for k in names)
    steps, returns, episodes = plot.thin(at[0], means, counts)
    curve = {"steps": steps, "returns": returns}
    if len(seeds) > 1:
        held = _hold(returns)
        low, high = population.bootstrap(held[:, None], num_resamples=500)
        curve |= {"centre": population.iqm(held), "low": low, "high": high}
    else:
        curve |= {"centre": _last_episodes(returns[0], episodes[0], population.WINDOW)}
    title = f"{summary['algo'].upper()} on {summary['env_id']}"
    return plot.figure(title, curve, summary["evaluations"], summary["solved_threshold"])


def use_compile_cache(plan: Plan) -> Path | None:
    """Compiled programs outlive the process. A host pool's address is part of its program, which no later one finds."""
    import jax

    if not plan.env.on_device:
        return None
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        folder = str(Path(CACHE).expanduser())
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return None
        jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return Path(folder)


@contextlib.contextmanager
def stop_signals(trainer: Trainer) -> Iterator[None]:
    """The first signal lets the chunk finish; the second does what it would have done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for name in SIGNALS if (number := getattr(signal, name, None))}

    def note(number, _):
        trainer.signal = number
        signal.signal(number, before[number])
        print("stopping after this chunk; once more to quit at once", file=sys.stderr)

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def device() -> str:
    import jax

    first = jax.devices()[0]
    return "cpu" if first.platform == "cpu" else f"{first.platform} {first.device_kind}"


def peak_memory_mb() -> float:
    """The most that was in use: on the device where it keeps count, else of this process."""
    import resource

    import jax

    on_device = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(on_device / 2**20 if on_device else kilobytes / 2**10, 1)


def versions() -> dict[str, str]:
    """Of everything that decides the result."""
    packages = ("jax", "jaxlib", "flax", "optax", "gymnax", "envpool", "numpy")
    found = {p: metadata.version(p) for p in packages if util.find_spec(p)}
    return {"jaxrl_fast": __version__, "python": platform.python_version(), **found}


def _evaluation(score: Any, length: Any, wanted: int) -> dict[str, Any]:
    from jaxrl_fast import population

    number = lambda of: population.finite(of()) if score.size else None
    return {
        "eval_return_mean": number(score.astype("float64").mean),
        "eval_return_std": number(score.astype("float64").std),
        "eval_return_min": number(score.min),
        "eval_return_max": number(score.max),
        "eval_length_mean": number(length.mean),
        "eval_episodes": int(score.size),
        "eval_unfinished": int(wanted - score.size),
    }


def _ready(rows: Any) -> bool:
    return all(x.is_ready() for x in rows.values())


def _updates(env_steps: int, plan: Plan) -> int:
    """At least so many environment steps, in updates; 0 for 0."""
    return -(-env_steps // plan.steps_per_update)


def _hold(returns: Any) -> Any:
    """[S, R] with every gap filled by what came before, or by what comes first."""
    import numpy as np

    known = ~np.isnan(returns)
    place = np.maximum.accumulate(np.where(known, np.arange(returns.shape[1]), -1), axis=1)
    place = np.where(place < 0, known.argmax(1)[:, None], place)
    return np.take_along_axis(returns, place, axis=1)


def _last_episodes(returns: Any, episodes: Any, window: int) -> Any:
    """At each record, the mean over the last `window` episodes or a few more."""
    import numpy as np

    total, count = np.cumsum(np.nan_to_num(returns) * episodes), np.cumsum(episodes)
    start = np.searchsorted(count, count - window, side="right") - 1
    before_total, before_count = np.where(start >= 0, total[start], 0), np.where(start >= 0, count[start], 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total - before_total) / np.where(count > before_count, count - before_count, np.nan)


def _entries(cache: Path | None) -> int:
    return len(os.listdir(cache)) if cache and cache.is_dir() else 0


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MB" if count < 2**30 else f"{count / 2**30:.1f} GB"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
