"""Test benchmarks that run unattended on a borrowed machine: commands are valid, finished steps are not repeated."""

import itertools
import json
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_fast
from jaxrl_fast.config import load, presets
from jaxrl_fast.options.declare import configure

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as for a script
import on_a_gpu  # noqa: E402
import published  # noqa: E402
from on_a_gpu import PARTS, Step  # noqa: E402

STEPS = [step for steps in PARTS.values() for step in steps]


def options_of(script):
    """Return the options of a script's parser, found in its source."""
    return set(re.findall(r'add_argument\("(--[a-z.-]+)"', (BENCHMARKS.parent / script).read_text()))


@pytest.mark.parametrize("step", STEPS, ids=[step.name for step in STEPS])
def test_every_step_is_valid_command(step, tmp_path):
    words = on_a_gpu.command(step, tmp_path, "callback")
    if words[:2] == ["-m", "jaxrl_fast.train"]:
        assert load.from_command_line(words[2:]).options.run_dir == str(tmp_path / step.name)
    else:
        given = {word for word in words[1:] if word.startswith("--")}
        assert "--output" in given and given <= options_of(words[0])
        if "--child" in words:
            assert words[words.index("--child") + 1] in on_a_gpu.CHECKS
    assert not any("{" in word for word in words)


def test_published_outcomes_of_presets_are_up_to_date():
    """Else run `python benchmarks/published.py`. Some rows are counted by hand in learning.json."""
    kept = json.loads(presets.published_file().read_text(encoding="utf-8"))
    assert kept == published.collect()
    outcome = lambda name: tuple(kept[name][key] for key in ("seeds", "solved", "env_steps", "threshold"))
    assert outcome("ppo_mountain_car") == (5, 4, 1_001_472, -110)
    assert outcome("rainbow_minatar_asterix") == (5, 0, 500_032, 15)
    assert outcome("ppo_breakout_small") == (1, 0, 5_000_192, 378)
    assert "ddpg_ant" not in kept, "no training of it is published"


def test_names_of_steps_are_unique():
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_is_due_excludes_finished_steps_and_steps_longer_than_time_left():
    done = {"a": {"status": 0}, "b": {"status": -15}, "c": {"status": 143}}
    step = lambda name, minutes=2: Step(name, minutes, ())
    assert [on_a_gpu.is_due(step(name), done, 121) for name in "abcd"] == [False, True, True, True]
    assert not on_a_gpu.is_due(step("d"), done, 119)


def test_training_command_resumes_when_config_exists(tmp_path):
    pong, place = PARTS["pong"][0], tmp_path / "pong"
    words = lambda: on_a_gpu.command(pong, tmp_path, "auto")
    assert "--run-dir" in words()
    place.mkdir()
    assert "--run-dir" in words(), "the process was killed before it wrote anything"
    (place / "config.yaml").write_text("")
    assert words() == ["-m", "jaxrl_fast.train", "--host.bridge", "auto", "--resume", str(place)]


def test_main_runs_all_steps_and_next_call_only_unfinished_ones(tmp_path, monkeypatch, capsys):
    count = (
        "import sys, pathlib; pathlib.Path(sys.argv[1], sys.argv[2]).open('a').write('x'); sys.exit(int(sys.argv[3]))"
    )
    step = lambda name, status, minutes: Step(name, minutes, ("-c", count, "{folder}", name, str(status)))
    steps = [step("good", 0, 0.1), step("bad", 3, 0.1), step("long", 0, 5)]
    monkeypatch.setattr(on_a_gpu, "PARTS", {"all": steps})
    for _ in range(2):
        assert on_a_gpu.main(["all", "--minutes", "1", "--any-device", "--folder", str(tmp_path)]) == 0
    times = {step.name: len((tmp_path / step.name).read_text()) for step in steps if (tmp_path / step.name).exists()}
    assert times == {"good": 1, "bad": 2}
    done = json.loads((tmp_path / on_a_gpu.RESULTS).read_text())
    assert {name: entry["status"] for name, entry in done.items()} == {"good": 0, "bad": 3}
    assert "good: already done" in capsys.readouterr().out


