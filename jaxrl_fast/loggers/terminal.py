"""Print lines to a terminal, a pipe or a notebook."""

import contextlib
import os
import sys
from typing import Any, Protocol, TextIO

SPEED_WINDOW_S = 3600.0  # whose speed estimates the time that is left


class Console(Protocol):
    """The interface of a console."""

    lines_stay: bool  # progress lines remain, one after another

    @property
    def width(self) -> int | None: ...  # characters that fit into a line; None: any number

    def print(self, line: str) -> None: ...

    def progress(self, line: str, fraction: float) -> None: ...

    def close(self) -> None: ...


class PlainConsole:
    """Prints lines to a pipe or a file: nothing wraps, nothing is redrawn."""

    lines_stay = True
    width = None

    def __init__(self, file: TextIO | None = None):
        self.file = file or sys.stdout
        self.reader_alive = True

    def print(self, line: str) -> None:
        if not self.reader_alive:
            return
        line = printable(line, self.file)
        try:
            print(line, file=self.file, flush=True)
        except BrokenPipeError:  # the reader left, as `head` does; training continues
            self.reader_alive = False
            stdout = sys.__stdout__
            if stdout is not None and self.file is stdout:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        except OSError:  # a full disk: there may be space for the next line
            pass
        except ValueError:  # closed by the application
            self.reader_alive = False

    def progress(self, line: str, fraction: float) -> None:
        self.print(line)

    def close(self) -> None:
        pass


def printable(line: str, file: TextIO) -> str:
    """Replace characters that are missing from the file's encoding by question marks."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return line.encode(encoding, "replace").decode(encoding)


class RichConsole:
    """Prints lines on a terminal, with a progress bar below. A terminal that is gone does not stop the training."""

    lines_stay = True

    def __init__(self, console: Any = None):
        import rich.console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

        self.console = console or rich.console.Console(highlight=False)
        columns = BarColumn(bar_width=None), TaskProgressColumn(), TimeRemainingColumn()
        looks: dict[str, Any] = {"transient": True, "expand": True, "refresh_per_second": 4}
        self.bar = Progress(*columns, console=self.console, speed_estimate_period=SPEED_WINDOW_S, **looks)
        self.task = self.bar.add_task("", total=1.0)

    @property
    def width(self) -> int:
        return self.console.width

    def print(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.console.print(line, markup=False, soft_wrap=True)

    def progress(self, line: str, fraction: float) -> None:
        with contextlib.suppress(OSError):
            if not self.bar.live.is_started:
                self.bar.start()
                self.console.show_cursor()  # restore the terminal at any end of the process
            self.bar.update(self.task, completed=fraction)
            self.console.print(line, markup=False, no_wrap=True, overflow="ellipsis", crop=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.bar.stop()


class NotebookConsole:
    """Updates one display: the printed lines, a bar, and the last progress line."""

    lines_stay = False
    width = None

    def __init__(self):
        from IPython.display import display

        self.lines: list[str] = []
        self.last, self.fraction = "", 0.0
        self.handle = display(self._content(), display_id=True)

    def print(self, line: str) -> None:
        self._keep_last()
        self.lines.append(line)
        self.handle.update(self._content())

    def progress(self, line: str, fraction: float) -> None:
        self.last, self.fraction = line, fraction
        self.handle.update(self._content())

    def close(self) -> None:
        self._keep_last()
        self.handle.update(self._content())

    def _keep_last(self) -> None:
        self.lines += [self.last] if self.last else []
        self.last = ""

    def _content(self) -> Any:
        from html import escape

        from IPython.display import HTML

        bar = f'<progress value="{self.fraction:.4f}" max="1" style="width:30em"></progress>'
        bar = f"{bar} {100 * self.fraction:.0f}%\n" if self.last else ""
        text = "\n".join(escape(line) for line in [*self.lines, self.last] if line)
        return HTML(f'<pre style="line-height:1.4">{bar}{text}</pre>')


class QuietConsole:
    """Prints nothing."""

    lines_stay = False
    width = None

    def print(self, line: str) -> None:
        pass

    def progress(self, line: str, fraction: float) -> None:
        pass

    def close(self) -> None:
        pass


def make_console(log_level: str) -> Console:
    """Return the console for where this process runs."""
    if log_level == "quiet":
        return QuietConsole()
    if in_notebook():
        return NotebookConsole()
    if sys.stdout is None or getattr(sys.stdout, "closed", False):  # as under pythonw, or in an application
        return QuietConsole()
    is_terminal = getattr(sys.stdout, "isatty", lambda: False)()  # a replacement may have `write` and `flush` only
    return RichConsole() if is_terminal else PlainConsole()


def in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})
