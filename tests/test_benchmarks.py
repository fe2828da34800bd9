"""What is run unattended on a machine that is lent: it must not fail for a word, nor do twice what it has done."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_fast import config, envs, loop
from jaxrl_fast.types import Agent, Decision

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as for a script
import on_a_gpu  # noqa: E402
from on_a_gpu import PARTS, Step  # noqa: E402

STEPS = [step for steps in PARTS.values() for step in steps]


def options_of(script):
    """Those that its parser knows, read off its source."""
    return set(re.findall(r'add_argument\("(--[a-z-]+)"', (BENCHMARKS.parent / script).read_text()))


@pytest.mark.parametrize("step", STEPS, ids=[step.name for step in STEPS])
def test_every_step_is_a_command_that_there_is(step, tmp_path):
    words = on_a_gpu.command(step, tmp_path)
    if words[:2] == ["-m", "jaxrl_fast.train"]:
        assert config.from_command_line(words[2:]).options.run_dir == str(tmp_path / step.name)
    else:
        given = {word for word in words[1:] if word.startswith("--")}
        assert "--output" in given and given <= options_of(words[0])
        if "--child" in words:
            assert words[words.index("--child") + 1] in on_a_gpu.CHECKS
    assert not any("{" in word for word in words)


def test_steps_have_names_of_their_own():
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_what_ended_well_is_not_repeated_and_what_does_not_fit_is_not_begun():
    done = {"a": {"status": 0}, "b": {"status": -15}, "c": {"status": 143}}
    step = lambda name, minutes=2: Step(name, minutes, ())
    assert [on_a_gpu.wanted(step(name), done, 121) for name in "abcd"] == [False, True, True, True]
    assert not on_a_gpu.wanted(step("d"), done, 119)


def test_a_training_goes_on_where_it_has_a_configuration_with_or_without_checkpoints(tmp_path):
    pong = PARTS["pong"][0]
    assert "--run-dir" in on_a_gpu.command(pong, tmp_path)
    (tmp_path / "pong").mkdir()
    assert "--run-dir" in on_a_gpu.command(pong, tmp_path), "killed before it had written anything"
    (tmp_path / "pong" / "config.yaml").write_text("")
    assert on_a_gpu.command(pong, tmp_path) == ["-m", "jaxrl_fast.train", "--resume", str(tmp_path / "pong")]


def test_a_child_finds_the_package_and_what_we_find(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    environment = on_a_gpu.environment()
    assert environment["PYTHONPATH"].endswith(":/somewhere/else")
    code = "import jaxrl_fast; print(jaxrl_fast.__file__)"
    out = subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=tmp_path, text=True)
    assert Path(out.strip()).parent.parent == BENCHMARKS.parent


def test_a_command_goes_through_its_steps_and_the_next_one_only_through_what_is_left(tmp_path, monkeypatch, capsys):
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
    assert "good: done before" in capsys.readouterr().out


def test_a_step_whose_time_is_over_may_save_before_it_is_killed(tmp_path):
    saves = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.5), print('saved'), sys.exit(143)))"
    step = Step("slow", 0, ("-c", f"{saves}; print('begun', flush=True); time.sleep(60)", "{run}"), grace=20)
    began = time.monotonic()
    entry = on_a_gpu.run(step, tmp_path, 1)
    assert entry["status"] == 143 and entry["output"].split() == ["begun", "saved"]
    assert time.monotonic() - began < 50


def test_without_a_gpu_it_stops_with_one_line(tmp_path, capfd):
    assert on_a_gpu.main(["ffi", "--folder", str(tmp_path / "results")]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err == "nothing is measured: JAX computes on the cpu here; --any-device does it all the same\n"
    assert not (tmp_path / "results").exists()


def test_the_replay_is_measured_without_flashbax(tmp_path, monkeypatch):
    import replay_speed

    monkeypatch.setattr(replay_speed.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(replay_speed, "measure", lambda case, contenders, *_: [{"buffer": name} for name in contenders])
    monkeypatch.setattr(sys, "argv", ["replay_speed.py", "--output", str(tmp_path / "replay.json")])
    replay_speed.main()
    content = json.loads((tmp_path / "replay.json").read_text())
    assert {case["buffer"] for case in content["cases"]} == {"ours", "pairs", "ours, prioritised"}
    assert "flashbax" in content["left_out"]


def test_a_report_may_go_on_with_an_earlier_one(tmp_path):
    import side_by_side

    path = str(tmp_path / "report.json")
    for append, number in ((True, 1), (True, 2)):
        side_by_side.Report("a", path, append).add("cases", {"number": number})
    assert [case["number"] for case in json.loads(Path(path).read_text())["cases"]] == [1, 2]
    side_by_side.Report("a", path).add("cases", {"number": 3})
    assert [case["number"] for case in json.loads(Path(path).read_text())["cases"]] == [3]


def test_a_case_that_grows_is_written_down_as_far_as_it_is_known(tmp_path):
    import side_by_side

    path = tmp_path / "report.json"
    report = side_by_side.Report("a", str(path))

    def cases():
        for number in (1, 2):
            yield {"number": number}
            assert json.loads(path.read_text())["cases"] == [{"first": 0}, {"number": number}]

    report.add("cases", {"first": 0})
    report.grow("cases", cases())
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_updates_before_the_timed_ones_are_made_and_not_counted():
    import side_by_side

    def chunk(state, num_updates):
        return state + num_updates, {"valid_steps": state + np.arange(4)}

    ours = SimpleNamespace(init=lambda seed: 100 * seed, chunk=chunk, capacity=4)
    _, metrics = side_by_side.timed(ours, np.int32(1), 6, before=5)
    assert metrics["valid_steps"].tolist() == [105, 106, 107, 108, 109, 110]


def test_a_preset_of_dqn_is_timed_alone_from_its_first_gradient_step_with_its_replay_ratio(tmp_path, monkeypatch):
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
    assert [options["agent"] for options in built] == [{"capacity": 200_000}, {"capacity": 8 * 65_536}]
    assert asked == [(32, 157), (64, 157), (64, 157), (1, 4), (2, 4), (2, 4)], "n_step + 1 rows of 65,536, or 10k steps"
    content = json.loads(path.read_text())
    assert content["benchmark"] == f"{preset}_speed"
    assert [(c["num_envs"], c["replay_ratio"], c["steps_per_s"]) for c in content["cases"]] == [
        (64, 0.25, 1280),
        (65_536, 0.25, 40),
    ]


def test_asynchronous_speed_counts_when_it_is_the_better():
    import atari_speed

    assert atari_speed.with_raw({"raw_sync": 1.0, "raw_async": 2.0, "network": 9.0})["raw"] == 2.0


def atari_args(**changed):
    """What atari_speed.py's functions read off its command line."""
    given = dict(preset="ppo_pong_fast", threads=0, pool_path="auto", in_flight="0,2", rounds=2, seconds=0.0)
    return SimpleNamespace(**given | {"contenders": "raw,acting,training,overlapped,network"} | changed)


