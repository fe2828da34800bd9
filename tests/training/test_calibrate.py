"""Test --num-envs auto: which counts are tried, which is chosen, and that the run uses the chosen number."""

import dataclasses
import os
import re
from pathlib import Path

import jax
import pytest
import yaml

import jaxrl_fast
from jaxrl_fast import train
from jaxrl_fast.config import load
from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.dqn import DQN
from jaxrl_fast.parallel import program
from jaxrl_fast.sweep import grid
from jaxrl_fast.training import calibrate, plan, summary
from jaxrl_fast.training.calibrate import Trial
from tests.helpers import run_chunks_by


def tried(rates, start=1, too_many=10**6, refused=()):
    """Return the counts that are tried with these rates, and the chosen count."""
    trials = []
    while (count := calibrate.next_count(trials, start)) is not None:
        why = "too many" if count >= too_many else "refused" if count in refused else ""
        trials.append(Trial(count, None if why else rates[count], why, count >= too_many))
        assert len(trials) < 20
    found = calibrate.best_trial(trials)
    return [trial.num_envs for trial in trials], found and found.num_envs


# Rates that double and then flatten: 8 gains 60% over 4, 16 gains 25%, 32 only 5%.
CURVE = {1: 100, 2: 200, 4: 400, 8: 640, 16: 800, 32: 840, 64: 850, 128: 860}


def test_chosen_count_is_last_before_doubling_gains_under_10_percent():
    """Two counts beyond the chosen one are tried."""
    assert tried(CURVE) == ([1, 2, 4, 8, 16, 32, 64], 16)
    assert tried(CURVE, start=4) == ([4, 8, 16, 32, 64], 16)
    assert tried(CURVE, start=32) == ([32, 64, 128], 32)
    assert tried({1: 100, 2: 109, 4: 110}) == ([1, 2, 4], 1)
    assert tried({3: 100, 6: 111, 12: 90, 24: 100}, start=3) == ([3, 6, 12, 24], 6)


def test_search_continues_past_temporary_drop_in_rate():
    """From 100 to 360 in two doublings is a gain of 1.9 per doubling."""
    assert tried({1: 100, 2: 80, 4: 360, 8: 370, 16: 330}) == ([1, 2, 4, 8, 16], 4)


def test_best_count_below_memory_limit_is_chosen():
    assert tried(CURVE, too_many=8) == ([1, 2, 4, 8], 4)
    assert tried(CURVE, too_many=2) == ([1, 2], 1)
    assert tried(CURVE, too_many=64) == ([1, 2, 4, 8, 16, 32, 64], 16)


def test_search_halves_count_until_it_runs_when_start_is_too_large():
    assert tried(CURVE, start=32, too_many=8) == ([32, 16, 8, 4], 4)
    assert tried(CURVE, start=4, too_many=1) == ([4, 2, 1], None)


def test_search_skips_rejected_counts_and_computes_gain_per_doubling():
    """From 1 to 8, across rejected counts, 640 / 100 is 1.86 per doubling; from 16 to 64 it is 1.03."""
    assert tried(CURVE, refused=(2, 4)) == ([1, 2, 4, 8, 16, 32, 64], 16)
    assert tried(CURVE, refused=(32,)) == ([1, 2, 4, 8, 16, 32, 64, 128], 16)
    assert tried(CURVE, refused=(1, 2)) == ([1, 2, 4, 8, 16, 32, 64], 16)
    assert calibrate.gain(Trial(1, 100.0), Trial(8, 640.0)) == pytest.approx(6.4 ** (1 / 3))


def test_search_ends_without_choice_when_all_counts_are_rejected():
    assert tried(CURVE, refused=(1, 2, 4, 8), too_many=16) == ([1, 2, 4, 8, 16], None)
    assert tried(CURVE, start=4, refused=(1, 2, 4, 8), too_many=16) == ([4, 8, 16], None)


def test_the_table_has_a_line_for_each_count():
    trials = [Trial(1, 1000.0), Trial(2, None, "3 parts"), Trial(4, 4840.0), Trial(8, 4840.0)]
    heading, names, *lines = calibrate.table(trials)
    assert heading.startswith("num_envs auto: ") and names.split() == ["envs", "steps/s", "gain"]
    assert [line.split() for line in lines] == [
        ["1", "1k"],
        ["2", "not", "run:", "3", "parts"],
        ["4", "4.84k", "+120%"],  # 2.2 per doubling
        ["8", "4.84k", "+0%"],
    ]


