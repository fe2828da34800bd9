"""Test the console output of a run: lines that fit the width, and short numbers."""

import io
import sys
import time
import types

import numpy as np
import pytest

from jaxrl_fast.loggers.terminal import NotebookConsole, PlainConsole, QuietConsole, RichConsole, make_console
from jaxrl_fast.training import printers
from jaxrl_fast.utils import formatting, warnings
from tests.helpers import RECORD

pytestmark = pytest.mark.unit


def test_progress_line_has_step_return_losses_and_speed():
    line = formatting.progress_line(RECORD)
    for words in (
        "step 12.3k",
        "return    24.4 (len 24, 410 eps)",
        "value loss 31.500",
        "entropy 0.6900",
        "96k steps/s",
    ):
        assert words in line
    assert len(line) <= 100
    assert "greedy    30.5" in formatting.progress_line(RECORD | {"eval_return_mean": 30.46})
    assert "(len 24, 1 ep)" in formatting.progress_line(RECORD | {"episodes": 1})
    nothing = dict.fromkeys(("return_mean", "episode_length_mean", "value_loss", "eval_return_mean"))
    assert "   no episode ended   " in formatting.progress_line(RECORD | nothing)
    assert "value loss    n/a" in formatting.progress_line(RECORD | nothing)


def test_narrow_progress_line_keeps_step_return_and_speed():
    """Losses are dropped first, starting with the last one, and then evaluation and number of episodes."""
    record = RECORD | {"eval_return_mean": 30.46}
    shown = [formatting.progress_line(record, width) for width in (120, 100, 80, 60, 40)]
    assert all(line.startswith("step 12.3k   return    24.4") and line.endswith("96k steps/s") for line in shown)
    assert all(len(line) <= width for line, width in zip(shown, (120, 100, 80, 60)))
    nothing = formatting.progress_line(record | dict.fromkeys(("return_mean", "episode_length_mean")), 60)
    assert nothing.endswith("96k steps/s") and len(nothing) <= 60
    words = ("entropy", "value loss", "greedy", "410 eps")
    assert [[word in line for word in words] for line in shown] == [
        [True, True, True, True],
        [False, True, True, True],
        [False, False, True, True],
        [False, False, False, False],
        [False, False, False, False],
    ]


def test_plain_console_writes_untruncated_lines_to_pipe(capsys):
    terminal = make_console("info")
    assert isinstance(terminal, PlainConsole)
    terminal.print("x" * 300)
    terminal.progress("y" * 300, 0.5)
    assert capsys.readouterr().out == "x" * 300 + "\n" + "y" * 300 + "\n"


@pytest.mark.parametrize(
    ("encoding", "seen"), [("ascii", "a ? b ? c"), ("latin-1", "a · b ? c"), ("utf-8", "a · b ▇ c")]
)
def test_unencodable_character_is_printed_as_question_mark(encoding, seen):
    written = io.BytesIO()
    terminal = PlainConsole(io.TextIOWrapper(written, encoding=encoding))
    terminal.print("a · b ▇ c")
    terminal.progress("a · b ▇ c", 0.5)
    assert written.getvalue().decode(encoding).splitlines() == [seen, seen]


def test_quiet_console_prints_nothing(capsys):
    terminal = make_console("quiet")
    terminal.print("x")
    terminal.progress("y", 0.5)
    assert capsys.readouterr().out == ""


def test_plain_console_ignores_broken_pipe():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    terminal = PlainConsole(Gone())
    terminal.print("x")
    terminal.progress("y", 0.5)


