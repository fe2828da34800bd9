"""Where records go: a file, TensorBoard, a tracking service. What a sink needs is imported when it is made."""

import errno
import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrl_fast.pace import Pace

Record = Mapping[str, Any]
EVENT_S, FLUSH_S = 0.05, 10.0
# Tags as in CleanRL, so that curves of both lie over each other (but for td_loss, which is without the half there).
CHARTS = {
    "return_mean": "charts/episodic_return",
    "return_min": "charts/episodic_return_min",
    "return_max": "charts/episodic_return_max",
    "length_mean": "charts/episodic_length",
    "env_steps_per_s": "charts/SPS",
    "learning_rate": "charts/learning_rate",
    "epsilon": "charts/epsilon",
    "loss": "losses/td_loss",
    "q_value": "losses/q_values",
    "clip_fraction": "losses/clipfrac",
    "episodes": "charts/episodes",
    "gradient_steps": "charts/gradient_steps",
    "replay_size": "charts/replay_size",
    "eval_return_mean": "eval/episodic_return",
    "eval_return_std": "eval/episodic_return_std",
    "eval_return_min": "eval/episodic_return_min",
    "eval_return_max": "eval/episodic_return_max",
    "eval_episodes": "eval/episodes",
    "eval_unfinished": "eval/unfinished",
    "eval_length_mean": "eval/episodic_length",
}
SILENT = ("env_steps", "valid_steps", "wall_time_s", "train_time_s", "updates", "seed")


class Sink(Protocol):
    """What takes records, one of each seed."""

    def write(self, records: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, on disk as soon as it is written, and never half of one.

    A new file, unless it is to go on behind the first `size` bytes of what is there. Lines that find no room wait for
    the next time.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.file = path.open("xb" if size is None or not path.exists() else "r+b", buffering=0)
        assert not size or path.stat().st_size >= size, "bytes that were never written"
        self.size = self.file.truncate(size or 0)
        self.waiting = b""
        self.num_failures = 0  # since something was written

    def write(self, records: Sequence[Record]) -> None:
        lines = "".join(json.dumps(r, allow_nan=False) + "\n" for r in records)
        self.waiting += lines.encode()
        self._write_waiting()

    def sync(self) -> int:
        """Onto the disk; the bytes that are there."""
        self._write_waiting()
        os.fsync(self.file.fileno())
        return self.size

    def close(self) -> None:
        with self.file:
            self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            self.file.seek(self.size)
            written = self.file.write(self.waiting)
            if written < len(self.waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.num_failures += 1
            self.file.truncate(self.size)
            raise
        self.size, self.waiting, self.num_failures = self.size + written, b"", 0


class TensorBoard:
    """Event files; where there are several seeds, their mean. All tags of a step are one event.

    An event costs a quarter of a millisecond, so of records that come faster than EVENT_S only some are written;
    those with an evaluation and the last one always are. A run that goes on hides what lies beyond `env_steps`.
    """

    def __init__(self, folder: Path, env_steps: int | None = None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self.event, self.summary = Event, Summary
        # A writer without a thread of its own, whose errors nobody would see.
        self.writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        self.pace, self.flush = Pace(EVENT_S, first=True), Pace(FLUSH_S)
        self.waiting: Sequence[Record] = ()
        if env_steps is not None:
            self._write(env_steps + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, records: Sequence[Record]) -> None:
        self.waiting = records
        if self.pace.due() or any(name.startswith("eval_") for name in records[0]):
            self._write_waiting()

    def close(self) -> None:
        try:
            self._write_waiting()
        finally:
            self.writer.close()

    def _write_waiting(self) -> None:
        records, self.waiting = self.waiting, ()
        if not records:
            return
        values = [self.summary.Value(tag=tag, simple_value=x) for tag, x in tags(records).items()]
        self._write(records[0]["env_steps"], summary=self.summary(value=values))

    def _write(self, step: int, **what: Any) -> None:
        self.writer.write_event(self.event(wall_time=time.time(), step=step, **what))
        if self.flush.due():
            self.writer.flush()


class Tracker:
    """Weights & Biases or trackio, which share their calls. A run that goes on is found again there by its `identity`.

    trackio finds a run by its name alone, so the name there has the identity in it.
    """

    def __init__(self, service: str, project: str, name: str, identity: str, config: Mapping[str, Any]):
        self.service = importlib.import_module(service)
        who = {"name": name, "id": identity} if service == "wandb" else {"name": f"{name}-{identity}"}
        self.service.init(project=project, config=dict(config), resume="allow", **who)

    def write(self, records: Sequence[Record]) -> None:
        self.service.log(tags(records), step=records[0]["env_steps"])

    def close(self) -> None:
        self.service.finish()


def tags(records: Sequence[Record]) -> dict[str, float]:
    """Tag and value, the mean over seeds; what has no value is left out."""
    found = {}
    for name in records[0]:
        values = [r[name] for r in records if r.get(name) is not None]
        if name not in SILENT and values and not name.startswith("agent."):
            found[CHARTS.get(name, f"losses/{name}")] = sum(values) / len(values)
    return found