def settings(**options):
    given = dict(env="CartPole-v1", num_envs="auto", total_steps=4000, log_level="quiet")
    return load.from_keywords(algo="ppo", rollout_length=4, hidden_sizes=(4,), **{**given, **options})


@pytest.mark.parametrize(
    ("num_envs", "options", "words"),
    [
        (64, {}, "4000 steps in total, only 15 updates"),
        (1, {"total_steps": 3}, "3 steps in total, only 0 updates"),
        (3, {"devices": 2}, "devices: must divide num_envs 3, got 2; use 1"),
    ],
)
def test_measure_count_gives_reason_for_unusable_count(num_envs, options, words):
    trial = calibrate.measure_count(settings(**options), num_envs)
    assert trial.rate is None and words in trial.why


def test_measure_count_rejects_too_large_count_before_compiling(monkeypatch):
    from jaxrl_fast.training import memory

    monkeypatch.setattr(memory, "free_bytes", lambda _=1: 1000)
    monkeypatch.setattr(program, "build", lambda *_: pytest.fail("it was compiled"))
    trial = calibrate.measure_count(settings(), 2)
    assert trial.too_many and "does not fit into memory" in trial.why


@pytest.mark.parametrize(
    ("reason", "too_many"), [("RESOURCE_EXHAUSTED: out of memory", True), ("INTERNAL: a bug", False)]
)
def test_measure_count_catches_only_out_of_memory_errors(reason, too_many, monkeypatch):
    """Let the compiler fail: out of memory, or with an error that another count would not avoid."""

    def fail(*_):
        raise jax.errors.JaxRuntimeError(reason)

    monkeypatch.setattr(program, "build", fail)
    if too_many:
        trial = calibrate.measure_count(settings(), 2)
        assert (trial.rate, trial.why, trial.too_many) == (None, "it does not fit into memory", True)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
            calibrate.measure_count(settings(), 2)


@pytest.mark.slow
def test_measured_rate_is_environment_steps_per_second(monkeypatch):
    """With 10 updates per second, the rate is 10 * rollout_length * num_envs."""
    monkeypatch.setattr(calibrate, "measure", lambda *_: 10.0)
    given = settings()
    assert calibrate.measure_count(given, 4).rate == 10 * given.agent.length(4) * 4


@pytest.mark.slow
def test_measure_count_runs_gradient_steps(monkeypatch):
    """Time DQN past its learning start: three chunks of one update of 32 steps, with gradient steps."""
    seen = []

    def run(chunk, state, length):
        state, rows = chunk(state, length)
        seen.append((int(length), rows["gradient_steps"].sum()))
        return state, rows

    run_chunks_by(run, monkeypatch)
    monkeypatch.setattr(calibrate, "SAMPLE_S", 0.0)
    given = settings()._replace(
        algo="dqn", agent=configure(DQN, hidden_sizes=(4,), batch_size=16, replay={"size": 20_000})
    )
    trial = calibrate.measure_count(given, 4)
    assert trial.rate > 0 and [length for length, _ in seen] == [1, 1, 1] and sum(steps for _, steps in seen) > 0


def test_auto_num_envs_saves_chosen_number_and_resumes_with_it(tmp_path, monkeypatch, capsys):
    """Choose from a table of rates: config.yaml holds the number, and a resume uses it without another search."""
    monkeypatch.setattr(calibrate, "measure_count", lambda settings, count: Trial(count, float(CURVE[count])))
    folder = tmp_path / "run"
    ready = train.prepare(["ppo", "--num-envs", "auto", "--run-dir", str(folder)])
    assert "16  environments chosen" in capsys.readouterr().out
    assert ready.settings.options.num_envs == 16 and ready.env.spec.num_envs * ready.placement.num_shards == 16
    assert ready.steps_per_update == 128 * 16
    summary.write_config(ready)
    ready.lock.release()
    assert yaml.safe_load((folder / "config.yaml").read_text())["num_envs"] == 16
    monkeypatch.setattr(calibrate, "choose", lambda settings: pytest.fail("again"))
    again = plan.make_plan(load.from_keywords(resume=str(folder)))
    assert again.settings.options.num_envs == 16
    again.lock.release()
    with pytest.raises(ValueError, match="num_envs: a resume cannot change it from 16, got auto"):
        jaxrl_fast.fit(resume=str(folder), num_envs="auto")


