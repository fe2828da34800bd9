"""Call a user's functions while a run trains: after records, after evaluations and at the end."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_fast.envs.schedules import Schedule, check_choice
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.errors import why

if TYPE_CHECKING:
    from jaxrl_fast.training.progress import RunProgress

HOOKS = ("on_record", "on_evaluation", "on_end")


class RunState:
    """The progress of a run, for its callbacks, and a method to stop it."""

    def __init__(self, folder: Path, env_steps: int, total_steps: int, num_updates: int, seconds: float):
        self.folder = folder  # the run directory
        self.env_steps = env_steps  # of each seed, so far
        self.total_steps = total_steps  # of each seed, at the end
        self.num_updates = num_updates  # so far
        self.seconds = seconds  # since the run started, over all its processes
        self.stop_reason: str | None = None
        self.schedules: Mapping[str, Schedule] = {}  # of options of the environments
        self.env_options: dict[str, float] = {}  # values that replace them

    def set_env_option(self, name: str, value: float) -> None:
        """Replace the schedule of an option of the environments by a value, until the next call.

        If called in `on_record`, it takes effect with the next record; in `on_evaluation`, at once. Evaluations still
        use the last value of the schedule. The option is scheduled, or written as VALUE@callback in env_options.

        Raises:
            ValueError: If the option has no schedule, or cannot have this value.
        """
        self.env_options[name] = check_choice(self.schedules, name, value)

    def stop(self, reason: str = "") -> None:
        """Stop the run early. Like after its last update, the run is evaluated and saved, and can be resumed.

        If called in `on_record`, the run ends with the next record; in `on_evaluation`, at once.
        """
        self.stop_reason = reason


class Callback:
    """Base class of callbacks. Override the methods you need; any object with some of these methods works too.

    The methods run on the host between chunks of updates, never inside a trace. They get copies, so they change the
    run's results only by the methods of `state`.
    """

    def on_record(self, records: list[dict[str, Any]], state: RunState) -> None:
        """Handle a record: a dictionary for each seed, with the keys of metrics.jsonl."""

    def on_evaluation(self, evaluation: dict[str, Any], state: RunState) -> None:
        """Handle an evaluation: statistics over all seeds, as in `evaluations` of summary.json."""

    def on_end(self, summary: dict[str, Any]) -> None:
        """Handle the end of a run (done, stopped or diverged): the contents of summary.json."""


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise ValueError unless each is an object with at least one hook, spelled as in `Callback`."""
    known = ", ".join(HOOKS)
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Sequence):
        raise ValueError(f"callbacks: must be a list, got {type(callbacks).__name__}; pass callbacks=[...]")
    for callback in callbacks:
        name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
        if isinstance(callback, type):
            raise ValueError(f"callbacks: must be instances, got the class {name}; pass {name}(...)")
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise ValueError(f"callbacks: must have a hook, got {name}; define one of {known}")
        unknown = [x for x in dir(callback) if x.startswith("on_") and x not in HOOKS]
        if isinstance(callback, Callback) and unknown:
            raise ValueError(f"callbacks: unknown hook, got {name}.{unknown[0]}; the hooks are {known}")


class CallbackRunner:
    """Calls a run's callbacks, until the first error."""

    def __init__(self, callbacks: Sequence[Any]):
        self.callbacks = callbacks
        self.error: Exception | None = None
        self.problem = ""  # the error in a sentence

    def call(self, hook: str, what: Any, progress: "RunProgress") -> tuple[str | None, dict[str, float]]:
        """Call a hook of every callback. Return why one of them stops the run, or None, and options that they set."""
        if not self.callbacks:
            return None, {}
        plan = progress.plan
        total_steps = plan.num_updates * plan.steps_per_update
        state = RunState(plan.folder, progress.env_steps, total_steps, progress.finished, progress.wall_time)
        state.schedules = progress.curriculum.schedules
        self._call(hook, what, state)
        return state.stop_reason, state.env_options

    def call_at_end(self, progress: "RunProgress") -> None:
        """Call `on_end` of every callback. Raise an exception of a callback."""
        self._call("on_end", progress.summary)
        self.raise_error(progress)

    def raise_error(self, progress: "RunProgress") -> None:
        """Raise the exception of a callback, after printing its place and how to resume the run."""
        if self.error is None:
            return
        last, plan = progress.checkpoints.last, progress.plan
        saved = f"the run is saved in {plan.shown(last)}" if last else "the run has no checkpoint"
        again = f"resume it with jaxrl_fast.fit(resume={str(plan.shown(plan.folder))!r})"
        warnings.print_stderr(f"error: {self.problem}; {saved}; {again}")
        progress.failure, progress.status = progress.failure or self.problem, "failed"
        raise self.error

    def _call(self, hook: str, what: Any, *others: Any) -> None:
        for callback in self.callbacks:
            function = getattr(callback, hook, None)
            if self.error is None and callable(function):
                try:
                    function(copy.deepcopy(what), *others)
                except Exception as error:
                    self.error, self.problem = error, f"callback {type(callback).__name__}.{hook} raised {why(error)}"