def test_results_of_earlier_attempts_are_kept_when_script_is_run_again(tmp_path, monkeypatch):
    finds = "import sys, pathlib; pathlib.Path(sys.argv[1], 'a.json').write_text('{\"cases\": [%d]}'); sys.exit(1)"
    for number in range(2):
        monkeypatch.setattr(on_a_gpu, "PARTS", {"all": [Step("a", 0.1, ("-c", finds % number, "{folder}"))]})
        on_a_gpu.run_parts(["all"], tmp_path, time.monotonic() + 60)
    monkeypatch.setattr(on_a_gpu, "run", lambda *_: sys.exit("killed along with us"))
    for cases in ("[2]}", "[3]}"):  # the partial output of a step that is killed with the main process
        with pytest.raises(SystemExit):
            on_a_gpu.run_parts(["all"], tmp_path, time.monotonic() + 60)
        (tmp_path / "a.json").write_text('{"cases": ' + cases)
    monkeypatch.setattr(on_a_gpu, "run", lambda *_: {"status": 0, "found": None})
    on_a_gpu.run_parts(["all"], tmp_path, time.monotonic() + 60)
    entry = json.loads((tmp_path / on_a_gpu.RESULTS).read_text())["a"]
    assert [attempt["found"]["cases"] for attempt in entry["earlier"]] == [[0], [1], [2], [3]]
    assert [attempt["status"] for attempt in entry["earlier"]] == [1, 1, None, None]
    assert entry["found"] is None, "results of earlier attempts are not those of this one"


@pytest.mark.parametrize("num_rows", [0, 1, 200, 201, 999])
def test_curve_is_downsampled_evenly_and_keeps_last_row(tmp_path, num_rows):
    row = lambda i: {"env_steps": i, "train_time_s": 0.5, "return_mean": None, "episodes": 0}
    lines = [json.dumps(row(i) | {"loss": 1.0}) + "\n" for i in range(num_rows)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"env_st')  # killed while writing a line
    rows = on_a_gpu.curve(tmp_path / "metrics.jsonl")
    assert min(num_rows, 100) <= len(rows) <= 200 and rows[-1:] == [row(i) for i in range(num_rows)][-1:]
    assert len({after["env_steps"] - now["env_steps"] for now, after in itertools.pairwise(rows)}) <= 1


def test_entry_of_training_has_preset_summary_and_curve(tmp_path, monkeypatch):
    place = tmp_path / "pong"
    place.mkdir()
    for name, text in (("config.yaml", ""), ("summary.json", '{"solved": true}'), ("metrics.jsonl", '{"episodes": 3}')):
        (place / name).write_text(text)
    watched = []
    monkeypatch.setattr(on_a_gpu, "watch", lambda words, *seconds: watched.append(seconds) or (143, "", True))
    on_a_gpu.run_parts(["pong"], tmp_path, time.monotonic() + 300)
    entry = json.loads((tmp_path / on_a_gpu.RESULTS).read_text())["pong"]
    assert "--resume" in entry["command"] and entry["preset"] == "ppo_pong_fast" and entry["pool_path"] == "auto"
    assert entry["timed_out"] and entry["found"] == {"solved": True} and entry["curve"][0]["episodes"] == 3
    assert 275 < watched[0][0] < 281 and watched[0][1] == 20, "20 s are reserved for saving"


def test_atari_steps_use_callback_when_ffi_check_failed(tmp_path, monkeypatch):
    ends = [{}]
    ends += [{"ffi": {"status": 0, "found": {"agree": agree}}} for agree in (True, False, None)]
    ends += [{"ffi": {"status": -11, "found": None}}, {"ffi": {"status": None}}, {"ffi": {"status": 0, "found": None}}]
    assert [on_a_gpu.pool_path(done) for done in ends] == ["auto"] * 2 + ["callback"] * 5
    for step in (*PARTS["atari"], *PARTS["pong"], *PARTS["dqn"]):
        words = on_a_gpu.command(step, tmp_path, "callback")
        assert words[words.index("--host.bridge") + 1] == "callback"
        assert on_a_gpu.hidden_settings(step, "callback")["pool_path"] == "callback"
    (tmp_path / "pong").mkdir()
    (tmp_path / "pong" / "config.yaml").write_text("")
    words = on_a_gpu.command(PARTS["pong"][0], tmp_path, "callback")
    assert "--resume" in words and "callback" in words, "also when it resumes"
    assert on_a_gpu.hidden_settings(PARTS["speed"][0], "callback") == {}


@pytest.mark.slow
def test_step_past_time_limit_can_save_before_it_is_killed():
    saves = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.5), print('saved'), sys.exit(143)))"
    began = time.monotonic()
    status, out, timed_out = on_a_gpu.watch(["-c", f"{saves}; print('begun', flush=True); time.sleep(60)"], 5, 20)
    assert status == 143 and out.split() == ["begun", "saved"] and timed_out
    assert time.monotonic() - began < 50


@pytest.mark.slow
def test_children_of_step_end_with_it_at_time_limit():
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    status, _, timed_out = on_a_gpu.watch(["-c", parent], 3, 20)  # it waits until no process has the output open
    assert status == -15 and timed_out and time.monotonic() - began < 15


