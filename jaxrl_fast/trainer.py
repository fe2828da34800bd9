"""One run under way: keeps the device busy, and takes down what it does.

A chunk of updates is dispatched before the metrics of the one before are read.
"""

import contextlib
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_fast import host, report, sinks
from jaxrl_fast.members import in_line
from jaxrl_fast.plan import Plan
from jaxrl_fast.spelling import why

TIMES = ("train", "compile", "eval", "idle", "save")  # seconds, in all processes of a run
NUM_RECORDS = 500  # lines of metrics.jsonl for each seed, unless told
CHUNK_S = 0.5  # what a chunk aims at: short enough to stop at once, long enough that the host costs nothing
MOST_SHOWN = 100_000  # updates that a line on the terminal is about
GROWTH = 8  # of a chunk's length from one to the next


class Outcome(NamedTuple):
    """What a run leaves behind."""

    folder: Path
    summary: dict[str, Any]
    agent_state: Any  # what `explore` and `exploit` take, with a leading axis where there are several seeds
    signal: int | None  # what stopped it
    failure: str  # why it could not go on, in a sentence
    asked: int | None = None  # a signal that came, perhaps too late to stop it
    unwritten: str = ""  # what of it is not on the disk, for a sentence


class Chunk(NamedTuple):
    """A chunk that the device was given."""

    rows: Any  # metrics, still on the device
    num_updates: int
    began: float  # when it was given
    ended: float | None  # when it was done, if giving it meant waiting for it


def execute(plan: Plan) -> Outcome:
    """Compiles, trains, evaluates, saves and writes everything down."""
    terminal = sinks.terminal(plan.settings.options.log_level)
    try:
        return Trainer(plan, terminal).run()
    finally:
        terminal.close()


