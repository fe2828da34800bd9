"""Where records go: a file, TensorBoard, a tracking service, the terminal or a notebook.

A sink has `write(records)`, a record for each seed, and `close()`. A terminal has `say(line)`, `progress(line,
fraction)` and `close()`. What a sink needs is imported when it is made.
"""

import contextlib
import errno
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

Record = Mapping[str, Any]
EVENT_S, FLUSH_S = 0.05, 10.0
SPEED_S = 3600.0  # of which the time that is left is judged
SPARKS = "▁▂▃▄▅▆▇█"
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
    """What takes records."""

    def write(self, records: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


class Terminal(Protocol):
    """What takes lines."""

    lines_stay: bool  # what it has shown remains, line after line

    @property
    def width(self) -> int | None: ...  # characters of a line that there is room for; None: any number

    def say(self, line: str) -> None: ...

    def progress(self, line: str, fraction: float) -> None: ...

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


class Plain:
    """Lines for a pipe or a file: nothing wraps, nothing is redrawn."""

    lines_stay = True
    width = None

    def __init__(self, file: TextIO | None = None):
        self.file = file or sys.stdout
        self.heard = True

    def say(self, line: str) -> None:
        if not self.heard:
            return
        line = legible(line, self.file)
        try:
            print(line, file=self.file, flush=True)
        except BrokenPipeError:  # the reader left, as `head` does; training goes on
            self.heard = False
            if self.file is sys.stdout:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        except OSError:  # a full disk: there may be room for the next one
            pass

    def progress(self, line: str, fraction: float) -> None:
        self.say(line)

    def close(self) -> None:
        pass


def legible(line: str, file: TextIO) -> str:
    """With question marks where the file's encoding has no sign of ours."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return line.encode(encoding, "replace").decode(encoding)


class Rich:
    """Lines on a terminal, and below them how far it is. A terminal that is gone ends no training."""

    lines_stay = True

    def __init__(self, console: Any = None):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

        self.console = console or Console(highlight=False)
        columns = BarColumn(bar_width=None), TaskProgressColumn(), TimeRemainingColumn()
        looks: dict[str, Any] = {"transient": True, "expand": True, "refresh_per_second": 4}
        self.bar = Progress(*columns, console=self.console, speed_estimate_period=SPEED_S, **looks)
        self.task = self.bar.add_task("", total=1.0)

    @property
    def width(self) -> int:
        return self.console.width

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.console.print(line, markup=False, soft_wrap=True)

    def progress(self, line: str, fraction: float) -> None:
        with contextlib.suppress(OSError):
            if not self.bar.live.is_started:
                self.bar.start()
                self.console.show_cursor()  # whatever ends the process leaves the terminal as it was
            self.bar.update(self.task, completed=fraction)
            self.console.print(line, markup=False, no_wrap=True, overflow="ellipsis", crop=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.bar.stop()


class Notebook:
    """One display that is updated: what was said, a bar, and the last line."""

    lines_stay = False
    width = None

    def __init__(self):
        from IPython.display import display

        self.said: list[str] = []
        self.last, self.fraction = "", 0.0
        self.handle = display(self._content(), display_id=True)

    def say(self, line: str) -> None:
        self._keep_last()
        self.said.append(line)
        self.handle.update(self._content())

    def progress(self, line: str, fraction: float) -> None:
        self.last, self.fraction = line, fraction
        self.handle.update(self._content())

    def close(self) -> None:
        self._keep_last()
        self.handle.update(self._content())

    def _keep_last(self) -> None:
        self.said += [self.last] if self.last else []
        self.last = ""

    def _content(self) -> Any:
        from html import escape

        from IPython.display import HTML

        bar = f'<progress value="{self.fraction:.4f}" max="1" style="width:30em"></progress>'
        bar = f"{bar} {100 * self.fraction:.0f}%\n" if self.last else ""
        text = "\n".join(escape(line) for line in [*self.said, self.last] if line)
        return HTML(f'<pre style="line-height:1.4">{bar}{text}</pre>')


class Quiet:
    """Says nothing."""

    lines_stay = False
    width = None

    def say(self, line: str) -> None:
        pass

    def progress(self, line: str, fraction: float) -> None:
        pass

    def close(self) -> None:
        pass


def terminal(log_level: str) -> Terminal:
    """What suits the place where we run."""
    if log_level == "quiet":
        return Quiet()
    if in_notebook():
        return Notebook()
    return Rich() if sys.stdout.isatty() else Plain()


def in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


def tags(records: Sequence[Record]) -> dict[str, float]:
    """Tag and value, the mean over seeds; what has no value is left out."""
    found = {}
    for name in records[0]:
        values = [r[name] for r in records if r.get(name) is not None]
        if name not in SILENT and values and not name.startswith("agent."):
            found[CHARTS.get(name, f"losses/{name}")] = sum(values) / len(values)
    return found


def line(record: Record, width: int | None = None) -> str:
    """step  12k   return  24.4 (len 24, 410 eps)   greedy  31.2   value loss 0.3100   entropy 0.6400   96k steps/s

    Where that is too wide, losses are left out from behind, and then what was played.
    """
    score = "no episode ended since then"
    if record["return_mean"] is not None:
        played = f"(len {record['length_mean']:.0f}, {short(record['episodes'])} eps)"
        score = f"return {record['return_mean']:7.1f} {played}"
    losses = [name for name in record if name.endswith("loss") and name != "policy_loss"][:1]
    losses += [name for name in record if name == "entropy"]
    evaluation = record.get("eval_return_mean")
    parts = [f"step {short(record['env_steps']):>5}", f"{score:<34}"]
    parts += [f"greedy {evaluation:7.1f}"] if evaluation is not None else []
    parts += [f"{name.replace('_', ' ')} {_fixed(record[name])}" for name in losses]
    parts += [f"{short(record['env_steps_per_s'])} steps/s"]
    while width and len("   ".join(parts)) > width and len(parts) > 3:
        del parts[-2]
    if width and len("   ".join(parts)) > width:
        parts[1] = score.partition(" (")[0]
    return "   ".join(parts)


def short(number: float) -> str:
    """12345 as 12.3k, three digits at most."""
    for power, letter in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
        if abs(number) >= 0.9995 * 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def seconds(duration: float) -> str:
    """1.3 s, 74 s, 12 min, 3.2 h."""
    if duration < 99.5:
        return f"{duration:.2g} s" if duration < 9.95 else f"{duration:.0f} s"
    return f"{duration / 60:.0f} min" if duration < 5970 else f"{duration / 3600:.1f} h"


def counted(number: int, what: str) -> str:
    """1 program, 2 programs"""
    return f"{number} {what}{'s' * (number != 1)}"


def sparkline(values: Sequence[float | None], width: int = 16) -> str:
    """A curve in one word: the mean of each of `width` equal parts."""
    known = [v for v in values if v is not None]
    if not known:
        return ""
    width = min(width, len(known))
    cells = [known[i * len(known) // width : (i + 1) * len(known) // width] for i in range(width)]
    means = [sum(c) / len(c) for c in cells]
    low, spread = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(int((m - low) / spread * len(SPARKS)), len(SPARKS) - 1)] for m in means)


def _fixed(value: float | None) -> str:
    """Six characters."""
    if value is None:
        return "   n/a"
    return f"{value:6.0e}" if 0 < abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:6.4f}"[:6]


class Pace:
    """True at most once in so many seconds, or in that share of the time so far where it is more."""

    def __init__(self, every: float, first: bool = False, share: float = 0.0):
        self.every, self.share, self.began = every, share, time.perf_counter()
        self.last = -float("inf") if first else self.began

    def due(self) -> bool:
        if not self.over():
            return False
        self.last = time.perf_counter()
        return True

    def over(self) -> bool:
        """Whether it would be due; asking does not begin another interval."""
        now = time.perf_counter()
        return now - self.last >= max(self.every, self.share * (now - self.began))
