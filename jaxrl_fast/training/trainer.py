"""Train one run: carry out its schedule, and write its results."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_fast.loggers.terminal import Console, make_console
from jaxrl_fast.metrics import window
from jaxrl_fast.parallel import team
from jaxrl_fast.runs import files
from jaxrl_fast.training import console, eval_limits, printers, schedule
from jaxrl_fast.training.callbacks import CallbackRunner
from jaxrl_fast.training.kept import Kept
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.training.schedule import Kind
from jaxrl_fast.training.summary import write_config
from jaxrl_fast.utils import compile_cache, signals, warnings
from jaxrl_fast.utils.errors import blamed
from jaxrl_fast.utils.warnings import print_stderr

if TYPE_CHECKING:
    from jaxrl_fast.loop import TrainState
    from jaxrl_fast.parallel.program import Program
    from jaxrl_fast.training.dispatcher import ChunkResult
    from jaxrl_fast.training.progress import RunProgress


FIRST_EVAL_SEED = 2**32  # of evaluations in the environment of the training: no number of updates


class Outcome(NamedTuple):
    """The final state and status of a run."""

    folder: Path
    summary: dict[str, Any]
    agent_state: Any  # the state for `explore` and `exploit`, with a leading axis for several seeds
    signal: int | None  # the signal that stopped it
    failure: str  # why it could not continue, in a sentence
    late_signal: int | None = None  # a signal that arrived, perhaps too late to stop it
    failed_outputs: str = ""  # outputs missing on the disk, as text


def execute(
    plan: Plan,
    terminal: Console | None = None,
    callbacks: Sequence[Any] = (),
    until: int | None = None,
    kept: Kept | None = None,
) -> Outcome:
    """Compile, train, evaluate, save and log a run.

    `until` is the update at which it is stopped, to be resumed later; `kept` has what earlier parts have compiled.
    """
    from jaxrl_fast.envs.host.env import original_errors
    from jaxrl_fast.training import startup
    from jaxrl_fast.training.progress import RunProgress

    options = plan.settings.options
    with contextlib.ExitStack() as resources:
        resources.callback(plan.release)
        if terminal is None:
            level = options.log_level if team.current().leads else "quiet"
            terminal = resources.enter_context(contextlib.closing(make_console(level)))
        progress = RunProgress(plan)
        console.announce(plan, terminal)
        if not options.resume and team.current().leads:
            write_config(plan)
        with contextlib.ExitStack() as while_training:
            use_cache = options.compile_cache and plan.env.on_device and not plan.agent.learning.resources
            cache = while_training.enter_context(compile_cache.compile_cache(use_cache))
            while_training.enter_context(progress.recording())
            while_training.enter_context(startup.advised(plan))
            while_training.enter_context(original_errors())
            startup.open_envs(plan, terminal)
            while_training.enter_context(startup.opened_resources(progress, terminal))
            program = startup.compile_program(progress, terminal, cache, kept)
            trainer = Trainer(progress, program, startup.first_state(progress, program), terminal, callbacks)
            trainer.stop_at, progress.has_curve = until, until is None
            progress.mark_running()
            with signals.stop_signals(trainer.stop), trainer.saved_if_env_fails():
                trainer.train()
            trainer.conclude()
        console.print_summary(plan, terminal, progress.summary)
        if team.current().leads:
            trainer.callbacks.call_at_end(progress)
        return trainer.outcome()


class Trainer:
    """Carries out the schedule of a compiled run."""

    def __init__(
        self, progress: "RunProgress", program: "Program", state: "TrainState", terminal: Console, callbacks: Sequence
    ):
        from jaxrl_fast.training import dispatcher

        self.progress, self.plan, self.program, self.terminal = progress, progress.plan, program, terminal
        assert progress.logger is not None, "it is opened with the first state"
        self.options, self.logger = self.plan.settings.options, progress.logger
        self.tracker, self.checkpoints, self.team = progress.tracker, progress.checkpoints, team.current()
        self.callbacks, self.curriculum = CallbackRunner(callbacks), progress.curriculum
        progress.evaluator.report = printers.EvaluationPrinter(terminal.print, self.options.console_every)
        self.exact_host_resume = self.options.host.exact_resume and not self.plan.env.on_device
        self.cadence = schedule.Cadence(
            progress.record_length,
            eval_every=schedule.to_updates(self.options.eval_every, self.plan.steps_per_update),
            eval_at_end=self.options.max_eval_episodes > 0,
            save_every=schedule.to_updates(self.checkpoints.every_steps, self.plan.steps_per_update),
            cut_at_records=self.options.stop_when_solved or bool(callbacks),
            saves_at_stop=not self.exact_host_resume,
        )
        self.dispatcher = dispatcher.Dispatcher(program, state, len(progress.seeds), progress.finished)
        self.printer = printers.ProgressPrinter(self.plan, terminal, progress.finished, progress.times["train"])
        self.saved = progress.finished if self.plan.saved else None  # the update that was saved last, or tried to be
        self.team.listen(self.stop, self.hint)
        self.num_restarts = 0  # saves after which the host environments have been restarted
        self.signal: int | None = None
        self.late_signal: int | None = None  # the same, even if it arrived too late to stop anything
        self.stop_at: int | None = None  # the update at which the run is stopped, by a callback or by `until`
        self.warn_once = warnings.once(warnings.warn)  # of an environment without an end

    @property
    def finished(self) -> int:
        """Return the number of updates whose metrics have been read."""
        return self.progress.finished

    @property
    def env_steps(self) -> int:
        """Return the environment steps of each seed so far."""
        return self.progress.env_steps

    @property
    def planned_update(self) -> int:
        """Return the last update of the run; with `stop_when_solved`, one record after the last seed was solved."""
        settled = self.tracker.settled_at() if self.options.stop_when_solved else None
        if settled is None:
            return self.plan.num_updates
        return min(self._record_after(-(-settled // self.plan.steps_per_update)), self.plan.num_updates)

    @property
    def last_update(self) -> int:
        """Return the last update, unless a signal or a failure comes first."""
        return self.planned_update if self.stop_at is None else min(self.stop_at, self.planned_update)

    def _record_after(self, update: int) -> int:
        """Return the end of the record after this update's record. A chunk up to there may have begun."""
        length = self.progress.record_length
        return (-(-update // length) + 1) * length

    def stop(self, number: int) -> None:
        """Record the signal that ends the run, in process 0 if there are several."""
        if self.team.leads:
            self.signal = self.late_signal = number
        self.team.pass_signal(number)

    def hint(self) -> str:
        """Return how to continue if another process is lost."""
        last = self.checkpoints.last
        saved = f"the last checkpoint is {self.plan.shown(last)}" if last else "no checkpoint has been saved"
        return f"{saved}; start all processes again with --resume {self.plan.place or self.plan.folder}"

    def stopping(self) -> bool:
        """Return whether the run ends after the pending chunks."""
        return self.signal is not None or bool(self.progress.failure) or self.callbacks.error is not None

    def next_event(self) -> schedule.Event:
        """Return the next action of the schedule, which process 0 decides."""
        kind, limit, self.signal = self.team.decide(self._next_event)
        return schedule.Event(Kind(kind), limit)

    def _next_event(self) -> tuple[str, int, int | None]:
        """Return the next action, and the signal that ends the run, if any."""
        at, steps = self.tracker.evaluated_at, self.plan.steps_per_update
        now = schedule.Progress(
            finished=self.finished,
            submitted=self.dispatcher.num_submitted,
            num_pending=self.dispatcher.num_pending,
            last_update=self.last_update,
            evaluated=None if at is None else at // steps,
            saved=self.saved,
            stopping=self.stopping(),
            save_due=self.checkpoints.should_save(),
            change_at=self.curriculum.next_change,
        )
        event = schedule.next_event(self.cadence, now)
        return event.kind.value, event.limit, self.signal

    def train(self) -> None:
        """Carry out the schedule to its end."""
        while (event := self.next_event()).kind is not Kind.STOP:
            self.team.watch(event.kind in (Kind.SUBMIT, Kind.COLLECT))
            if event.kind is Kind.SUBMIT:
                self.submit(event.limit)
            elif event.kind is Kind.COLLECT:
                self.process_chunk(self.dispatcher.collect())
                self.record(hold_last=self.dispatcher.num_pending == 0)  # an evaluation may follow, and belongs to it
            elif event.kind is Kind.EVALUATE:
                self.evaluate()
            else:
                self.save()
        self.team.watch(False)
        if self.stopping():
            self.record(everything=True)
        self.progress.join_checkpoint()

    @contextlib.contextmanager
    def saved_if_env_fails(self) -> Iterator[None]:
        """Save the run as it was before the chunk in which a host environment raises an exception."""
        try:
            yield
        except Exception as error:
            if blamed(error) is None:
                self.team.settle()
            if (
                self.team.count > 1
                or self.plan.env.on_device
                or self.exact_host_resume
                or not self.dispatcher.discard_pending()
            ):
                raise
            self.record(everything=True)
            self.saved = None
            self.save(with_envs=False)  # host environments have advanced beyond the state
            self.progress.join_checkpoint()
            if self.checkpoints.saved_at(self.env_steps):
                saved = f"saved at step {self.env_steps}, before the environment failed"
                print_stderr(f"{saved}; resume: {files.resume_command(self.plan.folder, self.plan.place)}")
            raise

    def submit(self, limit: int) -> None:
        """Submit a chunk that ends at update `limit` at the latest."""
        if not self.dispatcher.num_pending:
            host = self.plan.env.host
            if host and self.exact_host_resume and self.checkpoints.num_begun > self.num_restarts:
                self.num_restarts = self.checkpoints.num_begun
                host.reseed(self.finished)
                self.curriculum.restart_envs(self.finished)
                self.dispatcher.state = self.program.restart(self.dispatcher.state)
            self.record()  # the last record has waited for an evaluation
            self.dispatcher.state = self.curriculum.apply(self.dispatcher.state, self.finished)
            self.dispatcher.mark_idle()
        self.dispatcher.submit(limit)

    def process_chunk(self, done: "ChunkResult") -> None:
        """Take over the metrics of a chunk, and look for numbers that are not finite."""
        for problem in self.progress.add(done, self.dispatcher.idle_since):
            self.diverge(*problem)
        train_time = self.progress.times["train"]
        self.printer.update(done.rows, self.finished, train_time, self.finished >= self.last_update)

    def diverge(self, member: int, problem: str, env_steps: int, returns_are_finite: bool = True) -> None:
        """Fail, or only warn with `on_nonfinite` "continue" while a finite seed is left.

        Returns that are not finite are the environment's fault: actions are always finite.
        """
        from jaxrl_fast.training import divergence

        where = divergence.describe(self.tracker.labels[member], problem, env_steps)
        self.tracker.diverged[member] = env_steps
        if self.options.on_nonfinite == "continue" and None in self.tracker.diverged:
            warnings.warn(f"{where}; the other seeds continue")
            return
        of_member = member if len(self.progress.seeds) > 1 else None
        env_is_cause = not (returns_are_finite and divergence.envs_are_finite(self.dispatcher.state, of_member))
        last = self.checkpoints.last and self.plan.shown(self.checkpoints.last)
        advice = divergence.advise(self.options, last, env_is_cause)
        self.progress.failure = self.progress.failure or f"{where}; {advice}"

    def record(self, **which: Any) -> None:
        """Write the complete records; the last one includes the evaluation."""
        for records in self.tracker.records(**which):
            options = self.curriculum.metrics(records[0]["env_steps"])
            records = [record | options for record in records]
            self.logger.write(records)
            self.notify("on_record", records, self._record_after(self.tracker.recorded))

    def save(self, score: float | None = None, with_envs: bool = True) -> None:
        """Copy the state to the host; a thread writes it while the next chunk runs. `score`: of the best evaluation."""
        start = perf_counter()
        self.progress.join_checkpoint()
        self.saved = self.finished
        if self.progress.failure:
            return
        size = self.team.decide(self.logger.sync)
        if size is None:
            return self.checkpoints.defer()
        times, wall_time = self.progress.elapsed(), self.progress.wall_time
        host_state = {"times": times, "wall_time": wall_time, "metrics_size": size} | self.curriculum.saved()
        wrong = self.checkpoints.save(self.dispatcher.state, self.env_steps, host_state, score, with_envs)
        self.progress.times["save"] += perf_counter() - start
        if wrong is not None:
            member, name = wrong
            self.diverge(member, f"{name} of its state is not finite", self.env_steps)
            self.save(score, with_envs)  # the seeds that are left

    def evaluate(self) -> None:
        """Run the greedy policy and add its returns to the record that ends here. Save it if it is the best so far.

        A signal may interrupt host environments; the resumed run then evaluates.
        """
        index = len(self.tracker.evaluations)
        if self.exact_host_resume and self.plan.eval_env.host:
            self.plan.eval_env.host.reseed(index)
        undo = self.checkpoints.mark_eval_envs()
        if self.plan.shares_env and self.plan.env.host:
            self.plan.env.host.reseed(FIRST_EVAL_SEED + index)
            self.curriculum.end()
        learner, limits = self.program.learner(self.dispatcher.state), self._eval_limits()
        found = self.team.decide(lambda: self._scores(learner, index, limits))
        if found is None:
            return undo()
        each_seed, total = found
        evaluation = {"env_steps": self.env_steps} | total
        self.tracker.evaluations.append(evaluation)
        self.printer.set_eval(total["eval_return_mean"])
        self.record(everything=True, evaluation=each_seed)
        self.notify("on_evaluation", evaluation, self.finished)  # before the save, which keeps the options it sets
        if self.tracker.best() is evaluation:
            self.save(total["eval_return_mean"])

    def _scores(
        self, learner: Any, index: int, limits: eval_limits.Limits | None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        """Return statistics of an evaluation, of each seed and of all; None if a signal has interrupted it."""
        from jaxrl_fast.training.evaluator import EvaluationInterrupted

        with contextlib.suppress(EvaluationInterrupted):
            diverged = self.tracker.diverged_members
            return self.progress.evaluator(learner, index, lambda: self.signal is not None, diverged, limits)
        return None

    def _eval_limits(self) -> eval_limits.Limits | None:
        """Return the limits of the next evaluation. Warn if no episode may end in it."""
        if self.plan.env.on_device:
            return None
        steps, longest = self.env_steps - (self.tracker.evaluated_at or 0), self.tracker.longest_episode
        limits = eval_limits.limits_of(self.options, steps, longest, window.MAX_STEPS)
        if limits and not longest:
            self.warn_once(eval_limits.endless(limits))
        return limits

    def notify(self, hook: str, what: Any, stop_at: int) -> None:
        """Call the callbacks. If one asks for it, the run ends or options change at update `stop_at`."""
        reason, options = self.team.decide(lambda: self.callbacks.call(hook, what, self.progress))
        self.curriculum.choose(options, stop_at)
        if reason is not None and stop_at < self.last_update:
            self.stop_at = stop_at
            where = f"stopping early at step {stop_at * self.plan.steps_per_update}"
            self.terminal.print(": ".join(filter(None, (where, reason))))

    def conclude(self) -> None:
        """Set the run's status. Raise an exception of a callback."""
        progress = self.progress
        evaluated = self.tracker.evaluated_at == self.env_steps or not self.cadence.eval_at_end
        if self.finished == self.last_update and evaluated:
            self.signal = None  # it arrived too late to stop anything
        stopped = self.signal is not None or self.finished < self.planned_update
        progress.status = "diverged" if progress.failure else "stopped" if stopped else "done"
        self.callbacks.raise_error(progress)

    def outcome(self) -> Outcome:
        """Return the final state and status of the run."""
        progress = self.progress
        may_be_unsaved = progress.failure or self.exact_host_resume and self.signal
        unsaved = not (self.checkpoints.saved_at(self.env_steps) or may_be_unsaved)
        failed_outputs = " and ".join(["its last checkpoint"] * unsaved + progress.failed_outputs)
        learner = self.program.learner(self.dispatcher.state)
        return Outcome(
            self.plan.folder, progress.summary, learner, self.signal, progress.failure, self.late_signal, failed_outputs
        )