def test_an_atari_case_is_known_bit_by_bit(monkeypatch):
    import atari_speed

    made = []
    maker = lambda name: lambda: made.append(name) or (lambda: None)
    makers = {name: maker(name) for name in ("raw_sync", "acting_0", "network")}
    monkeypatch.setattr(atari_speed, "contenders", lambda *_: makers)
    monkeypatch.setattr(atari_speed, "prepare", lambda *_: (None, None, SimpleNamespace(rollout_length=10), 1))
    cases = atari_speed.measure(8, atari_args())
    first, second = next(cases), next(cases)
    assert made == ["raw_sync", "acting_0"], "a contender is made when its turn comes"
    assert first["rounds"] == 0 and "raw_steps_per_s" in first and "acting_0_steps_per_s" not in first
    assert "acting_0_of_raw" in second and "acting_0_of_bound" not in second
    last = list(cases)[-1]
    assert last["rounds"] == 2 and "acting_0_of_bound" in last and made == [*makers]


def test_medians_are_over_the_rounds_that_have_a_number():
    import atari_speed

    rounds = [{"raw_sync": 10.0, "acting_0": 5.0}, {"raw_sync": 30.0}]
    found = {"raw_sync_steps_per_s": 20, "acting_0_steps_per_s": 5, "raw_steps_per_s": 20, "acting_0_of_raw": 0.5}
    assert atari_speed.medians(rounds) == found