class Trainer:
    """One run under way."""

    def __init__(self, plan: Plan, terminal: sinks.Terminal):
        from jaxrl_fast import keeper, play, population, scores

        self.plan, self.options, self.terminal = plan, plan.settings.options, terminal
        self.began = time.perf_counter()
        members = plan.members or in_line(self.options.seed, self.options.num_seeds)
        self.seeds, labels = [m.seed for m in members], [m.label for m in members]
        self.record_length = _updates(self.options.log_every, plan) or -(-plan.num_updates // NUM_RECORDS)
        self.scores = scores.Scores(
            labels, self.record_length, plan.steps_per_update, plan.agent.rollout_length, self.options.solved
        )
        self.keeper = keeper.Keeper(plan, self.scores)
        self.play = play.Evaluator(plan.eval_env, plan.agent, self.seeds, self.options.eval_episodes, plan.varied)
        self.screen = population.Ledger(sys.maxsize, MOST_SHOWN)  # since the last line on the terminal
        self.queue: deque[Chunk] = deque()
        self.sinks: list[sinks.Sink] = []
        self.dispatched = self.finished = 0  # updates
        self.chunk_length, self.rate = 1, 0.0  # updates, updates a second
        self.times = dict.fromkeys(TIMES, 0.0)  # of this run, in all processes
        self.shown = 0, 0.0  # updates and seconds at the last line on the terminal
        self.greedy: float | None = None  # return of the last evaluation since then
        self.exact = self.options.exact_resume and not plan.env.on_device
        self.program_memory = 0  # bytes, known once it is compiled
        self.signal: int | None = None
        self.asked: int | None = None  # the same, even where it came too late to stop anything
        self.failure = ""
        self.status = "failed"
        self.unwritten: list[str] = []  # of what a run leaves behind

    def run(self) -> Outcome:
        try:
            report.announce(self.plan, self.terminal)
            report.write_config(self.plan)
        except BaseException:
            self.plan.release()
            raise
        with host.compile_cache(self.options.compile_cache and self.plan.env.on_device) as cache:
            try:
                self.open()
                self.compile(cache)
                self.begin()
                if self.options.resume:
                    report.mark_running(self.plan.folder)
                with host.stop_signals(self.stop):
                    self.train()
                if self.finished == self.end and self.scores.evaluated_at == self.env_steps:
                    self.signal = None  # it came too late to stop anything
                self.status = "diverged" if self.failure else "stopped" if self.signal else "done"
            except Exception as error:
                if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):  # as JAX has it
                    raise
                known = f": {self.needed()}" if self.program_memory else ""
                self.failure = f"out of memory{known}; fewer environments or seeds need less"
                raise MemoryError(self.failure) from error
            finally:
                self.close()
        from jaxrl_fast import memory

        self.say_done()
        num_seeds = len(self.seeds)
        if not (self.keeper.has(self.env_steps) or self.failure or self.exact and self.signal):
            self.unwritten.insert(0, "its last checkpoint")
        learner = memory.without_replay(self.program.learner(self.state), empty=(num_seeds,) * (num_seeds > 1) + (0,))
        unwritten = " and ".join(self.unwritten)
        return Outcome(self.plan.folder, self.summary, learner, self.signal, self.failure, self.asked, unwritten)

    def open(self) -> None:
        """Makes what environments there are on the host, before they are compiled for."""
        if self.plan.env.on_device:
            return
        opened = [self.plan.env] if self.exact else [self.plan.env, self.plan.eval_env]  # the other has new ones anyway
        count = sum(env.spec.num_envs_in_all for env in opened)
        self.terminal.say(f"making {count} environments ...")
        began = time.perf_counter()
        for env in opened:
            env.open()
        self.terminal.say(f"made in {sinks.seconds(time.perf_counter() - began)}")

    def compile(self, cache: Path | None) -> None:
        from jaxrl_fast import memory, program

        before = host.entries(cache)
        self.terminal.say("compiling ...")
        plan = self.plan
        self.program = program.build(plan.env, plan.agent, plan.num_updates, plan.placement, plan.varied)
        self.times["compile"] = duration = self.program.compile_time_s
        self.program_memory = self.program.memory
        kept = " (cached for next time)" if host.entries(cache) > before else " (from the cache)" if before else ""
        num_devices = plan.placement.num_devices
        needed, free = num_devices * self.program.memory, memory.free(num_devices)
        self.terminal.say(f"compiled in {sinks.seconds(duration)}{kept}   needs {memory.readable(needed)}")
        if free is not None and needed > free:
            host.warn(self.needed())

    def needed(self) -> str:
        """What the program needs of memory and what there is, in words."""
        from jaxrl_fast import memory

        num_devices = self.plan.placement.num_devices
        free = memory.free(num_devices)
        there = "" if free is None else f", and {memory.readable(free)} are free"
        return f"the program needs {memory.readable(num_devices * self.program_memory)} of memory{there}"

    def begin(self) -> None:
        """The state before training, or the one that was saved, as if there had been no end."""
        import numpy as np

        saved, path = self.plan.saved, self.plan.folder / report.METRICS
        if saved is None:
            seeds = np.asarray(self.seeds, np.int32)
            self.state = self.program.init(seeds if len(self.seeds) > 1 else seeds[0])
            self.lines = sinks.JsonLines(path, 0 if self.options.resume else None)
            self.sinks = [self.lines, *report.open_sinks(self.plan)]
            return
        self.state, others = self.keeper.restore(saved, self.program)
        if not self.plan.env.on_device:
            self.state = self.program.anew(self.state)
        self.dispatched = self.finished = self.scores.updates
        self.times = {name: self.times[name] + others["times"].get(name, 0.0) for name in TIMES}
        self.began -= others["wall_time"]
        self.shown = self.finished, self.times["train"]
        self.lines = sinks.JsonLines(path, others["metrics_size"])
        self.sinks = [self.lines, *report.open_sinks(self.plan, self.env_steps)]

    def spent(self) -> dict[str, float]:
        """Seconds on each of TIMES."""
        return self.times | {
            "compile": self.times["compile"] + self.play.compile_time,
            "eval": self.times["eval"] + self.play.time,
        }

    @property
    def env_steps(self) -> int:
        """Environment steps of each seed so far."""
        return self.finished * self.plan.steps_per_update

    def train(self) -> None:
        """Chunks up to each evaluation and checkpoint, until all updates are made or something says stop.

        What is written at a stop, an incomplete record and perhaps an evaluation, comes after the last checkpoint: a
        run that goes on from there writes what a run without the stop would have.
        """
        evaluating = _updates(self.options.eval_every, self.plan)
        saving = _updates(self.keeper.every_steps, self.plan)
        self.pace = sinks.Pace(self.options.report_every)
        while self.finished < self.end and not self.stopping():
            num_begun = self.keeper.num_begun
            if self.at(evaluating) and self.scores.evaluated_at != self.env_steps:
                self.evaluate()
            if self.at(saving) or self.keeper.due():
                self.save()
            if self.exact and self.keeper.num_begun > num_begun:
                self.plan.env.renew(self.finished)
                self.state = self.program.anew(self.state)
            boundaries = [self.finished // every * every + every for every in (evaluating, saving) if every]
            self.advance(min([self.end, *boundaries]))
        if not (self.exact and self.signal):
            self.save()
        if not (self.signal or self.failure):
            self.evaluate()
        if self.signal or self.failure:
            self.record(everything=True)
        self.await_keeper()

    def at(self, every: int) -> bool:
        """Whether the updates made so far, at least one, are a multiple of `every`; never where that is 0."""
        return every > 0 and self.finished > 0 and self.finished % every == 0

    def advance(self, boundary: int) -> None:
        """Runs to update `boundary`, or until it is time to save; one chunk waits behind the one that is computed."""
        self.record()  # what an evaluation at this moment might have belonged to
        self.free_since = time.perf_counter()
        more = lambda: self.dispatched < min(boundary, self.end) and not self.stopping() and not self.keeper.due()
        while self.queue or more():
            while len(self.queue) < 2 and more():
                self.dispatch(boundary)
            self.read(self.queue.popleft())
            if self.queue or more():
                self.record()  # else an evaluation may follow, which belongs to the last record

    def dispatch(self, boundary: int) -> None:
        """Gives the device a chunk of about CHUNK_S.

        A run that stops when solved has no chunk that reaches beyond a record. As one chunk waits behind another at
        most, it knows of each record whether it was solved then before it gives away the next but one: where it ends
        depends on no clock, no checkpoint and no stop, unless a seed is lost by what only a checkpoint shows.
        """
        import numpy as np

        by_clock = max(min(int(self.rate * CHUNK_S), self.chunk_length * GROWTH), 1)
        if self.options.stop_when_solved:
            boundary = min(boundary, self.dispatched // self.record_length * self.record_length + self.record_length)
        self.chunk_length = min(by_clock, self.program.capacity, boundary - self.dispatched)
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

        from jaxrl_fast.program import WRONG

        # If it is done already, nobody knows since when: the device may have idled until the next one was given.
        idle_until = self.latest_began if chunk.ended is None and _ready(chunk.rows) else chunk.began
        self.times["idle"] += max(idle_until - self.free_since, 0.0)
        rows = jax.device_get(jax.block_until_ready(chunk.rows))
        now = max(chunk.ended or time.perf_counter(), self.free_since)  # it may be known to be done before the last one
        elapsed = now - self.free_since
        self.free_since = now
        self.rate = chunk.num_updates / max(elapsed, 1e-9)
        self.times["train"] += elapsed
        self.finished += chunk.num_updates
        num_seeds = len(self.seeds)
        rows = {k: x.reshape(-1, x.shape[-1])[:num_seeds, : chunk.num_updates] for k, x in rows.items()}
        not_finite = np.flatnonzero(rows.pop(WRONG)[:, -1])
        fractions = np.arange(1, chunk.num_updates + 1) / chunk.num_updates
        train_time = self.times["train"]
        clock = np.broadcast_to(train_time - elapsed * (1 - fractions), (len(self.seeds), chunk.num_updates))
        wall = clock + (now - self.began - train_time)
        of_games = ~np.isfinite(rows["return_sum"]).all(1)
        for wrong in self.scores.add(rows | {"train_time_s": clock, "wall_time_s": wall}):
            at = wrong.update * self.plan.steps_per_update
            self.diverge(wrong.member, f"{wrong.metric} is not finite", at, bool(of_games[wrong.member]))
        for member in map(int, not_finite):
            if self.scores.diverged[member] is None:
                self.diverge(member, "a parameter is not finite", self.env_steps, bool(of_games[member]))
        self.show(rows)

    def record(self, everything: bool = False, evaluation: list[dict[str, Any]] | None = None) -> None:
        """Writes the records that are complete; an evaluation goes into the last one."""
        for records in self.scores.records(everything, evaluation):
            for sink in list(self.sinks):
                try:
                    sink.write(records)
                except Exception as error:  # also what a logging service raises
                    self.give_up(sink, error)

    def give_up(self, sink: sinks.Sink, error: Exception) -> None:
        """A full disk ends no run. Records for metrics.jsonl wait for room; what else cannot be written is left."""
        if sink is not self.lines:
            self.sinks.remove(sink)
        elif not isinstance(error, OSError):
            raise error
        elif self.lines.num_failures > 1:  # it has been said
            return
        name = report.METRICS if sink is self.lines else type(sink).__name__
        host.warn(f"{name} cannot be written ({why(error)}); training goes on")

    def diverge(self, member: int, what: str, env_steps: int, of_games: bool = False) -> None:
        """Numbers that are not finite stop the run; with `on_nonfinite` "continue" only when no seed is left.

        `of_games`: returns are not finite either, for which no policy is to blame: actions always are.
        """
        where = f"{_words(self.scores.labels[member])}: {what} at step {sinks.short(env_steps)}"
        self.scores.diverged[member] = env_steps
        if self.options.on_nonfinite == "continue" and None in self.scores.diverged:
            host.warn(f"{where}; the other seeds go on")
            return
        last = f"the last good checkpoint is {self.keeper.last}" if self.keeper.last else "there is no checkpoint"
        wrong = f"{self.options.env} gives observations or rewards that are not finite"
        known = of_games or not self._are_games_finite(member)  # an observation that is gone by now tells nothing
        advice = wrong if known else f"try a lower learning rate, unless {wrong}"
        self.failure = self.failure or f"{where}; {last}; {advice}"

    def _are_games_finite(self, member: int) -> bool:
        """Whether a seed's environments stand at finite observations and sums of rewards."""
        import jax
        import numpy as np

        from jaxrl_fast import in_flight

        actors = self.state.actors
        stand = [flight.actors for flight in actors.flights] if isinstance(actors, in_flight.InFlight) else [actors]
        games = jax.device_get([(some.timestep.obs, some.score) for some in stand])
        of_member = [x[member] if len(self.seeds) > 1 else x for x in jax.tree.leaves(games)]
        return all(np.isfinite(x).all() for x in of_member)

    def save(self, score: float | None = None) -> None:
        """The state is copied to the host; a thread writes it while the next chunk runs. `score`: if it is the best."""
        began = time.perf_counter()
        self.await_keeper()
        if self.failure:
            return
        try:
            size = self.lines.sync()
        except OSError as error:  # a run cannot go on from lines that are not there
            self.keeper.postpone()
            return self.give_up(self.lines, error)
        others = {"times": self.spent(), "wall_time": time.perf_counter() - self.began, "metrics_size": size}
        wrong = self.keeper.save(self.state, self.env_steps, others, score)
        self.times["save"] += time.perf_counter() - began
        if wrong is not None:
            member, name = wrong
            self.diverge(member, f"{name} of its state is not finite", self.env_steps)
            self.save(score)  # of those that are left

    def await_keeper(self) -> None:
        """Says what went wrong with the last checkpoint."""
        problem = self.keeper.wait()
        if problem:
            host.warn(problem)

    def show(self, rows: Any) -> None:
        """A line on the terminal, if it is time."""
        from jaxrl_fast import population

        self.screen.add(rows)
        if not self.pace.due() and self.finished < self.end:
            return
        for merged in map(population.merge_seeds, self.screen.take(everything=True)):
            record = population.summarise(merged)[0]
            steps = self.plan.steps_per_update
            speed = (self.finished - self.shown[0]) / max(self.times["train"] - self.shown[1], 1e-9)
            self.shown = self.finished, self.times["train"]
            record |= {"env_steps": self.finished * steps, "env_steps_per_s": speed * steps * len(self.seeds)}
            record["eval_return_mean"], self.greedy = self.greedy, None
            self.terminal.progress(sinks.line(record, self.terminal.width), self.finished / self.plan.num_updates)

    def evaluate(self) -> None:
        """Plays the greedy policy, and completes the record with how it went. The best so far is saved.

        A signal may end games on the host before that: the evaluation comes when the run goes on.
        """
        from jaxrl_fast.play import Stopped

        index = len(self.scores.evaluations)
        if self.exact:
            self.plan.eval_env.renew(index)
        try:
            learner, stopped = self.program.learner(self.state), lambda: self.signal is not None
            each_seed, total = self.play(learner, index, stopped, self.scores.lost)
        except Stopped:
            return
        self.scores.evaluations.append({"env_steps": self.env_steps} | total)
        self.greedy = total["eval_return_mean"]
        self.record(everything=True, evaluation=each_seed)
        if self.scores.best() is self.scores.evaluations[-1]:
            self.save(total["eval_return_mean"])

    def stop(self, number: int) -> None:
        """Notes that a signal asks for the end."""
        self.signal = self.asked = number

    def stopping(self) -> bool:
        return self.signal is not None or bool(self.failure)

    @property
    def end(self) -> int:
        """The updates of the whole run: where it stops when solved, a record more than the last seed wanted.

        A seed whose numbers are not finite any more wants none.
        """
        both = zip(self.scores.solved, self.scores.diverged, strict=True)
        wanted = [steps for solved, diverged in both if (steps := solved[0] if solved else diverged) is not None]
        if not self.options.stop_when_solved or len(wanted) < len(self.seeds):
            return self.plan.num_updates
        num_records = -(-max(wanted) // (self.record_length * self.plan.steps_per_update))
        return min((num_records + 1) * self.record_length, self.plan.num_updates)

    def close(self) -> None:
        """Whatever happened, what is known is written, and the folder is given back."""
        try:
            if self.sinks or not self.plan.saved:  # else it failed before it went on: what there is stays as it is
                self.write_end()
        finally:
            self.plan.release()

    def write_end(self) -> None:
        """The last of the records, the summary and the curve. What cannot be written or drawn ends no run."""
        from jaxrl_fast import checkpoint

        self.await_keeper()
        self.summary = report.summarise(self)
        text = json.dumps(self.summary, indent=2, allow_nan=False) + "\n"
        names = [report.METRICS if sink is self.lines else type(sink).__name__ for sink in self.sinks]
        actions = list(zip(names, [sink.close for sink in self.sinks]))
        actions.append((report.SUMMARY, lambda: checkpoint.replace(self.plan.folder / report.SUMMARY, text)))
        if self.scores.recorded:
            actions.append((report.CURVE, self.draw))
        for name, action in actions:
            try:
                action()
            except Exception as error:  # also what a logging service or matplotlib raises
                host.warn(f"the end of {name} could not be written ({why(error)})")
                self.unwritten += [name] if name in (report.METRICS, report.SUMMARY) else []

    def draw(self) -> None:
        from jaxrl_fast import checkpoint

        with checkpoint.whole(self.plan.folder / report.CURVE) as aside:
            report.picture(self.plan.folder).savefig(aside)

    def say_done(self) -> None:
        summary = self.summary
        parts = [f"{sinks.short(summary['env_steps'])} steps in {sinks.seconds(summary['train_time_s'])}"]
        if summary["final_return_mean"] is not None:
            parts.append(f"return {summary['final_return_mean']:.1f}")
        if summary["eval_return_mean"] is not None:
            parts.append(f"greedy {summary['eval_return_mean']:.1f}")
        if summary["eval_unfinished"]:
            parts.append(f"{summary['eval_unfinished']} evaluation episodes did not end in time")
        if summary["solved"]:
            steps, duration = summary["steps_to_solve"], summary["time_to_solve_s"]
            parts.append(f"solved at {sinks.short(steps)} steps, {sinks.seconds(duration)}")
        elif self.options.solved is not None:
            num_solved = sum(s is not None for s in self.scores.solved)
            parts.append(f"not solved ({num_solved} of {len(self.seeds)} seeds)")
        with contextlib.suppress(ValueError):  # somebody has been at the lines
            parts.append(sinks.sparkline([r["return_mean"] for r in report.read_metrics(self.plan.folder)]))
        self.terminal.say(f"{self.status:<9} {' · '.join(p for p in parts if p)}")
        if (self.plan.folder / report.CURVE).is_file():
            self.terminal.say(f"  curve  {self.plan.folder / report.CURVE}")
        if command := report.way_on(self):
            self.terminal.say(f"  go on  {command}")


def _words(label: dict[str, Any]) -> str:
    """seed 3, agent.learning_rate 0.001"""
    return ", ".join(f"{name} {value}" for name, value in label.items())


def _ready(rows: Any) -> bool:
    return all(x.is_ready() for x in rows.values())


def _updates(env_steps: int, plan: Plan) -> int:
    """At least so many environment steps, in updates; 0 for 0."""
    return -(-env_steps // plan.steps_per_update)
