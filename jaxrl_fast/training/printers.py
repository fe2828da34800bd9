"""Print the progress of a training and of an evaluation."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxrl_fast.loggers.terminal import Console
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.utils import formatting
from jaxrl_fast.utils.throttle import Throttle

if TYPE_CHECKING:
    from jaxrl_fast.metrics.records import Rows

MAX_UPDATES_PER_LINE = 100_000  # the most updates that one line summarizes
MIN_SHARE = 0.01  # the least time between permanent lines, as a share of the time so far: some 460 in the first hour
EVALUATION_S = 2.0  # seconds of an evaluation before its first line
EVALUATION_SHARE = 0.1  # the least time between two lines, as a share of its time so far


class ProgressPrinter:
    """The lines that are printed periodically while a run trains."""

    def __init__(self, plan: Plan, terminal: Console, num_updates: int = 0, train_time: float = 0.0):
        from jaxrl_fast.metrics import records

        self.plan, self.terminal = plan, terminal
        share = MIN_SHARE if terminal.lines_stay else 0.0
        self.throttle = Throttle(plan.settings.options.console_every, share=share)
        self.buffer = records.RecordBuffer(sys.maxsize, MAX_UPDATES_PER_LINE)  # updates since the last line
        self.printed = num_updates, train_time  # at the last line
        self.evaluation: float | None = None  # mean return of the last evaluation since the last line

    def set_eval(self, return_mean: float | None) -> None:
        """Show this evaluation in the next line."""
        self.evaluation = return_mean

    def update(self, rows: "Rows", num_updates: int, train_time: float, at_end: bool) -> None:
        """Add updates, and print a line if one is due or the run ends. `num_updates` is the number so far."""
        from jaxrl_fast.metrics import records

        self.buffer.add(rows)
        if not self.throttle.ready() and not at_end:
            return
        for merged in map(records.merge_seeds, self.buffer.take(everything=True)):
            record = records.summarize(merged)[0]
            steps, num_seeds = self.plan.steps_per_update, self.plan.settings.options.num_seeds
            speed = (num_updates - self.printed[0]) / max(train_time - self.printed[1], 1e-9)
            self.printed = num_updates, train_time
            record |= {"env_steps": num_updates * steps, "env_steps_per_s": speed * steps * num_seeds}
            record["eval_return_mean"], self.evaluation = self.evaluation, None
            self.terminal.progress(
                formatting.progress_line(record, self.terminal.width), num_updates / self.plan.num_updates
            )


class EvaluationPrinter:
    """The lines about an evaluation that takes long."""

    def __init__(self, write: Callable[[str], None], every: float):
        self.write, self.every, self.due = write, every, EVALUATION_S

    def __call__(self, num_ended: int | None, num_episodes: int, seconds: float) -> None:
        """Print a line if one is due, `seconds` after the begin. `num_ended` is None on the device, with one line."""
        if num_ended is None:
            self.write(f"evaluating ... {formatting.counted(num_episodes, 'episode')}")
            return
        if seconds < EVALUATION_S:
            self.due = EVALUATION_S
        if seconds >= self.due:
            self.due = seconds + max(self.every, EVALUATION_SHARE * seconds)
            self.write(f"evaluating ... {num_ended} of at most {formatting.counted(num_episodes, 'episode')}")
