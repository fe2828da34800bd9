"""One run under way: keeps the device busy, and takes down what it does.

A chunk of updates is dispatched before the metrics of the one before are read.
"""

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_fast import host, report, sinks
from jaxrl_fast.plan import Plan

NUM_RECORDS = 500  # lines of metrics.jsonl for each seed, unless told
CHUNK_S = 0.5  # what a chunk aims at: short enough to stop at once, long enough that the host costs nothing
GROWTH = 8  # of a chunk's length from one to the next


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
        report.announce(self.plan, self.terminal)
        report.write_config(self.plan)
        try:
            self.compile()
            self.sinks = report.open_sinks(self.plan)
            with host.stop_signals(self.stop):
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

        from jaxrl_fast import memory, program

        cache = host.use_compile_cache(self.plan.env.on_device) if self.options.compile_cache else None
        before = host.entries(cache)
        self.program = program.build(
            self.plan.env, self.plan.agent, len(self.seeds), self.plan.num_updates, self.plan.num_shards
        )
        self.compile_time = self.program.compile_time_s
        kept = " (cached for next time)" if host.entries(cache) > before else " (from the cache)" if before else ""
        needs = f"needs {memory.readable(self.program.memory)}"
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
        now = max(chunk.ended or time.perf_counter(), self.free_since)  # it may be known to be done before the last one
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
            play = lambda *given: evaluate.play(self.plan.eval_env, self.plan.agent, each, *given)
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

    def stop(self, number: int) -> None:
        """A signal asks for it."""
        self.signal = number

    def stopping(self) -> bool:
        return self.signal is not None or self.options.stop_when_solved and all(self.solved)

    def close(self) -> None:
        """Whatever happened, what is known is written."""
        for sink in getattr(self, "sinks", []):
            sink.close()
        self.summary = report.summarise(self)
        text = json.dumps(self.summary, indent=2, allow_nan=False) + "\n"
        (self.plan.folder / "summary.json").write_text(text, encoding="utf-8")
        if self.recorded:
            report.picture(self.plan.folder).savefig(self.plan.folder / "curve.png")

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
