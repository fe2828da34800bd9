"""What of a run is written while it goes on: records to every sink, and the summary and the curve at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_fast.config import paths, settings
from jaxrl_fast.config.presets import read_meta
from jaxrl_fast.loggers import jsonl, sinks, tensorboard, trackers
from jaxrl_fast.plotting import run_curve
from jaxrl_fast.runs import files
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.errors import why


class RunLogger:
    """Writes down a run. A full disk ends none, nor does a service that does not answer."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.sinks: list[sinks.Sink] = []
        self.unwritten: list[str] = []  # of what a run leaves behind

    def open(self, size: int | None = None, env_steps: int | None = None) -> None:
        """Makes every sink: anew, or to go on from `env_steps` behind the first `size` bytes of metrics.jsonl.

        A service finds its run again by the identity that config.yaml has.
        """
        self.lines = jsonl.JsonLines(self.plan.folder / paths.METRICS, size)
        opened: list[sinks.Sink] = [self.lines]
        options, folder = self.plan.settings.options, self.plan.folder
        if options.tensorboard:
            opened.append(tensorboard.TensorBoard(folder, env_steps))
        for service in ("wandb", "trackio"):
            if getattr(options, service):
                who = options.project, folder.name, read_meta(folder / paths.CONFIG)["id"]
                try:
                    opened.append(trackers.Tracker(service, *who, settings.to_mapping(self.plan.settings)))
                except Exception as error:  # whatever it raises where nobody is logged in, or nothing answers
                    warnings.warn(f"--{service}: {why(error)}; training goes on without it")
        self.sinks = opened

    def write(self, records: Sequence[sinks.Record]) -> None:
        """A record of each seed."""
        for sink in list(self.sinks):
            try:
                sink.write(records)
            except Exception as error:  # also what a logging service raises
                self._give_up(sink, error)

    def sync(self) -> int | None:
        """The bytes of metrics.jsonl, once they are on the disk; None where some found no room."""
        try:
            return self.lines.sync()
        except OSError as error:  # a run cannot go on from lines that are not there
            self._give_up(self.lines, error)
            return None

    def close(self, summary: Mapping[str, Any], has_curve: bool) -> None:
        """The last of the records, the summary and the curve. What cannot be written or drawn ends no run."""
        folder = self.plan.folder
        actions = [(self._name(sink), sink.close) for sink in self.sinks]
        actions.append((paths.SUMMARY, lambda: files.write_summary(folder, summary)))
        if has_curve:
            actions.append((paths.CURVE, lambda: run_curve.save_figure(folder)))
        for name, action in actions:
            try:
                action()
            except Exception as error:  # also what a logging service or matplotlib raises
                warnings.warn(f"the end of {name} could not be written ({why(error)})")
                self.unwritten += [name] if name in (paths.METRICS, paths.SUMMARY) else []

    def _give_up(self, sink: sinks.Sink, error: Exception) -> None:
        """Records for metrics.jsonl wait for room; what else cannot be written is left."""
        if sink is not self.lines:
            self.sinks.remove(sink)
        elif not isinstance(error, OSError):
            raise error
        elif self.lines.num_failures > 1:  # it has been said
            return
        warnings.warn(f"{self._name(sink)} cannot be written ({why(error)}); training goes on")

    def _name(self, sink: sinks.Sink) -> str:
        return paths.METRICS if sink is self.lines else type(sink).__name__