def test_auto_num_envs_keeps_current_directory(tmp_path, monkeypatch):
    """The environments of its trials may change it, and the run's folder is relative to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "choose", lambda settings: os.chdir("/") or calibrate.with_count(settings, 2))
    ready = train.prepare(["ppo", "--num-envs", "auto", "--run-dir", "./run"])
    ready.lock.release()
    assert ready.folder == tmp_path / "run" and ready.folder.is_dir()
    (group,) = grid.from_command_line(["ppo", "--num-envs", "auto"]).groups
    assert group.settings.options.num_envs == 2 and Path.cwd() == tmp_path


def test_search_starts_with_num_envs_of_preset(monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text("algo: ppo\nnum_envs: 4\n")
    counts = []
    monkeypatch.setattr(calibrate, "measure_count", lambda settings, count: counts.append(count) or Trial(count, 1.0))
    found = calibrate.choose(load.from_keywords(str(tmp_path / "mine.yaml"), num_envs="auto", log_level="quiet"))
    assert counts == [4, 8, 16] and found.options.num_envs == 4


@pytest.mark.parametrize(
    ("num_envs", "options", "too_many"),
    [(64, {}, True), (2, {"total_steps": 7}, True), (1, {"total_steps": 3}, True), (3, {"devices": 2}, False)],
)
def test_measure_count_excludes_larger_counts_when_updates_are_too_few(num_envs, options, too_many):
    """A count that the devices do not divide evenly does not exclude larger counts."""
    assert calibrate.measure_count(settings(**options), num_envs).too_many == too_many


@pytest.mark.slow
@pytest.mark.parametrize(("num_updates", "runs"), [(20, True), (19, False)])
def test_measure_count_requires_20_updates_with_several_environments(num_updates, runs, monkeypatch):
    monkeypatch.setattr(calibrate, "measure", lambda *_: 1.0)
    steps_per_update = 2 * settings().agent.length(2)
    trial = calibrate.measure_count(settings(total_steps=num_updates * steps_per_update), 2)
    assert (trial.rate is not None) == runs and trial.too_many != runs


@pytest.mark.parametrize(
    ("took", "lengths", "rate"),
    [
        # 0.05 s an update, so 8 take 0.4 s, more than 0.3; the second of three samples was the fastest
        ([0.05, 0.1, 0.2, 0.4, 0.32, 0.5], [1, 2, 4, 8, 8, 8], 8 / 0.32),
        ([0.05, 0.1, 0.2, 0.4, 0.5, 0.3], [1, 2, 4, 8, 8, 8], 8 / 0.3),
        # no chunk is longer than the capacity of 16
        ([0.01] * 7, [1, 2, 4, 8, 16, 16, 16], 16 / 0.01),
        # exactly 0.3 s are sufficient
        ([0.3, 0.3, 0.3], [1, 1, 1], 1 / 0.3),
    ],
)
@pytest.mark.parametrize("num_seeds", [1, 2])
def test_measured_rate_is_that_of_fastest_of_three_samples(took, lengths, rate, num_seeds, monkeypatch):
    clock, durations, seen, seeds = [0.0], iter(took), [], []

    class Built:
        capacity = 16

        def init(self, given):
            seeds.append(given.tolist())
            return 0

        def chunk(self, state, length):
            assert state == len(seen), "each chunk continues from the state of the previous one"
            clock[0] += next(durations)
            seen.append(int(length))
            return state + 1, ()

    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])
    assert calibrate.measure(Built(), 5, num_seeds) == pytest.approx(rate)
    assert seen == lengths and seeds == [5 if num_seeds == 1 else [5, 6]]


def test_choose_raises_first_reason_when_no_count_works(monkeypatch, capsys):
    """Count 4 is rejected, 8 is too many, and no table is printed."""
    trials = {4: Trial(4, why="it does not divide"), 8: Trial(8, why="too large", too_many=True)}
    asked = []
    monkeypatch.setattr(calibrate, "measure_count", lambda _, count: asked.append(count) or trials[count])
    given = settings(log_level="info")
    given = given._replace(options=dataclasses.replace(given.options, num_envs=4))
    said = "num_envs: no number of environments works, got auto; 4 environments failed: it does not divide"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        calibrate.choose(given)
    assert asked == [4, 8] and capsys.readouterr().out == ""


def test_no_other_count_is_tried_after_the_time_limit(monkeypatch):
    """Each trial takes 50 s and the limit is 120 s, so three trials start."""
    clock, asked = [0.0], []

    def measure_count(_, count):
        clock[0] += 50
        asked.append(count)
        return Trial(count, float(count))

    monkeypatch.setattr(calibrate, "measure_count", measure_count)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])
    given = settings()
    found = calibrate.choose(given._replace(options=dataclasses.replace(given.options, num_envs=4)))
    assert asked == [4, 8, 16] and found.options.num_envs == 16 and not found.auto_num_envs
