"""Test callbacks: their arguments, how they stop a run, and that they do not change results."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from gymnax.environments.classic_control.cartpole import CartPole

import jaxrl_fast
from jaxrl_fast.config import paths
from jaxrl_fast.plotting import run_curve
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training import dispatcher

ROOT = Path(__file__).parents[2]
TIMES = ("wall_time_s", "train_time_s", "env_steps_per_s")
TINY = dict(algo="pqn", env="CartPole-v1", num_envs=8, total_steps=1600, eval_every=640, eval_episodes=8, log_every=192)
TINY |= dict(save_every=0, loggers=(), log_level="quiet", devices=1, rollout_length=8, hidden_sizes=(8,))


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(run_curve, "figure", lambda folder: SimpleNamespace(savefig=Path.touch))


def fit(folder, *callbacks, **options):
    return jaxrl_fast.fit(**TINY | options, run_dir=str(folder), callbacks=callbacks)


def records(run):
    return [{k: v for k, v in record.items() if k not in TIMES} for record in run.metrics]


def same(one, other):
    assert records(one) == records(other)
    jax.tree.map(np.testing.assert_array_equal, one.agent_state, other.agent_state)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a run without callbacks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_curve, "figure", lambda folder: SimpleNamespace(savefig=Path.touch))
        return fit(tmp_path_factory.mktemp("plain") / "run")


class Notes(jaxrl_fast.Callback):
    """Record copies of all arguments, and clear the originals."""

    def __init__(self):
        self.records, self.evaluations, self.summaries, self.states = [], [], [], []

    def on_record(self, records, state):
        self.records += [dict(record) for record in records]
        self.states.append(state)
        records[0].clear()

    def on_evaluation(self, evaluation, state):
        self.evaluations.append(dict(evaluation))
        evaluation.clear()

    def on_end(self, summary):
        self.summaries.append(summary)


@pytest.mark.slow
def test_callbacks_receive_all_events_and_do_not_change_results(tmp_path, plain):
    notes = Notes()
    run = fit(tmp_path / "run", notes)
    same(run, plain)
    assert notes.records == run.metrics and notes.summaries == [run.summary]
    assert notes.evaluations == run.summary["evaluations"] and len(notes.evaluations) == 3
    state = notes.states[-1]
    assert (state.folder, state.env_steps, state.total_steps, state.num_updates) == (tmp_path / "run", 1600, 1600, 25)
    seconds = [state.seconds for state in notes.states]
    assert seconds[0] > 0 and seconds == sorted(seconds)


@pytest.mark.slow
def test_callback_may_be_any_object_and_receives_records_of_all_seeds(tmp_path):
    seen = []
    run = fit(tmp_path / "run", SimpleNamespace(on_record=lambda records, state: seen.append(records)), num_seeds=2)
    assert [[record["seed"] for record in records] for records in seen] == [[0, 1]] * len(seen)
    assert [record for records in seen for record in records] == run.metrics


class StopAt(jaxrl_fast.Callback):
    """Stop at an environment step, in the hook of this name."""

    def __init__(self, hook, env_steps):
        def stop(what, state):
            self.calls += 1
            at = what[0]["env_steps"] if isinstance(what, list) else what["env_steps"]
            if at >= env_steps:
                state.stop("enough")

        self.calls = 0
        setattr(self, hook, stop)


@pytest.mark.parametrize("chunk_s", [0.0, 100.0])
@pytest.mark.parametrize(("hook", "at", "ends"), [("on_record", 2 * 192, 3 * 192), ("on_evaluation", 640, 640)])
@pytest.mark.slow
def test_callback_stop_step_does_not_depend_on_chunk_length(hook, at, ends, chunk_s, tmp_path, plain, monkeypatch):
    """For any chunk length, `on_record` stops one record later, and `on_evaluation` at once."""
    monkeypatch.setattr(dispatcher, "CHUNK_S", chunk_s)
    monkeypatch.setattr(dispatcher, "GROWTH", 100)
    run = fit(tmp_path / "run", StopAt(hook, at))
    assert (run.summary["status"], run.summary["env_steps"]) == ("stopped", ends)
    assert run.summary["evaluations"][-1]["env_steps"] == ends
    assert run.summary["last_checkpoint"] == f"step-{ends:012d}"
    on = jaxrl_fast.fit(resume=run, log_level="quiet")
    assert on.summary["status"] == "done"
    same(on, plain)


@pytest.mark.slow
def test_resumed_run_accepts_callbacks(tmp_path):
    first = fit(tmp_path / "run", StopAt("on_evaluation", 640))
    notes = Notes()
    run = jaxrl_fast.fit(resume=first, log_level="quiet", callbacks=[notes, StopAt("on_record", 0)])
    assert run.summary["status"] == "stopped" and 640 < run.summary["env_steps"] < 1600
    assert notes.records == [record for record in run.metrics if record["env_steps"] > 640]
    assert notes.states[0].env_steps > 640 and len(notes.summaries) == 1


@pytest.mark.slow
def test_stop_at_last_step_leaves_status_done(tmp_path, capsys):
    run = fit(tmp_path / "run", StopAt("on_evaluation", 1600), log_level="info")
    assert run.summary["status"] == "done" and "stopping early" not in capsys.readouterr().out


@pytest.mark.slow
def test_run_is_saved_and_resumable_when_callback_raises(tmp_path, plain, capsys):
    class Broken:
        def on_record(self, records, state):
            if records[0]["env_steps"] >= 576:
                raise KeyError("no such metric")

        def on_end(self, summary):
            raise AssertionError("never called")

    with pytest.raises(KeyError, match="no such metric") as caught:
        fit(tmp_path / "run", Broken())
    assert caught.traceback[-1].name == "on_record" and caught.value.__cause__ is None
    [line] = capsys.readouterr().err.splitlines()
    saved, damaged = checkpoint.newest(tmp_path / "run" / paths.CHECKPOINTS)
    problem = "callback Broken.on_record raised KeyError: 'no such metric'"
    again = f"resume it with jaxrl_fast.fit(resume={str(tmp_path / 'run')!r})"
    assert line == f"error: {problem}; the run is saved in {saved.folder}; {again}" and not damaged
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failure"]) == ("failed", problem)
    assert summary["last_checkpoint"] == saved.folder.name
    same(jaxrl_fast.fit(resume=str(tmp_path / "run"), log_level="quiet"), plain)


@pytest.mark.slow
def test_run_status_is_done_when_on_end_raises(tmp_path, capsys):
    def fail(summary):
        raise RuntimeError("nobody answers")

    with pytest.raises(RuntimeError, match="nobody answers"):
        fit(tmp_path / "run", SimpleNamespace(on_end=fail))
    assert "callback SimpleNamespace.on_end raised RuntimeError: nobody answers; the run is" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"


class Typo(jaxrl_fast.Callback):
    def on_records(self, records, state): ...


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (Notes(), "callbacks: must be a list, got Notes; pass callbacks=[...]"),
        ([Notes], "callbacks: must be instances, got the class Notes; pass Notes(...)"),
        ([print], "callbacks: must have a hook, got builtin_function_or_method; define one of on_record, "),
        ([Typo()], "callbacks: unknown hook, got Typo.on_records; the hooks are on_record, on_evaluation, on_end"),
    ],
)
def test_fit_rejects_invalid_callbacks(callbacks, words, tmp_path):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        jaxrl_fast.fit(**TINY, run_dir=str(tmp_path / "run"), callbacks=callbacks)
    assert not list(tmp_path.iterdir())


class DirectoryChange(jaxrl_fast.Callback):
    """Change the current directory at every record."""

    def on_record(self, records, state):
        os.chdir("/")


class DirectoryChangingCartPole(CartPole):
    """Change the current directory when it is made."""

    def __init__(self):
        super().__init__()
        os.chdir("/")


@pytest.mark.slow
def test_run_stays_in_one_folder_when_current_directory_changes(tmp_path, monkeypatch, capsys):
    made = {"callbacks": [DirectoryChange()], "env": DirectoryChangingCartPole, "log_level": "info"}
    monkeypatch.chdir(tmp_path)
    run = jaxrl_fast.fit(**TINY | made | {"total_steps": 400}, run_dir="here/run")
    assert os.getcwd() == "/" and run.folder == tmp_path / "here" / "run"
    monkeypatch.chdir(tmp_path)
    jaxrl_fast.fit(resume="here/run", total_steps=800, **made)
    assert [path.name for path in tmp_path.iterdir()] == ["here"] and not Path("/here").exists()
    files = {path.name for path in run.folder.iterdir()}
    assert files >= {paths.CONFIG, paths.METRICS, paths.SUMMARY, paths.CURVE, paths.CHECKPOINTS}
    assert run.metrics[-1]["env_steps"] == 832 and jaxrl_fast.Run.open(run.folder).summary["env_steps"] == 832
    said = capsys.readouterr().out
    for words in ("run  here/run", "curve  here/run/curve.png", "(here/run/checkpoints/step-000000000448)"):
        assert words in said
    assert str(tmp_path) not in said


@pytest.mark.slow
def test_example_of_callbacks_guide_runs(tmp_path, monkeypatch, capsys):
    """Run the printed example with an evaluation after every update; no evaluation is better than the first."""
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/callbacks.md").read_text(), re.DOTALL)
    example = example.replace("eval_every=10_000", "eval_every=1, num_envs=8, eval_episodes=1, loggers=()")
    example = example.replace('float("-inf")', "1000.0")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "callbacks.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert any(
        re.fullmatch(r"stopping early at step \d+: the best evaluation return was 1000.0", line) for line in said
    )
    assert re.fullmatch(r"stopped \d+", said[-1])