class WritesOnly:
    """A replacement of standard output, as some applications have."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def closed():
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize("make", [lambda: None, closed, WritesOnly], ids=["none", "closed", "writes_only"])
def test_console_and_warnings_work_without_standard_output(make, monkeypatch):
    stream = make()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    terminal = make_console("info")
    terminal.print("a line")
    terminal.progress("step", 0.5)
    terminal.close()
    warnings.warn("a warning")
    if isinstance(stream, WritesOnly):
        assert stream.text == "a line\nstep\nwarning: a warning\n"


def test_plain_console_ignores_file_closed_during_training():
    file = io.StringIO()
    terminal = PlainConsole(file)
    terminal.print("a line")
    file.close()
    terminal.print("another")


def test_rich_console_shows_lines_and_progress_bar(monkeypatch):
    rich_console = pytest.importorskip("rich.console")
    out = io.StringIO()
    terminal = RichConsole(rich_console.Console(file=out, force_terminal=True, width=60, highlight=False))
    terminal.print("header [not markup]")
    terminal.progress("a line " * 20, 0.5)
    terminal.close()
    assert "header [not markup]" in out.getvalue()
    assert "…" in out.getvalue() and "50%" in out.getvalue()


def test_notebook_console_updates_one_display(monkeypatch):
    class Handle:
        def update(self, content):
            shown.append(content.data)

    shown = []
    display = types.SimpleNamespace(
        display=lambda content, display_id: Handle(), HTML=lambda data: types.SimpleNamespace(data=data)
    )
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    terminal = NotebookConsole()
    terminal.print("<header>")
    terminal.progress("line 1", 0.25)
    terminal.progress("line 2", 0.5)
    assert "&lt;header&gt;" in shown[-1] and "line 2" in shown[-1] and "line 1" not in shown[-1] and "50%" in shown[-1]
    terminal.print("done")
    terminal.close()
    assert "progress" not in shown[-1] and shown[-1].index("line 2") < shown[-1].index("done")


def test_progress_interval_grows_on_consoles_that_keep_lines(monkeypatch):
    """Lines are 1 s apart, and after 100 s by 1% of the elapsed time, plus at most the time between two checks."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    plan = types.SimpleNamespace(settings=types.SimpleNamespace(options=types.SimpleNamespace(console_every=1.0)))
    shown = {}
    for terminal in (PlainConsole(), QuietConsole()):
        throttle = printers.ProgressPrinter(plan, terminal).throttle
        times = [now[0] - throttle.start for now[0] in np.arange(now[0], now[0] + 1000, 0.125) if throttle.ready()]
        shown[terminal.lines_stay] = np.array(times)
    assert np.array_equal(shown[False], np.arange(1.0, 1000))
    stay, apart = shown[True], np.diff(shown[True])
    assert np.array_equal(stay[:100], np.arange(1.0, 101))
    assert (apart[100:] >= 0.01 * stay[101:]).all() and (apart[100:] <= 0.01 * stay[101:] + 0.125).all()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (12_345, "12.3k"), (999_999, "1M"), (172_032, "172k"), (2.5e9, "2.5B")],
)
def test_short_number_rounds_to_three_digits_with_suffix(number, text):
    assert formatting.short_number(number) == text


@pytest.mark.parametrize(
    ("duration", "text"), [(0.0312, "0.031 s"), (1.34, "1.3 s"), (74.2, "74 s"), (720, "12 min"), (11_520, "3.2 h")]
)
def test_seconds_formats_duration_with_unit(duration, text):
    assert formatting.seconds(duration) == text


@pytest.mark.parametrize(
    ("length", "num_envs", "text"),
    [
        (1, 1, "1 step in 1 environment"),
        (128, 1, "128 steps in 1 environment"),
        (1, 2, "1 step in each of 2 environments"),
    ],
)
def test_steps_of_rollout_has_the_right_plurals(length, num_envs, text):
    assert formatting.steps_of_rollout(length, num_envs) == text


def test_sparkline_scales_values_and_limits_width():
    assert formatting.sparkline([None, 0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert formatting.sparkline([3, 3]) == "▁▁"
    assert formatting.sparkline([None]) == ""
    assert len(formatting.sparkline(list(range(1000)))) == 16
