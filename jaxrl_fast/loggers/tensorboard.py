"""Write records as TensorBoard events."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast.loggers.sinks import Record, tags
from jaxrl_fast.utils.throttle import Throttle

EVENT_S, FLUSH_S = 0.05, 10.0


class TensorBoard:
    """Writes event files, with the mean over seeds. All tags of a step are one event.

    An event costs a quarter of a millisecond, so records that come faster than EVENT_S are thinned out. Those with an
    evaluation and the last one are always written. A resumed run hides events beyond `env_steps`.
    """

    def __init__(self, folder: Path, env_steps: int | None = None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self.event, self.summary = Event, Summary
        # A writer without a thread: errors in a thread would get lost.
        self.writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        self.throttle, self.flush = Throttle(EVENT_S, first=True), Throttle(FLUSH_S)
        self.waiting: Sequence[Record] = ()
        if env_steps is not None:
            self._write(env_steps + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, records: Sequence[Record]) -> None:
        self.waiting = records
        if self.throttle.ready() or any(name.startswith("eval_") for name in records[0]):
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
        if self.flush.ready():
            self.writer.flush()
