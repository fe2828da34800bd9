"""Where records go: files that others can read, lines that fit, and numbers about several seeds."""

import dataclasses
import importlib
import io
import json
import math
import sys
import time
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxrl_fast import config, curves, journal, population, report, scores, screen, sinks
from jaxrl_fast.placement import ALONE

RECORD = {
    "seed": 0,
    "env_steps": 12_288,
    "updates": 6,
    "wall_time_s": 1.5,
    "train_time_s": 0.5,
    "env_steps_per_s": 96_000.0,
    "episodes": 410,
    "return_mean": 24.375,
    "return_min": 8.0,
    "return_max": 77.0,
    "length_mean": 24.375,
    "value_loss": 31.5,
    "entropy": 0.69,
    "learning_rate": 1e-3,
}


def rows(**named):
    """Metrics of one seed's updates, of which only some matter."""
    number = len(next(iter(named.values())))
    empty = {"return_min": [np.inf] * number, "return_max": [-np.inf] * number}
    complete = {k: [0.0] * number for k in population.SCORES} | empty | named
    return {k: np.array([x], np.float32) for k, x in complete.items()}


def test_a_record_adds_up_by_hand():
    """Updates with 2, 0 and 1 episodes: returns 3 and 5, then 10. Mean 18 / 3 = 6, lengths 12 / 3 = 4."""
    given = rows(
        episodes=[2, 0, 1],
        return_sum=[8, 0, 10],
        return_min=[3, np.inf, 10],
        return_max=[5, -np.inf, 10],
        length_sum=[8, 0, 4],
        value_loss=[1, 2, 6],
    )
    (record,) = population.summarise(given)
    assert record == {
        "episodes": 3,
        "return_mean": 6.0,
        "return_min": 3.0,
        "return_max": 10.0,
        "length_mean": 4.0,
        "value_loss": 3.0,
    }


def test_what_is_not_known_is_none_and_not_zero():
    (record,) = population.summarise(rows(episodes=[0, 0], value_loss=[np.nan, 1]))
    assert record["episodes"] == 0
    for name in ("return_mean", "return_min", "return_max", "length_mean", "value_loss"):
        assert record[name] is None


def test_sums_over_many_updates_are_float64():
    """2^24 + 1 ones, which float32 cannot count to, as updates of 2^20 and a last one."""
    (record,) = population.summarise(rows(episodes=[2**20] * 16 + [1], return_sum=[2**20] * 16 + [1]))
    assert record["episodes"] == 2**24 + 1
    assert record["return_mean"] == 1.0


@pytest.mark.parametrize("chunks", [[7], [1] * 7, [3, 4], [2, 2, 3]])
def test_records_do_not_depend_on_the_chunks(chunks):
    ledger, taken, start = population.Ledger(3), [], 0
    for length in chunks:
        ledger.add({"x": np.arange(start, start + length)[None]})
        taken += [r["x"][0].tolist() for r in ledger.take()]
        start += length
    taken += [r["x"][0].tolist() for r in ledger.take(everything=True)]
    assert taken == [[0, 1, 2], [3, 4, 5], [6]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 40))
def test_a_ledger_with_a_limit_lets_whole_chunks_go_that_others_make_old(chunks, most):
    ledger, seen = population.Ledger(10**9, most), []
    for length in chunks:
        ledger.add({"x": np.arange(len(seen), len(seen) + length)[None]})
        seen += range(len(seen), len(seen) + length)
        held = sum(c["x"].shape[1] for c in ledger.chunks)
        assert min(most, len(seen)) <= held < most + 9
    (taken,) = ledger.take(everything=True)
    assert taken["x"][0].tolist() == seen[-held:]
    assert not list(ledger.take(everything=True))


def test_the_window_holds_the_last_hundred_episodes():
    """60 of return 1, 50 of 2, 70 of 3: 50 + 70 suffice, so (100 + 210) / 120."""
    window = population.Window()
    assert math.isnan(window.mean)
    window.add(60, 60.0, 8, 4)
    assert not window.full and window.mean == 1.0
    window.add(50, 100.0, 8, 4)
    assert window.full and window.mean == 160 / 110
    window.add(70, 210.0, 8, 4)
    assert window.mean == 310 / 120
    window.add(0, 0.0, 8, 4)
    assert window.mean == 310 / 120


history = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=60)