@pytest.mark.slow
def test_step_is_terminated_when_main_process_is_interrupted(tmp_path):
    told = tmp_path / "told"
    waits = f"signal.signal(15, lambda *_: (pathlib.Path({str(told)!r}).touch(), sys.exit())); time.sleep(60)"

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.alarm(3)
        with pytest.raises(KeyboardInterrupt):
            on_a_gpu.watch(["-c", f"import pathlib, signal, sys, time; {waits}"], 60, 20)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert told.exists()


@pytest.mark.slow
def test_main_without_gpu_prints_one_line_and_measures_nothing(tmp_path, capfd):
    assert on_a_gpu.main(["ffi", "--folder", str(tmp_path / "results")]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err == "nothing is measured: JAX computes on the cpu here; --any-device measures anyway\n"
    assert not (tmp_path / "results").exists()


def test_report_with_append_keeps_earlier_cases(tmp_path):
    import side_by_side

    path = str(tmp_path / "report.json")
    for append, number in ((True, 1), (True, 2)):
        side_by_side.Report("a", path, append).add("cases", {"number": number})
    assert [case["number"] for case in json.loads(Path(path).read_text())["cases"]] == [1, 2]
    side_by_side.Report("a", path).add("cases", {"number": 3})
    assert [case["number"] for case in json.loads(Path(path).read_text())["cases"]] == [3]


def test_timed_excludes_metrics_of_updates_before():
    import side_by_side

    def chunk(state, num_updates):
        return state + num_updates, {"valid_steps": state + np.arange(4)}

    ours = SimpleNamespace(init=lambda seed: 100 * seed, chunk=chunk, capacity=4)
    _, metrics = side_by_side.timed(ours, np.int32(1), 6, before=5)
    assert metrics["valid_steps"].tolist() == [105, 106, 107, 108, 109, 110]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([100.0], [80.0], True),
        ([100.0], [70.0], False),
        ([-100.0], [-120.0], True),
        ([-100.0], [-140.0], False),
        ([-10.0, -12.0, -11.0], [-11.0, -13.0, -12.0], True),  # one standard error of the difference is 0.82
        ([-10.0, -12.0, -11.0], [-14.0, -16.0, -15.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
    ],
)
def test_returns_agree_within_three_standard_errors(first, second, expected):
    """With one value each, within a quarter of the larger size."""
    import side_by_side

    assert side_by_side.agree(first, second) == expected


def test_dqn_speed_times_preset_from_first_gradient_step(tmp_path, monkeypatch):
    import dqn_speed

    built, asked = [], []

    def build(num_updates, **options):
        built.append(options)
        return SimpleNamespace(compile_time_s=1.0), 1

    def timed(ours, seed, num_updates, before):
        asked.append((num_updates, before))
        return 0.5, {"valid_steps": np.full(num_updates, 10.0)}

    monkeypatch.setattr(dqn_speed.side_by_side, "build", build)
    monkeypatch.setattr(dqn_speed.side_by_side, "timed", timed)
    path, preset = tmp_path / "alone.json", "rainbow_minatar_breakout"  # 200k transitions, 10k steps before it learns
    words = ["--preset", preset, "--num-envs", "64,65536", "--seconds", "1", "--rounds", "2", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["dqn_speed.py", *words])
    dqn_speed.main()
    assert [options["replay"] for options in built] == [{"size": 200_000}, {"size": 8 * 65_536}]
    assert asked == [(32, 157), (64, 157), (64, 157), (1, 4), (2, 4), (2, 4)], "n_step + 1 rows of 65,536, or 10k steps"
    content = json.loads(path.read_text())
    assert content["benchmark"] == f"{preset}_speed"
    assert [(c["num_envs"], c["replay_ratio"], c["steps_per_s"]) for c in content["cases"]] == [
        (64, 0.25, 1280),
        (65_536, 0.25, 40),
    ]


@pytest.mark.slow
def test_each_mode_of_waiting_benchmark_trains(monkeypatch):
    import waiting

    monkeypatch.setattr(waiting, "ANSWER_S", 0.001)
    monkeypatch.setattr(
        waiting, "CONFIG", configure(type(waiting.CONFIG), rollout_length=12, num_epochs=1, hidden_sizes=(8,))
    )
    ways = [waiting.Waiting(), waiting.Waiting(in_flight=True), waiting.Waiting(in_flight=True, overlap=True)]
    assert all(way.update() > 12 * 0.001 for way in ways), "at least the time of the simulated emulator"
    assert [int(way.state.num_updates) for way in ways] == [1, 1, 1]
    assert [bool(way.state.rollout) for way in ways] == [False, False, True]


@pytest.mark.slow
def test_plain_dqn_makes_all_due_gradient_steps(monkeypatch):
    import plain_dqn

    ones = lambda grads, state, params=None: (jax.tree.map(jnp.ones_like, grads), state)
    monkeypatch.setattr(plain_dqn.optax, "adam", lambda rate: optax.GradientTransformation(lambda params: (), ones))
    bias = {}
    for start in (0, 10**6):  # learning from the first step, and never
        monkeypatch.setattr(plain_dqn, "START", start)
        bias[start] = jax.jit(plain_dqn.make(64, 10))(jax.random.key(0))[0]["params"]["Dense_0"]["bias"]
    assert float((bias[0] - bias[10**6]).max()) == 640 / plain_dqn.TRAIN_EVERY


def product_sizes(jaxpr, num_rows):
    """Yield the floating-point operations of each matrix product of so many rows in a program and its inner ones."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            shapes = [x.aval.shape for x in (*equation.invars, *equation.outvars)]
            (contracted, _), _ = equation.params["dimension_numbers"]
            if any(num_rows in shape for shape in shapes):
                yield 2 * int(np.prod(shapes[2])) * int(np.prod([shapes[0][i] for i in contracted]))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from product_sizes(inner, num_rows)


def test_sac_speed_counts_products_of_plain_program(monkeypatch):
    """A batch of 192 rows tells a gradient step from acting and from the initialization of networks."""
    import plain_sac
    import sac_speed

    monkeypatch.setattr(plain_sac, "BATCH", 192)
    program = jax.make_jaxpr(plain_sac.make(1, 1, start=0))(jax.random.key(0))
    assert sum(product_sizes(program.jaxpr, 192)) == sac_speed.products(3, 1)


@pytest.mark.slow
def test_sac_speed_times_gradient_steps_alone(monkeypatch):
    import plain_sac
    import sac_speed

    monkeypatch.setattr(plain_sac, "START", 40)
    monkeypatch.setattr(sac_speed, "product_rates", lambda: {"slow": 1e9, "fast": 1e11})
    found = sac_speed.one("Pendulum-v1", (3, 1), 32, 1, sbx="")
    assert found["gradient_steps"] == 32 and found["steps_per_s"] == found["least"] == found["most"] > 0
    assert found["bound_steps_per_s"] == round(1e11 / sac_speed.products(3, 1))
    np.testing.assert_allclose(found["share_of_bound"], found["steps_per_s"] / found["bound_steps_per_s"], atol=0.01)


@pytest.mark.slow
def test_training_past_time_limit_is_saved_and_resumed_by_next_command(tmp_path):
    step = on_a_gpu.training("tiny", "--config ppo_cartpole --total-steps 1000M --eval-episodes 1")
    words, ends = [], []
    for _ in range(2):
        words.append(on_a_gpu.command(step, tmp_path, "auto"))
        ends.append(on_a_gpu.run(step, words[-1], tmp_path, 38))
    first, second = ends
    assert first["status"] == second["status"] == 143 and "--resume" in words[1]
    assert first["found"]["status"] == "stopped" and 0 < first["found"]["env_steps"] < second["found"]["env_steps"]
    assert second["curve"][-1]["env_steps"] == second["found"]["env_steps"]


@pytest.mark.slow
def test_soak_counts_all_chunks_and_checkpoints(monkeypatch):
    import soak

    from jaxrl_fast.training import dispatcher

    monkeypatch.setattr(dispatcher, "CHUNK_S", dispatcher.CHUNK_S)  # restored afterwards, since the soak changes it
    *_, case = soak.soak("ppo", 20)
    assert case["checkpoints"] == 20 and case["chunks"] == 20 * soak.CHUNKS_EACH
    assert case["compiled_after_the_first_checkpoint"] <= 1


@pytest.mark.slow
def test_run_process_without_kill_reports_last_update_of_run(tmp_path):
    """Run one process of the benchmark killed_runs.py without killing it."""
    import killed_runs

    options = killed_runs.COMMON | killed_runs.RUNS["pqn"] | {"algo": "pqn", "total_steps": 4096}
    last, was_killed = killed_runs.run_process(options | {"run_dir": str(tmp_path / "run")}, None)
    assert not was_killed and last == json.loads((tmp_path / "run" / "summary.json").read_text())["num_updates"] > 1


def test_kernels_benchmark_rotates_order_of_variants_over_rounds(monkeypatch, tmp_path):
    """Replace runs by fakes whose speed grows with each call. The ratio of `all` to itself is 1."""
    import kernels

    speeds = {"all": 100.0, "without_dense": 80.0, "xla": 50.0}
    seen = []

    class Run:
        num_devices = 1

        def __init__(self, row, variant, num_updates):
            self.variant = variant

        def speed(self, num_updates):
            seen.append(self.variant)
            return speeds[self.variant] * len(seen)

    monkeypatch.setattr(kernels, "Run", Run)
    output = tmp_path / "kernels.json"
    words = ["--rows", "ppo_cartpole", "--variants", "without_dense,xla", "--rounds", "3", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["kernels.py", *words])
    kernels.main()
    (row,) = json.loads(output.read_text())["rows"]
    assert list(row["variants"]) == ["all", "without_dense", "xla"] and row["variants"]["all"]["ratio"] == 1
    assert seen[4:] == ["all", "without_dense", "xla", "without_dense", "xla", "all", "xla", "all", "without_dense"]
    assert row["num_envs"] == 64 and row["env_steps"] % (64 * 128) == 0


@pytest.mark.slow  # two compilations
def test_seaquest_with_room_for_fewer_entities_takes_same_steps(monkeypatch):
    import learning
    from gymnax.environments.minatar import seaquest, seaquest_helpers

    for module in (seaquest, seaquest_helpers):  # undone after the test
        monkeypatch.setattr(module, "MAX_ENTITIES", module.MAX_ENTITIES)
    env, params = gymnax.make("Seaquest-MinAtar")
    actions = jax.random.randint(jax.random.key(1), (300, 8), 0, 6)

    def trajectory():
        def step(state, inputs):
            key, action = inputs
            keys = jax.random.split(key, 8)
            obs, state, reward, terminated, truncated, _ = jax.vmap(env.step, (0, 0, 0, None))(
                keys, state, action, params
            )
            return state, (obs.reshape(8, -1), reward, terminated, truncated)

        _, state = jax.vmap(env.reset, (0, None))(jax.random.split(jax.random.key(0), 8), params)
        return jax.jit(lambda: jax.lax.scan(step, state, (jax.random.split(jax.random.key(2), 300), actions))[1])()

    whole = trajectory()
    learning.limit_seaquest_entities(learning.SEAQUEST_ENTITIES)
    assert env.reset(jax.random.key(0), params)[1].e_fish.shape == (32, 4)
    jax.tree.map(np.testing.assert_array_equal, trajectory(), whole)
    assert float(whole[1].sum()) > 0 and bool(whole[2].any())


@pytest.mark.slow  # three runs
def test_learning_resumes_interrupted_run(tmp_path, monkeypatch):
    import learning

    stop = SimpleNamespace(on_record=lambda records, state: state.stop("enough"))
    short = dict(algo="ppo", env="CartPole-v1", num_envs=8, total_steps=8192, log_every=1024, eval_episodes=4)
    monkeypatch.setitem(learning.EXTRA, "short", short)
    options = dict(seed=3, num_seeds=2, loggers=(), callbacks=[stop])
    stopped = jaxrl_fast.fit(**short, **options, run_dir=tmp_path / "some" / "short_3_4")
    assert stopped.summary["status"] == "stopped" and stopped.summary["env_steps"] < 8192
    resumed, whole = (learning.train("short", [3, 4], tmp_path / name) for name in ("some", "other"))
    assert resumed["env_steps"] == whole["env_steps"] == 8192
    assert [resumed[k] for k in ("greedy", "final_returns")] == [whole[k] for k in ("greedy", "final_returns")]
    assert learning.train("short", [3, 4], tmp_path / "other")["greedy"] == whole["greedy"]  # it has ended


def test_curve_of_runs_averages_episodes_over_parts_of_training(tmp_path):
    """The first run has four records of 100 steps, the second has two of 200, hence two points."""
    import curves

    summary = {"algo": "sac", "env_id": "Pendulum-v1", "solved_threshold": -200, "device": "cpu", "versions": {}}
    for seed, rows in enumerate(([(1, 10.0), (3, 30.0), (0, None), (0, None)], [(2, 5.0), (1, 8.0)])):
        run = tmp_path / str(seed)
        run.mkdir()
        (run / "summary.json").write_text(json.dumps(summary))
        records = [
            {"seed": seed, "env_steps": 400 * (i + 1) // len(rows), "episodes": n, "return_mean": mean}
            for i, (n, mean) in enumerate(rows)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    curve = curves.curve_of([tmp_path / "0", tmp_path / "1"])
    assert curve["steps"] == [200, 400] and curve["seeds"] == [0, 1]
    assert curve["returns"] == [[(1 * 10.0 + 3 * 30.0) / 4, None], [5.0, 8.0]]