def test_atari_contenders_and_the_way_to_the_emulators_can_be_chosen(monkeypatch):
    import atari_speed

    asked = []
    divide = lambda settings, *_: (
        asked.append(settings.options.pool_path) or (None, SimpleNamespace(rollout_length=1), 1)
    )
    monkeypatch.setattr(atari_speed.plan, "divide", divide)
    monkeypatch.setattr(atari_speed.plan, "undivided", lambda *_: (None,))
    ways = [f"{name}_{way}" for way in (0, 2) for name in ("acting", "training")]
    assert [*atari_speed.contenders(8, atari_args())] == ["raw_sync", "raw_async", *ways, "overlapped", "network"]
    few = atari_args(in_flight="0", contenders="raw,acting,training,network", pool_path="callback")
    assert [*atari_speed.contenders(1024, few)] == ["raw_sync", "raw_async", "acting_0", "training_0", "network"]
    assert asked == ["auto", "callback"]


def test_an_overlapped_update_learns_from_the_rollout_before():
    import atari_speed

    env = envs.make("CartPole-v1", 2)
    act = lambda state, obs, memory, noise: Decision(jnp.zeros(2, jnp.int32))
    learn = lambda state, rollout, key: (state + 1, {"learnt": rollout.steps.valid.sum(), "state": state})
    agent = Agent(lambda key: jnp.int32(0), act, act, learn, lambda key, *shape: jnp.zeros(shape), 20)
    env, agent, num_shards = atari_speed.overlapped(env, agent, 1)
    _, metrics = loop.train(env, agent, loop.init(env, agent, jax.random.key(0)), 4)
    assert num_shards == 1 and metrics["state"].tolist() == [0, 1, 2, 3]
    assert metrics["learnt"].tolist() == [0, *metrics["valid_steps"].tolist()[:-1]]
    assert len(set(metrics["valid_steps"].tolist())) > 1, "or it could be any rollout"


def test_the_plain_dqn_makes_every_gradient_step_that_is_due(monkeypatch):
    import plain_dqn

    ones = lambda grads, state, params=None: (jax.tree.map(jnp.ones_like, grads), state)
    monkeypatch.setattr(plain_dqn.optax, "adam", lambda rate: optax.GradientTransformation(lambda params: (), ones))
    bias = {}
    for start in (0, 10**6):  # learning from the first step on, and never
        monkeypatch.setattr(plain_dqn, "START", start)
        bias[start] = jax.jit(plain_dqn.make(64, 10))(jax.random.key(0))[0]["params"]["Dense_0"]["bias"]
    assert float((bias[0] - bias[10**6]).max()) == 640 / plain_dqn.TRAIN_EVERY


@pytest.mark.slow
def test_a_training_whose_time_is_over_is_saved_and_goes_on_with_the_next_command(tmp_path):
    step = on_a_gpu.training("tiny", "--config ppo_cartpole --total-steps 1000M --eval-episodes 1")
    first, second = (on_a_gpu.run(step, tmp_path, 45) for _ in range(2))
    assert first["status"] == second["status"] == 143
    assert first["found"]["status"] == "stopped" and 0 < first["found"]["env_steps"] < second["found"]["env_steps"]
    assert "--resume" in second["command"]