@given(history, st.integers(1, 4), st.integers(0, 60))
def test_the_window_is_the_end_of_a_run_and_no_longer_than_it_must(updates, num_steps, restored_at):
    window, before = population.Window(), []
    for i, (ended, longest) in enumerate(updates):
        if i == restored_at:
            window, old = population.Window(), window
            window.restore([*old.records, old.waiting])
        window.add(ended, 10.0 * ended, num_steps, longest)
        before.append((ended, longest))
        last = max((j + 1 for j, (ended, _) in enumerate(before) if ended), default=0)
        span = window.num_steps // num_steps
        inside = before[last - span : last]
        assert (window.episodes, window.longest) == (sum(n for n, _ in inside), max((n for _, n in inside), default=0))
        assert window.full == (window.episodes >= 100 and window.num_steps >= 2 * window.longest)
        assert not window.episodes or window.mean == pytest.approx(10)
        if span < last:  # something was let go, and not one update too many: what is left suffices by itself
            assert window.full or window.episodes >= 100
        if window.records:
            shorter = window.num_steps - window.records[0].num_steps, window.episodes - window.records[0].ended
            assert shorter[0] < 2 * window.longest or shorter[1] < 100


def test_a_game_without_an_end_does_not_keep_a_window_open_for_ever():
    """One environment stands still; the others' games last 10 steps."""
    window, most = population.Window(), population.MOST_STEPS
    for t in range(1, 3 * most // 100):
        window.add(40, 40.0 * t, 100, 100 * t)
    assert window.full and window.num_steps == 2 * most
    assert len(window.records) == 2 * most // 100


def test_windows_of_a_program_that_did_not_look_at_lengths_go_on():
    made = scores.Scores([{"seed": 0}], 1, 8, 8, None)
    host_numbers, _ = made.saved()
    made.restore(host_numbers | {"windows": [[[60, 120.0], [50, 50.0]]]}, {"ledger/episodes": np.ones((1, 2))})
    assert made.finals() == [170 / 110] and made.windows[0].waiting == (0, 0.0, 0, 0)
    assert made.ledger.rows["longest_game"].tolist() == [[0.0, 0.0]]
    made.restore(host_numbers, {})
    assert made.windows[0].waiting == (0, 0.0, 0, 0)


def test_short_games_do_not_speak_for_all_where_many_begin_together():
    """512 walks: half reach the goal in 50 steps and earn 1, half run out of time after 500 and earn 0."""
    rng = np.random.default_rng(0)
    left, good = np.zeros(512, int), np.zeros(512, bool)
    window, first_full = population.Window(), None
    for t in range(3000):
        begins = left == 0
        good = np.where(begins, rng.random(512) < 0.5, good)
        left = np.where(begins, np.where(good, 50, 500), left)
        left -= 1
        over = left == 0
        longest = np.where(good, 50, 500) - left
        window.add(int(over.sum()), float((over & good).sum()), 1, int(longest.max()))
        if t == 60:
            assert window.mean == 1.0 and not window.full
        if window.full:
            first_full = first_full or t
            assert 0.35 < window.mean < 0.75, t
    assert first_full is not None and first_full < 1100


@pytest.mark.parametrize("record_length", [1, 2, 4])
def test_the_last_hundred_episodes_do_not_depend_on_the_records(record_length):
    """60 episodes in each of four updates, of returns 1 to 4: the last two updates hold a hundred."""
    made = scores.Scores([{"seed": 0}], record_length, 8, 8, None)
    given = rows(episodes=[60] * 4, return_sum=[60, 120, 180, 240], train_time_s=[1, 2, 3, 4], wall_time_s=[1, 2, 3, 4])
    made.add(given)
    assert len(list(made.records())) == 4 // record_length
    assert made.finals() == [3.5]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 11])
def test_the_inter_quartile_mean_is_scipys(number):
    scores = np.random.default_rng(0).normal(size=(number, 3))
    np.testing.assert_allclose(population.iqm(scores), stats.trim_mean(scores, 0.25, axis=0))
    np.testing.assert_allclose(population.iqm(scores, (0, 1)), stats.trim_mean(scores.ravel(), 0.25))


def test_the_bootstrap_is_stratified():
    """Within a task all seeds agree, so nothing varies, however far the tasks are apart."""
    scores = np.repeat([[0.0, 5.0, 100.0, 1000.0]], 6, axis=0)
    low, high = population.bootstrap(scores, 200)
    assert low == high == population.iqm(scores, (0, 1))


