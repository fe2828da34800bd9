"""One run under way: trains up to each evaluation and checkpoint, and takes down what comes of it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_fast.config.population import in_line
from jaxrl_fast.loggers.terminal import Console, make_console
from jaxrl_fast.runs import files
from jaxrl_fast.training import console, run_logger
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.training.summary import RunResult, summarize, write_config
from jaxrl_fast.utils import compile_cache, formatting, signals, warnings
from jaxrl_fast.utils.errors import why

if TYPE_CHECKING:
    from jaxrl_fast.training.dispatcher import ChunkResult


TIMES = ("train", "compile", "eval", "idle", "save")  # seconds, in all processes of a run
NUM_RECORDS = 500  # lines of metrics.jsonl for each seed, unless told


class Outcome(NamedTuple):
    """What a run leaves behind."""

    folder: Path
    summary: dict[str, Any]
    agent_state: Any  # what `explore` and `exploit` take, with a leading axis where there are several seeds
    signal: int | None  # what stopped it
    failure: str  # why it could not go on, in a sentence
    asked: int | None = None  # a signal that came, perhaps too late to stop it
    unwritten: str = ""  # what of it is not on the disk, for a sentence


def execute(plan: Plan) -> Outcome:
    """Compiles, trains, evaluates, saves and writes everything down."""
    terminal = make_console(plan.settings.options.log_level)
    try:
        return Trainer(plan, terminal).run()
    finally:
        terminal.close()


class Trainer:
    """One run under way."""

    def __init__(self, plan: Plan, terminal: Console):
        from jaxrl_fast.metrics import tracker
        from jaxrl_fast.training import checkpointer, evaluator

        self.plan, self.options, self.terminal = plan, plan.settings.options, terminal
        self.began = time.perf_counter()
        members = plan.members or in_line(self.options.seed, self.options.num_seeds)
        self.seeds, labels = [m.seed for m in members], [m.label for m in members]
        self.record_length = _updates(self.options.log_every, plan) or -(-plan.num_updates // NUM_RECORDS)
        self.scores = tracker.MetricsTracker(
            labels, self.record_length, plan.steps_per_update, plan.agent.rollout_length, self.options.solved_threshold
        )
        self.keeper = checkpointer.CheckpointManager(plan, self.scores)
        self.play = evaluator.Evaluator(plan.eval_env, plan.agent, self.seeds, self.options.eval_episodes, plan.varied)
        self.journal = run_logger.RunLogger(plan)
        self.finished = 0  # updates
        self.times = dict.fromkeys(TIMES, 0.0)  # of this run, in all processes
        self.exact = self.options.exact_resume and not plan.env.on_device
        self.program_memory = 0  # bytes, known once it is compiled
        self.signal: int | None = None
        self.asked: int | None = None  # the same, even where it came too late to stop anything
        self.failure = ""
        self.status = "failed"

    def run(self) -> Outcome:
        try:
            console.announce(self.plan, self.terminal)
            write_config(self.plan)
        except BaseException:
            self.plan.release()
            raise
        with compile_cache.compile_cache(self.options.compile_cache and self.plan.env.on_device) as cache:
            try:
                self.open()
                self.compile(cache)
                self.begin()
                if self.options.resume:
                    files.mark_running(self.plan.folder)
                with signals.stop_signals(self.stop):
                    self.train()
                if self.finished == self.end and self.scores.evaluated_at == self.env_steps:
                    self.signal = None  # it came too late to stop anything
                self.status = "diverged" if self.failure else "stopped" if self.signal else "done"
            except Exception as error:
                if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):  # as JAX has it
                    self.failure = why(error)
                    raise
                known = f": {self.needed()}" if self.program_memory else ""
                self.failure = f"out of memory{known}; fewer environments or seeds need less"
                raise MemoryError(self.failure) from error
            finally:
                self.close()
        console.print_summary(self.plan, self.terminal, self.summary)
        is_saved = self.keeper.has(self.env_steps) or self.failure or self.exact and self.signal
        learner = self.program.learner(self.feed.state)
        unwritten = " and ".join([*([] if is_saved else ["its last checkpoint"]), *self.journal.unwritten])
        return Outcome(self.plan.folder, self.summary, learner, self.signal, self.failure, self.asked, unwritten)

    def open(self) -> None:
        """Makes what environments there are on the host, before they are compiled for."""
        if self.plan.env.on_device:
            return
        opened = [self.plan.env] if self.exact else [self.plan.env, self.plan.eval_env]  # the other has new ones anyway
        count = sum(env.spec.total_num_envs for env in opened)
        self.terminal.say(f"making {count} environments ...")
        began = time.perf_counter()
        for env in opened:
            env.open()
        self.terminal.say(f"made in {formatting.seconds(time.perf_counter() - began)}")

    def compile(self, cache: Path | None) -> None:
        from jaxrl_fast.parallel import program
        from jaxrl_fast.utils import memory

        before = compile_cache.num_cache_entries(cache)
        self.terminal.say("compiling ...")
        plan = self.plan
        self.program = program.build(plan.env, plan.agent, plan.num_updates, plan.placement, plan.varied)
        self.times["compile"] = duration = self.program.compile_time_s
        self.program_memory = self.program.memory
        kept = (
            " (cached for next time)"
            if compile_cache.num_cache_entries(cache) > before
            else " (from the cache)"
            if before
            else ""
        )
        num_devices = plan.placement.num_devices
        needed, free = num_devices * self.program.memory, memory.free_bytes(num_devices)
        self.terminal.say(f"compiled in {formatting.seconds(duration)}{kept}   needs {memory.format_bytes(needed)}")
        if free is not None and needed > free:
            warnings.warn(self.needed())

    def needed(self) -> str:
        """What the program needs of memory and what there is, in words."""
        from jaxrl_fast.utils import memory

        num_devices = self.plan.placement.num_devices
        free = memory.free_bytes(num_devices)
        there = "" if free is None else f", and {memory.format_bytes(free)} are free"
        return f"the program needs {memory.format_bytes(num_devices * self.program_memory)} of memory{there}"

    def begin(self) -> None:
        """The state before training, or the one that was saved, as if there had been no end."""
        import numpy as np

        from jaxrl_fast.training import dispatcher

        saved = self.plan.saved
        if saved is None:
            seeds = np.asarray(self.seeds, np.int32)
            state = self.program.init(seeds if len(self.seeds) > 1 else seeds[0])
            self.journal.open(0 if self.options.resume else None)
        else:
            state, others = self.keeper.restore(saved, self.program)
            state = state if self.plan.env.on_device else self.program.restart(state)
            self.finished = self.scores.updates
            self.times = {name: self.times[name] + others["times"].get(name, 0.0) for name in TIMES}
            self.began -= others["wall_time"]
            self.journal.open(others["metrics_size"], self.env_steps)
        self.feed = dispatcher.Dispatcher(self.program, state, len(self.seeds), self.finished)
        self.screen = console.ProgressPrinter(self.plan, self.terminal, self.finished, self.times["train"])

    def spent(self) -> dict[str, float]:
        """Seconds on each of TIMES."""
        return self.times | {
            "compile": self.times["compile"] + self.play.compile_time,
            "eval": self.times["eval"] + self.play.time,
        }

    def ended(self) -> RunResult:
        """How far it has come, for the summary."""
        return RunResult(
            status=self.status,
            failure=self.failure,
            updates=self.finished,
            seconds=self.spent() | {"wall": time.perf_counter() - self.began},
            program_memory=self.program_memory,
            num_saved=self.keeper.num_saved,
            last_saved=self.keeper.last.name if self.keeper.last else None,
        )

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
        while self.finished < self.end and not self.stopping():
            num_begun = self.keeper.num_begun
            if self.at(evaluating) and self.scores.evaluated_at != self.env_steps:
                self.evaluate()
            if self.at(saving) or self.keeper.due():
                self.save()
            if self.exact and self.keeper.num_begun > num_begun:
                self.plan.env.reseed(self.finished)
                self.feed.state = self.program.restart(self.feed.state)
            boundaries = [self.finished // every * every + every for every in (evaluating, saving) if every]
            self.advance(min([self.end, *boundaries]))
        if not (self.exact and self.signal):
            self.save()
        if not (self.signal or self.failure) and self.scores.evaluated_at != self.env_steps:
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
        feed = self.feed
        feed.mark_free()
        more = lambda: feed.num_given < min(boundary, self.end) and not self.stopping() and not self.keeper.due()
        while feed.num_waiting or more():
            while feed.num_waiting < 2 and more():
                feed.give(min(boundary, self.next_record) if self.options.stop_when_solved else boundary)
            self.take_down(feed.take())
            self.record(waiting=not (feed.num_waiting or more()))  # an evaluation may follow, which belongs to the last

    @property
    def next_record(self) -> int:
        """The update at which the next record will be complete. No chunk of a run that stops when solved goes beyond.

        As one chunk waits behind another at most, it knows of each record whether it was solved then before it gives
        away the next but one: where it ends depends on no clock, no checkpoint and no stop, unless a seed is lost by
        what only a checkpoint shows.
        """
        return (self.feed.num_given // self.record_length + 1) * self.record_length

    def take_down(self, done: "ChunkResult") -> None:
        """The metrics of a chunk."""
        import numpy as np

        self.times["idle"] += done.idle
        self.times["train"] += done.duration
        self.finished += done.num_updates
        fractions = np.arange(1, done.num_updates + 1) / done.num_updates
        train_time = self.times["train"]
        clock = np.broadcast_to(train_time - done.duration * (1 - fractions), (len(self.seeds), done.num_updates))
        wall = clock + (self.feed.free_since - self.began - train_time)
        of_games = ~np.isfinite(done.rows["return_sum"]).all(1)
        for wrong in self.scores.add(done.rows | {"train_time_s": clock, "wall_time_s": wall}):
            at = wrong.update * self.plan.steps_per_update
            self.diverge(wrong.member, f"{wrong.metric} is not finite", at, bool(of_games[wrong.member]))
        for member in map(int, np.flatnonzero(~done.finite)):
            if self.scores.diverged[member] is None:
                self.diverge(member, "a parameter is not finite", self.env_steps, bool(of_games[member]))
        self.screen.show(done.rows, self.finished, train_time, self.finished >= self.end)

    def record(self, **which: Any) -> None:
        """Writes the records that are complete; an evaluation goes into the last one."""
        for records in self.scores.records(**which):
            self.journal.write(records)

    def diverge(self, member: int, what: str, env_steps: int, of_games: bool = False) -> None:
        """Numbers that are not finite stop the run; with `on_nonfinite` "continue" only when no seed is left.

        `of_games`: returns are not finite either, for which no policy is to blame: actions always are.
        """
        where = f"{_words(self.scores.labels[member])}: {what} at step {formatting.short_number(env_steps)}"
        self.scores.diverged[member] = env_steps
        if self.options.on_nonfinite == "continue" and None in self.scores.diverged:
            warnings.warn(f"{where}; the other seeds go on")
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

        from jaxrl_fast import async_rollout

        actors = self.feed.state.actors
        stand = (
            [flight.actors for flight in actors.flights] if isinstance(actors, async_rollout.AsyncActors) else [actors]
        )
        games = jax.device_get([(some.timestep.obs, some.score) for some in stand])
        of_member = [x[member] if len(self.seeds) > 1 else x for x in jax.tree.leaves(games)]
        return all(np.isfinite(x).all() for x in of_member)

    def save(self, score: float | None = None) -> None:
        """The state is copied to the host; a thread writes it while the next chunk runs. `score`: if it is the best."""
        began = time.perf_counter()
        self.await_keeper()
        if self.failure:
            return
        size = self.journal.sync()
        if size is None:
            return self.keeper.postpone()
        others = {"times": self.spent(), "wall_time": time.perf_counter() - self.began, "metrics_size": size}
        wrong = self.keeper.save(self.feed.state, self.env_steps, others, score)
        self.times["save"] += time.perf_counter() - began
        if wrong is not None:
            member, name = wrong
            self.diverge(member, f"{name} of its state is not finite", self.env_steps)
            self.save(score)  # of those that are left

    def await_keeper(self) -> None:
        """Says what went wrong with the last checkpoint."""
        problem = self.keeper.wait()
        if problem:
            warnings.warn(problem)

    def evaluate(self) -> None:
        """Plays the greedy policy, and completes the record with how it went. The best so far is saved.

        A signal may end games on the host before that: the evaluation comes when the run goes on.
        """
        from jaxrl_fast.training.evaluator import EvaluationInterrupted

        index = len(self.scores.evaluations)
        if self.exact:
            self.plan.eval_env.reseed(index)
        try:
            learner, stopped = self.program.learner(self.feed.state), lambda: self.signal is not None
            each_seed, total = self.play(learner, index, stopped, self.scores.lost)
        except EvaluationInterrupted:
            return
        self.scores.evaluations.append({"env_steps": self.env_steps} | total)
        self.screen.evaluated(total["eval_return_mean"])
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
            if self.journal.sinks or not self.plan.saved:  # else it failed before it went on: what there is stays
                self.await_keeper()
                self.summary = summarize(self.plan, self.scores, self.ended())
                self.journal.close(self.summary, has_curve=self.scores.recorded > 0)
        finally:
            self.plan.release()


def _words(label: dict[str, Any]) -> str:
    """seed 3, agent.learning_rate 0.001"""
    return ", ".join(f"{name} {value}" for name, value in label.items())


def _updates(env_steps: int, plan: Plan) -> int:
    """At least so many environment steps, in updates; 0 for 0."""
    return -(-env_steps // plan.steps_per_update)
