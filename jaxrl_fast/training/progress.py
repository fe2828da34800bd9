"""Track the progress of a run on the host, from its start to its summary."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_fast.config.population import in_line
from jaxrl_fast.metrics.tracker import MetricsTracker
from jaxrl_fast.parallel import team
from jaxrl_fast.runs import files
from jaxrl_fast.training import console, disk, run_logger
from jaxrl_fast.training.checkpoint_manager import CheckpointManager
from jaxrl_fast.training.evaluator import Evaluator
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.training.summary import RunResult, summarize
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.errors import is_out_of_memory, why

if TYPE_CHECKING:
    from jaxrl_fast.training.dispatcher import ChunkResult

TIMES = ("train", "compile", "eval", "idle", "save")  # seconds, in all processes of a run


class RunProgress:
    """The host's record of a run. It is always complete, so that a summary can be written after any failure."""

    def __init__(self, plan: Plan):
        options = plan.settings.options
        members = plan.members or in_line(options.seed, options.num_seeds)
        self.plan = plan
        self.start_time = time.perf_counter()  # moved back by the time that earlier processes of the run took
        self.seeds, labels = [m.seed for m in members], [m.label for m in members]
        self.record_length = disk.record_length(options, plan.num_updates, plan.steps_per_update)
        self.tracker = MetricsTracker(
            labels,
            self.record_length,
            plan.steps_per_update,
            plan.agent.rollout_length,
            options.solved_threshold,
            compares_evaluations=not plan.env.spec.players,
        )
        self.checkpoints = CheckpointManager(plan, self.tracker)
        self.evaluator = Evaluator(plan.eval_env, plan.agent, self.seeds, options.max_eval_episodes or 1, plan.varied)
        self.logger: run_logger.RunLogger | run_logger.NoLogger | None = (
            None  # None until there is a state to train from
        )
        self.finished = 0  # updates
        self.times = dict.fromkeys(TIMES, 0.0)
        self.train_time_before = 0.0  # seconds, in earlier processes of the run
        self.program_memory = 0  # bytes; 0 until the program is compiled
        self.of_replay: dict[str, float] | None = None  # `summary.of_replay`, once the program has ended
        self.status, self.failure = "failed", ""
        self.has_curve = True  # draw one at the end
        self.summary: dict[str, Any] = {}
        self.failed_outputs: list[str] = []

    @property
    def env_steps(self) -> int:
        """Return the environment steps of each seed so far."""
        return self.finished * self.plan.steps_per_update

    @property
    def wall_time(self) -> float:
        """Return the seconds since the run started, in all of its processes."""
        return time.perf_counter() - self.start_time

    @property
    def is_done_and_saved(self) -> bool:
        """Return whether the run has reached its end and its last state is on the disk."""
        return self.status == "done" and self.checkpoints.saved_at(self.env_steps)

    def elapsed(self) -> dict[str, float]:
        """Return the seconds spent on each of TIMES."""
        compile_time = self.times["compile"] + self.evaluator.compile_time
        return self.times | {"compile": compile_time, "eval": self.times["eval"] + self.evaluator.time}

    def resume(self, host_state: Mapping[str, Any]) -> None:
        """Continue the counts and clocks of the run that saved this; the tracker has been restored."""
        self.finished = self.tracker.updates
        self.times = {name: self.times[name] + host_state["times"][name] for name in TIMES}
        self.start_time -= host_state["wall_time"]
        self.train_time_before = self.times["train"]

    def add(self, done: "ChunkResult", end_time: float) -> list[tuple[int, str, int, bool]]:
        """Add a chunk that ended at `end_time`. Return which members newly diverged: arguments of `Trainer.diverge`."""
        self.times["idle"] += done.idle
        self.times["train"] += done.duration
        self.finished += done.num_updates
        train_time = self.times["train"]
        fractions = np.arange(1, done.num_updates + 1) / done.num_updates
        clock = np.broadcast_to(train_time - done.duration * (1 - fractions), (len(self.seeds), done.num_updates))
        wall = clock + (end_time - self.start_time - train_time)
        had_none = not any(self.tracker.quarantined)
        failing = self.tracker.add_quarantined(done.rows)
        if had_none and any(self.tracker.quarantined):
            warnings.warn(f"an environment returned NaN or infinity by step {self.env_steps}; it is reset")
        found = self.tracker.add(done.rows | {"train_time_s": clock, "wall_time_s": wall})
        steps = self.plan.steps_per_update
        problems = [(wrong.member, f"{wrong.metric} is not finite", wrong.update * steps) for wrong in found]
        members = [int(i) for i in np.flatnonzero(~done.finite) if self.tracker.diverged[i] is None]
        problems += [(member, "a parameter is not finite", self.env_steps) for member in members]
        returns_are_finite = np.isfinite(done.rows["return_sum"]).all(1)
        unstable = [(i, "more than 1% of its steps are in quarantine", at * steps, False) for i, at in failing]
        return unstable + [(*problem, bool(returns_are_finite[problem[0]])) for problem in problems]

    def result(self) -> RunResult:
        """Return the outcome of the whole run for the summary."""
        return RunResult(
            status=self.status,
            failure=self.failure,
            updates=self.finished,
            seconds=self.elapsed() | {"wall": self.wall_time},
            program_memory=self.program_memory,
            num_saved=self.checkpoints.num_saved,
            last_saved=self.checkpoints.last.name if self.checkpoints.last else None,
            replay=self.of_replay,
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Write the summary when the context ends, even by an exception. Out of memory becomes a MemoryError."""
        try:
            yield
        except Exception as error:
            if self.failure:  # the message is complete
                raise
            if not is_out_of_memory(error):
                self.failure = why(error)
                raise
            known = f": {console.memory_needed(self.plan, self.program_memory)}" if self.program_memory else ""
            self.failure = f"out of memory{known}; fewer environments or seeds need less"
            raise MemoryError(self.failure) from error
        finally:
            self.close()

    def close(self) -> None:
        """Write the summary and the curve. A resume that failed before training does not change the folder."""
        if self.logger is None and self.plan.saved:
            return
        self.join_checkpoint()
        self.summary = summarize(self.plan, self.tracker, self.result())
        if not team.current().leads:
            return
        has_curve = self.has_curve and self.tracker.recorded > 0
        sinks = self.logger.closers() if self.logger else []
        self.failed_outputs = run_logger.write_end(self.plan.folder, sinks, self.summary, has_curve)

    def join_checkpoint(self) -> None:
        """Wait until the last checkpoint is written. Warn if that failed."""
        if problem := self.checkpoints.wait():
            warnings.warn(problem)

    def mark_running(self) -> None:
        """Change the status of a resumed run's summary to "running"."""
        if self.plan.settings.options.resume and team.current().leads:
            files.mark_running(self.plan.folder)
