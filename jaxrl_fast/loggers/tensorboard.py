"""Write records as TensorBoard events."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast.loggers.sinks import Record, tags
from jaxrl_fast.utils.throttle import Throttle

EVENT_S, FLUSH_S = 0.05, 10.0  # minimum seconds between events, and between flushes


class TensorBoard:
    """A writer of TensorBoard events: one event per step with all tags, averaged over seeds.

    An event takes 0.25 ms, so records are written at most every EVENT_S seconds. Records with an evaluation and the
    last record are always written.

    Args:
        folder: The run's folder.
        env_steps: The step from which a run is resumed: TensorBoard then hides later events. None for a new run.
    """

    def __init__(self, folder: Path, env_steps: int | None = None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self.event, self.summary = Event, Summary
        # A writer without a thread, so that its errors are raised here.
        self.writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        self.throttle, self.flush = Throttle(EVENT_S, first=True), Throttle(FLUSH_S)
        self.waiting: Sequence[Record] = ()
        if env_steps is not None:
            self._write(env_steps + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, records: Sequence[Record]) -> None:
        """Write the records, unless an event was written less than EVENT_S seconds ago."""
        self.waiting = records
        if self.throttle.ready() or any(name.startswith("eval_") for name in records[0]):
            self._write_waiting()

    def close(self) -> None:
        """Write the last records and close the file."""
        try:
            self._write_waiting()
        finally:
            self.writer.close()

    def _write_waiting(self) -> None:
        """Write the newest records if they have not been written."""
        records, self.waiting = self.waiting, ()
        if not records:
            return
        values = [self.summary.Value(tag=tag, simple_value=x) for tag, x in tags(records).items()]
        self._write(records[0]["env_steps"], summary=self.summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        """Write one event and flush the file if it is time."""
        self.writer.write_event(self.event(wall_time=time.time(), step=step, **content))
        if self.flush.ready():
            self.writer.flush()
