"""Write a run's records to every sink while it trains, and its summary and curve at the end."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast.config import paths, settings
from jaxrl_fast.config.presets import read_meta
from jaxrl_fast.loggers import jsonl, sinks, tensorboard, trackers
from jaxrl_fast.plotting import run_curve
from jaxrl_fast.runs import files
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.files import replace


class RunLogger:
    """The sinks of a run's records. Neither a full disk nor a service that does not respond ends the run."""

    def __init__(self, plan: Plan, size: int | None = None, env_steps: int | None = None):
        """Open every sink: new, or to append after the first `size` bytes of metrics.jsonl, at `env_steps`.

        A logging service identifies a resumed run by the id in config.yaml.
        """
        self.plan, options, folder = plan, plan.settings.options, plan.folder
        self.config = (folder / paths.CONFIG).read_text(encoding="utf-8")
        self.lines = jsonl.JsonLines(folder / paths.METRICS, size)
        self.sinks: list[sinks.Sink] = [self.lines]
        for service in dict.fromkeys(options.loggers):
            if service == "tensorboard":
                self.sinks.append(tensorboard.TensorBoard(folder, env_steps))
                continue
            who = options.project, folder.name, read_meta(folder / paths.CONFIG)["id"]
            try:
                self.sinks.append(trackers.Tracker(service, *who, settings.to_mapping(plan.settings)))
            except Exception as error:  # any error: the user is not logged in, the service does not respond
                warnings.warn(f"{service}: {why(error)}; training continues without it")

    def write(self, records: Sequence[sinks.Record]) -> None:
        """Write a record of each seed."""
        for sink in list(self.sinks):
            try:
                sink.write(records)
            except Exception as error:  # a logging service may raise any error
                self._give_up(sink, error)

    def sync(self) -> int | None:
        """Return the size of metrics.jsonl once all lines are on the disk; None if there was no space for some.

        If the folder or one of these files has been deleted or moved, they are written again, with a warning.

        Raises:
            FileNotFoundError: If files of a replay went with the folder, without which the run cannot be resumed.
        """
        for lost in self._lost_replays():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(lost))
        try:
            self.restore()
            return self.lines.sync()
        except OSError as error:  # a run cannot be resumed from lines that are missing
            self._give_up(self.lines, error)
            return None

    def restore(self) -> None:
        """Write the files again that a resumed run needs, but for checkpoints, if they are missing."""
        folder, path = self.plan.folder, self.plan.folder / paths.CONFIG
        is_gone, lost = not folder.is_dir(), []
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            replace(path, self.config)
            lost.append(path)
        if self.lines.restore():
            lost.append(self.lines.path)
        if is_gone:
            self._move(folder)
            what = "the folder was deleted or moved; it is written again, without older checkpoints"
            lines = [f"{self.plan.shown(folder)}: {what}"]
        else:
            lines = [f"{self.plan.shown(file)}: was deleted or moved; written again" for file in lost]
        for line in lines:
            warnings.warn(line)

    def _lost_replays(self) -> list[Path]:
        """Return the folders of a replay's files that are missing."""
        folders = [self.plan.folder / resource.name for resource in self.plan.agent.learning.resources]
        return [folder for folder in folders if not folder.is_dir()]

    def _move(self, folder: Path) -> None:
        """Lock the folder, which is new, and log to it."""
        if self.plan.lock:
            self.plan.lock.acquire(folder)
        for i, sink in enumerate(self.sinks):
            if isinstance(sink, tensorboard.TensorBoard):
                sink.close()
                self.sinks[i] = tensorboard.TensorBoard(folder)

    def closers(self) -> list[tuple[str, Callable[[], None]]]:
        """Return the name of each sink, and the function that closes it."""
        first = [] if self._lost_replays() else [(paths.CONFIG, self.restore)]
        return first + [(self._name(sink), lambda i=i: self.sinks[i].close()) for i, sink in enumerate(self.sinks)]

    def _give_up(self, sink: sinks.Sink, error: Exception) -> None:
        """Close a sink that cannot write. Records for metrics.jsonl are kept until there is space again."""
        if sink is not self.lines:
            self.sinks.remove(sink)
        elif not isinstance(error, OSError):
            raise error
        elif self.lines.num_failures > 1:  # the user has been warned
            return
        warnings.warn(f"{self._name(sink)} cannot be written ({why(error)}); training continues")

    def _name(self, sink: sinks.Sink) -> str:
        return paths.METRICS if sink is self.lines else type(sink).__name__


class NoLogger:
    """The records of a process that does not write them, since process 0 does."""

    def write(self, records: Sequence[sinks.Record]) -> None:
        """Do nothing."""

    def sync(self) -> int | None:
        """Return None: process 0 knows the size of metrics.jsonl."""
        return None

    def closers(self) -> list[tuple[str, Callable[[], None]]]:
        """Return nothing to close."""
        return []


def write_end(
    folder: Path, closers: Sequence[tuple[str, Callable[[], None]]], summary: Mapping[str, Any], has_curve: bool
) -> list[str]:
    """Close the sinks, write the summary and draw the curve. Return the data files that could not be written.

    The curve is drawn from the files. So without a summary, one warning is about both.
    """
    failed = []
    for name, action in [*closers, (paths.SUMMARY, lambda: files.write_summary(folder, summary))]:
        try:
            action()
        except Exception as error:  # a logging service may raise any error
            without = f" and {paths.CURVE}" * (has_curve and name == paths.SUMMARY)
            warnings.warn(f"the end of {name}{without} could not be written ({why(error)})")
            failed += [name] if name in (paths.METRICS, paths.SUMMARY) else []
    if has_curve and paths.SUMMARY not in failed:
        with warnings.warn_on_error(f"the end of {paths.CURVE} could not be written"):
            run_curve.save_figure(folder)
    return failed