def test_the_bootstrap_is_scipys():
    scores = np.random.default_rng(1).normal(size=(12, 1))
    low, high = population.bootstrap(scores, 4000)
    theirs = stats.bootstrap(
        (scores[:, 0],), lambda x, axis: stats.trim_mean(x, 0.25, axis=axis), n_resamples=4000, method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    np.testing.assert_allclose([low, high], theirs, atol=0.06)


def test_json_lines_are_one_object_each_and_strict(tmp_path):
    sink = sinks.JsonLines(tmp_path / "metrics.jsonl")
    sink.write([RECORD, RECORD | {"seed": 1, "return_mean": None}])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # on disk before it is closed
    assert [json.loads(text)["seed"] for text in lines] == [0, 1]
    assert json.loads(lines[1])["return_mean"] is None
    with pytest.raises(ValueError, match="not JSON compliant"):
        sink.write([RECORD | {"return_mean": float("nan")}])
    sink.close()


def test_a_file_of_metrics_is_never_overwritten(tmp_path):
    sinks.JsonLines(tmp_path / "metrics.jsonl").close()
    with pytest.raises(FileExistsError):
        sinks.JsonLines(tmp_path / "metrics.jsonl")


def test_tags_are_cleanrls_and_means_over_seeds():
    found = sinks.tags([RECORD, RECORD | {"seed": 1, "return_mean": None, "entropy": 0.71}])
    assert found["charts/episodic_return"] == 24.375
    assert found["losses/entropy"] == pytest.approx(0.70)
    assert found["charts/SPS"] == 96_000
    assert found["losses/value_loss"] == 31.5
    assert not any("seed" in tag or "env_steps" in tag.removesuffix("env_steps_per_s") for tag in found)
    of_values = dict(episodes=1, loss=1.0, q_value=2.0, epsilon=0.1, clip_fraction=0.2)
    names = {"charts/episodes", "losses/td_loss", "losses/q_values", "charts/epsilon", "losses/clipfrac"}
    assert sinks.tags([of_values]).keys() == names


def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    sink = sinks.TensorBoard(tmp_path)
    sink.write([RECORD])
    sink.write([RECORD | {"env_steps": 2**33, "return_mean": None}])
    sink.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    data, events = path.read_bytes(), []
    while data:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    read = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    assert read[12_288, "charts/episodic_return"] == pytest.approx(24.375)
    assert read[2**33, "charts/SPS"] == 96_000
    assert (2**33, "charts/episodic_return") not in read


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_tracking_services_get_the_same_calls(service, monkeypatch):
    calls = []
    names = ("init", "log", "finish")
    fake = types.SimpleNamespace(**{n: lambda *a, _n=n, **k: calls.append((_n, a, k)) for n in names})
    monkeypatch.setitem(sys.modules, service, fake)
    assert importlib.import_module(service) is fake
    sink = sinks.Tracker(service, "project", "run", "1a2b", {"seed": 3})
    sink.write([RECORD])
    sink.close()
    assert [name for name, _, _ in calls] == ["init", "log", "finish"]
    who = {"wandb": {"name": "run", "id": "1a2b"}, "trackio": {"name": "run-1a2b"}}[service]
    assert calls[0][2] == {"project": "project", "config": {"seed": 3}, "resume": "allow"} | who
    assert calls[1][1][0]["charts/episodic_return"] == 24.375
    assert calls[1][2] == {"step": 12_288}


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_a_run_that_goes_on_is_the_same_run_there(service, monkeypatch, tmp_path):
    """Also one that began without the service, and one whose config.yaml is of a version that gave no identity."""
    inits = []
    monkeypatch.setitem(sys.modules, service, types.SimpleNamespace(init=lambda **given: inits.append(given)))
    space = lambda **given: types.SimpleNamespace(**given)

    def open_run(name, resume=""):
        line = f"ppo --{service} --no-tensorboard"
        settings = config.from_command_line(line.split())
        settings = settings._replace(options=dataclasses.replace(settings.options, resume=resume))
        (tmp_path / name).mkdir(exist_ok=True)
        spec = space(id="gymnax/CartPole-v1")
        place = {"folder": tmp_path / name, "placement": ALONE, "saved": None, "members": ()}
        plan = space(settings=settings, env=space(spec=spec), **place)
        report.write_config(plan)
        written = journal.Journal(plan)
        written.open(0)
        written.lines.close()
        return {k: inits[-1].get(k) for k in ("name", "id", "project", "resume")}

    first, again = open_run("a"), open_run("a", resume="a")
    assert first == again == open_run("a", resume="a") and first["resume"] == "allow"
    assert len({(who["name"], who["id"]) for who in (first, open_run("b"), open_run("c"))}) == 3
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("made: {num_shards: 1}")
    assert open_run("old", resume="old") == open_run("old", resume="old")


def test_a_line_says_what_matters():
    line = sinks.line(RECORD)
    for words in (
        "step 12.3k",
        "return    24.4 (len 24, 410 eps)",
        "value loss 31.500",
        "entropy 0.6900",
        "96k steps/s",
    ):
        assert words in line
    assert len(line) <= 100
    assert "greedy    30.5" in sinks.line(RECORD | {"eval_return_mean": 30.46})
    nothing = dict.fromkeys(("return_mean", "length_mean", "value_loss", "eval_return_mean"))
    assert "no episode ended since then   " in sinks.line(RECORD | nothing)
    assert "value loss    n/a" in sinks.line(RECORD | nothing)


def test_a_line_on_a_narrow_terminal_keeps_its_speed():
    """And then its return: losses go first, from behind, then what was played."""
    record = RECORD | {"eval_return_mean": 30.46}
    shown = [sinks.line(record, width) for width in (120, 100, 80, 60, 40)]
    assert all(line.startswith("step 12.3k   return    24.4") and line.endswith("96k steps/s") for line in shown)
    assert all(len(line) <= width for line, width in zip(shown, (120, 100, 80, 60)))
    nothing = sinks.line(record | dict.fromkeys(("return_mean", "length_mean")), 60)
    assert nothing.endswith("96k steps/s") and len(nothing) <= 60
    words = ("entropy", "value loss", "greedy", "410 eps")
    assert [[word in line for word in words] for line in shown] == [
        [True, True, True, True],
        [False, True, True, True],
        [False, False, True, True],
        [False, False, False, False],
        [False, False, False, False],
    ]


def test_a_pipe_gets_whole_lines_at_once(capsys):
    terminal = sinks.terminal("info")
    assert isinstance(terminal, sinks.Plain)
    terminal.say("x" * 300)
    terminal.progress("y" * 300, 0.5)
    assert capsys.readouterr().out == "x" * 300 + "\n" + "y" * 300 + "\n"


@pytest.mark.parametrize(
    ("encoding", "seen"), [("ascii", "a ? b ? c"), ("latin-1", "a · b ? c"), ("utf-8", "a · b ▇ c")]
)
def test_what_an_encoding_has_no_sign_for_is_a_question_mark(encoding, seen):
    written = io.BytesIO()
    terminal = sinks.Plain(io.TextIOWrapper(written, encoding=encoding))
    terminal.say("a · b ▇ c")
    terminal.progress("a · b ▇ c", 0.5)
    assert written.getvalue().decode(encoding).splitlines() == [seen, seen]


def test_quiet_is_quiet(capsys):
    terminal = sinks.terminal("quiet")
    terminal.say("x")
    terminal.progress("y", 0.5)
    assert capsys.readouterr().out == ""


def test_training_goes_on_when_the_reader_leaves():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    terminal = sinks.Plain(Gone())
    terminal.say("x")
    terminal.progress("y", 0.5)


def test_a_screen_gets_lines_and_a_bar(monkeypatch):
    rich_console = pytest.importorskip("rich.console")
    out = io.StringIO()
    terminal = sinks.Rich(rich_console.Console(file=out, force_terminal=True, width=60, highlight=False))
    terminal.say("header [not markup]")
    terminal.progress("a line " * 20, 0.5)
    terminal.close()
    assert "header [not markup]" in out.getvalue()
    assert "…" in out.getvalue() and "50%" in out.getvalue()


def test_a_notebook_has_one_display_that_is_updated(monkeypatch):
    class Handle:
        def update(self, content):
            shown.append(content.data)

    shown = []
    display = types.SimpleNamespace(
        display=lambda content, display_id: Handle(), HTML=lambda data: types.SimpleNamespace(data=data)
    )
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    terminal = sinks.Notebook()
    terminal.say("<header>")
    terminal.progress("line 1", 0.25)
    terminal.progress("line 2", 0.5)
    assert "&lt;header&gt;" in shown[-1] and "line 2" in shown[-1] and "line 1" not in shown[-1] and "50%" in shown[-1]
    terminal.say("done")
    terminal.close()
    assert "progress" not in shown[-1] and shown[-1].index("line 2") < shown[-1].index("done")


def test_lines_of_a_long_run_thin_out_where_they_stay(monkeypatch):
    """A second apart, and after 100 s by 1% of the time so far, or by what lies between two looks more."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    plan = types.SimpleNamespace(settings=types.SimpleNamespace(options=types.SimpleNamespace(report_every=1.0)))
    shown = {}
    for terminal in (sinks.Plain(), sinks.Quiet()):
        pace = screen.Screen(plan, terminal).pace
        times = [now[0] - pace.began for now[0] in np.arange(now[0], now[0] + 1000, 0.125) if pace.due()]
        shown[terminal.lines_stay] = np.array(times)
    assert np.array_equal(shown[False], np.arange(1.0, 1000))
    stay, apart = shown[True], np.diff(shown[True])
    assert np.array_equal(stay[:100], np.arange(1.0, 101))
    assert (apart[100:] >= 0.01 * stay[101:]).all() and (apart[100:] <= 0.01 * stay[101:] + 0.125).all()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (12_345, "12.3k"), (999_999, "1M"), (172_032, "172k"), (2.5e9, "2.5B")],
)
def test_short_numbers(number, text):
    assert sinks.short(number) == text


@pytest.mark.parametrize(
    ("duration", "text"), [(0.0312, "0.031 s"), (1.34, "1.3 s"), (74.2, "74 s"), (720, "12 min"), (11_520, "3.2 h")]
)
def test_durations(duration, text):
    assert sinks.seconds(duration) == text


def test_sparkline():
    assert sinks.sparkline([None, 0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sinks.sparkline([3, 3]) == "▁▁"
    assert sinks.sparkline([None]) == ""
    assert len(sinks.sparkline(list(range(1000)))) == 16


def test_thinning_keeps_the_mean_of_all_episodes():
    """300 records to 150: pairs of returns 1 and 4 with 3 and 1 episodes average 7 / 4; a pair without any is NaN."""
    steps = np.arange(1, 301)
    returns, episodes = np.tile([1.0, 4.0], (2, 150)), np.tile([3, 1], (2, 150))
    episodes[:, :2] = 0
    at, means, counts = curves.thin(steps, returns, episodes)
    assert at[0] == 2 and at[-1] == 300 and at.size == 150
    assert np.isnan(means[:, 0]).all() and (means[:, 1:] == 7 / 4).all()
    assert (counts[:, 1:] == 4).all()


@pytest.mark.parametrize("num_seeds", [1, 5])
def test_a_figure_has_labels_units_and_its_curves(num_seeds):
    steps = np.arange(10) * 1000
    returns = np.random.default_rng(0).normal(size=(num_seeds, 10))
    band = (returns.min(0), returns.max(0)) if num_seeds > 1 else None
    curve = curves.Curve("", steps, returns, returns.mean(0), band)
    evals = [{"env_steps": 5000, "eval_return_mean": 1.0, "eval_return_std": 0.5}]
    (axes,) = curves.figure("PPO on CartPole", curve, evals, 475.0).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert axes.get_xlabel() == "environment steps" and axes.get_ylabel() == "return of an episode"
    assert axes.get_title(loc="left") == "PPO on CartPole"
    assert any("solved at 475" in label for label in labels) and any("evaluation" in label for label in labels)
    assert any("95% interval" in label for label in labels) == (num_seeds > 1)
    centre = max(axes.get_lines(), key=lambda line: line.get_linewidth())
    np.testing.assert_array_equal(centre.get_ydata(), returns.mean(0))


def test_what_is_no_number_is_left_out_of_the_picture():
    """An evaluation in which no episode ended has none, and a record's return may not be finite."""
    flat = np.zeros((1, 2))
    curve = curves.Curve("", np.array([1000, 2000]), flat, flat[0], None)
    unknown = {"env_steps": 1000, "eval_return_mean": None, "eval_return_std": None}
    known = {"env_steps": 2000, "eval_return_mean": 3.0, "eval_return_std": 0.5}
    (axes,) = curves.figure("", curve, [unknown, known], None).axes
    (bars,) = axes.containers
    assert bars.lines[0].get_xydata().tolist() == [[2000, 3]]
    (axes,) = curves.figure("", curve, [unknown], None).axes
    assert not axes.containers
    _, means, counts = curves.thin(np.arange(2), np.array([[np.nan, 6.0]]), np.array([[5, 1]]), most=1)
    assert means.item() == 6 and counts.item() == 1
