"""One run in several processes on this machine: the same bits as in one process, and no end without the others."""

import json
import signal
import time

import numpy as np
import pytest

from jaxrl_fast.config import paths
from jaxrl_fast.parallel import team
from jaxrl_fast.runs import checkpoint, directory
from tests.helpers import processes, runs

ON_POLICY = "--num-envs 8 --rollout-length 16 --num-minibatches 2 --hidden-sizes 8 --total-steps 2048"
OFF_POLICY = "--num-envs 4 --rollout-length 4 --learning-starts 64 --batch-size 16 --size 256 --hidden-sizes 8"
OFF_POLICY += " --total-steps 600"
COMMON = "--loggers none --eval-episodes 4 --log-every 1"
CARTPOLE = "--env CartPole-v1 --env-option max_steps_in_episode=9"
PENDULUM = "--env Pendulum-v1 --env-option max_steps_in_episode=9"
WALK = "--env tests.helpers.gym_envs:Walk"
LINES = {
    "ppo": f"ppo {CARTPOLE} {ON_POLICY}",
    "ppo-continuous": f"ppo {PENDULUM} {ON_POLICY} --rewards normalized --normalize-observations true",
    "ppo-gru": f"ppo {CARTPOLE} {ON_POLICY} --memory gru --sequence-length 8",
    "pqn": f"pqn {CARTPOLE} {ON_POLICY}",
    "dqn": f"dqn {CARTPOLE} {OFF_POLICY}",
    "dqn-prioritized-host": f"dqn {CARTPOLE} {OFF_POLICY} --replay prioritized --replay.storage host",
    "dqn-disk": f"dqn {CARTPOLE} {OFF_POLICY} --replay.storage disk",
    "sac": f"sac {PENDULUM} {OFF_POLICY}",
    "td3": f"td3 {PENDULUM} {OFF_POLICY}",
    "ddpg": f"ddpg {PENDULUM} {OFF_POLICY}",
    "ppo-gymnasium": f"ppo {WALK} {ON_POLICY} --host.workers 0",
    "ppo-workers": f"ppo {WALK} {ON_POLICY} --host.workers 2",
    "dqn-gymnasium": f"dqn {WALK} {OFF_POLICY} --host.workers 0",
    "ppo-envpool": f"ppo --env envpool/CartPole-v1 {ON_POLICY}",
    "ppo-players": f"ppo --env jaxrl_fast.envs.games.paddles:Paddles {ON_POLICY}",
    "ppo-seeds": f"ppo {CARTPOLE} {ON_POLICY} --num-seeds 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_two_processes_compute_the_bits_of_one(name, tmp_path):
    line = f"{LINES[name]} {COMMON}"
    devices = "" if "--num-seeds" in line else "--devices 2"
    processes.run(f"{line} {devices} --run-dir one", 1, tmp_path, devices=2)
    processes.run(f"{line} --run-dir two", 2, tmp_path)
    runs.same(tmp_path / "runs" / "one", tmp_path / "runs" / "two")


@pytest.mark.slow
def test_four_processes_compute_the_bits_of_two_with_two_devices_each(tmp_path):
    line = f"{LINES['ppo']} {COMMON}"
    processes.run(f"{line} --run-dir one", 2, tmp_path, devices=2)
    processes.run(f"{line} --run-dir two", 4, tmp_path)
    runs.same(tmp_path / "runs" / "one", tmp_path / "runs" / "two")


KILLED = {
    "ppo": f"ppo {CARTPOLE} {ON_POLICY}",
    "dqn-disk": f"dqn {CARTPOLE} {OFF_POLICY} --replay.storage disk",
    "ppo-gymnasium": f"ppo {WALK} {ON_POLICY} --host.workers 0",
}
LONG = {"ppo": 40_960, "dqn-disk": 8_000, "ppo-gymnasium": 20_480}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_killed_process_ends_all_and_resumed_run_has_the_same_bits(name, tmp_path):
    """Kill process 1 after a checkpoint, resume by as many processes, and compare with a run that was not killed."""
    line, whole = f"{KILLED[name]} {COMMON}", f"--total-steps {LONG[name]}"
    processes.run(f"{line} {whole} --run-dir one", 2, tmp_path)
    killed = processes.Processes(f"{line} {whole} --save-every {LONG[name] // 20} --run-dir two", 2, tmp_path)
    folder = tmp_path / "runs" / "two"
    killed.until("compiled in")
    end = time.monotonic() + 60
    while not checkpoint.folders(folder / paths.CHECKPOINTS) and time.monotonic() < end:
        time.sleep(0.002)
    killed.started[1].kill()
    start = time.monotonic()
    assert killed.wait()[0] == 1 and time.monotonic() - start < 30
    text = killed.text(0)
    assert "error: process 1 of 2" in text and "has ended without a message; the last checkpoint is runs/two" in text
    assert "start all processes again with --resume runs/two" in text and "Traceback" not in text
    saved = checkpoint.newest(folder / paths.CHECKPOINTS, whole=True)[0].manifest["env_steps"]
    assert 0 < saved < LONG[name]
    processes.run("--resume runs/two", 2, tmp_path)
    assert runs.records(tmp_path / "runs" / "one") == runs.records(folder)
    numbers = [runs.bits(tmp_path / "runs" / run) for run in ("one", "two")]
    one, two = ({name: x for name, x in of.items() if "train_envs/" not in name} for of in numbers)  # pickled objects
    assert one == two


@pytest.mark.slow
def test_signal_to_one_process_saves_all_and_other_numbers_of_processes_resume(tmp_path):
    """Two processes begin, one with two devices goes on, and four shards on two devices each are refused."""
    line, whole = f"{LINES['ppo']} {COMMON}", "--total-steps 40960"
    processes.run(f"{line} {whole} --run-dir one", 1, tmp_path, devices=2, options=["--devices 2"])
    stopped = processes.Processes(f"{line} {whole} --run-dir two", 2, tmp_path)
    stopped.until("step ")
    stopped.started[1].send_signal(signal.SIGTERM)
    assert stopped.wait() == [128 + signal.SIGTERM] * 2
    assert "stopping after this chunk" in stopped.text(1)
    summary = json.loads((tmp_path / "runs" / "two" / "summary.json").read_text())
    assert summary["status"] == "stopped" and 0 < summary["env_steps"] < 40_960
    three = processes.Processes("--resume runs/two", 2, tmp_path, devices=2)
    assert three.wait() == [2, 2]
    said = "error: devices: must be 4, the 4 devices of 2 processes, got 2; start another number of processes\n"
    assert three.text(0) == said and three.text(1) == ""
    processes.run("--resume runs/two", 1, tmp_path, devices=2)
    runs.same_numbers(tmp_path / "runs" / "one", tmp_path / "runs" / "two")


FAILING = """
import time
import gymnasium
import numpy as np

class Fails(gymnasium.Env):
    def __init__(self, how="raise"):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.how = how

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = getattr(self, "num_steps", 0)
        self.fails = self.np_random.integers(2**31) == CHOSEN
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        if self.fails and self.num_steps > 40:
            if self.how == "raise":
                raise RuntimeError("a wheel came off")
            time.sleep(3600)
        return np.zeros(2, np.float32), 1.0, False, self.num_steps % 1000 == 0, {}
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "sleep"])
def test_environment_of_one_process_that_fails_or_hangs_ends_all_and_is_named(how, tmp_path):
    from jaxrl_fast.envs.host.pool import seeds_of

    seed = seeds_of((0, 0, 0), 4)[3]  # of the last environment, which process 1 steps
    chosen = np.random.Generator(np.random.PCG64(seed)).integers(2**31)
    (tmp_path / "failing.py").write_text(FAILING.replace("CHOSEN", str(chosen)))
    line = f"ppo --env failing:Fails --env-option how={how} --num-envs 4 --rollout-length 8 --num-minibatches 2"
    line += " --hidden-sizes 8 --loggers none --host.workers 0 --total-steps 10M --distributed.timeout 5 --run-dir one"
    both = processes.Processes(line, 2, tmp_path)
    start = time.monotonic()
    assert both.wait() == [1, 1] and time.monotonic() - start < 120
    first, second = both.text(0), both.text(1)
    if how == "raise":
        assert "RuntimeError: a wheel came off" in second and "failing.py" in second
        assert first.count("error:") == 1 and "error: process 1 of 2" in first and "failing:Fails" in first
    else:
        assert "no chunk has ended for 5 s (distributed.timeout): process 1 of 2" in first
        assert "is in failing.py:23, in step" in first
    assert "Traceback" not in first


@pytest.mark.slow
def test_processes_that_are_stopped_by_the_system_are_named(tmp_path):
    line = f"{LINES['ppo']} {COMMON} --total-steps 100M --distributed.timeout 4 --run-dir one"
    both = processes.Processes(line, 2, tmp_path)
    both.until("step ")
    both.started[1].send_signal(signal.SIGSTOP)
    assert both.started[0].wait(90) == 1
    both.started[1].kill()
    assert "no chunk has ended for 4 s (distributed.timeout): process 1 of 2" in (text := both.wait() and both.text(0))
    assert "does not answer" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seed 1", "--seed 2"], "has seed 2, but process 0 has 1; use the same"),
        (["--sed 1"] * 2, "error: sed: unknown option; did you mean seed?"),
        (["--num-envs 7"] * 2, "error: devices: must divide num_envs 7, got 2; use 1"),
        (["--num-envs auto"] * 2, "error: num_envs: cannot be measured by several processes, got auto; give a number"),
        (["--num-seeds 3"] * 2, "error: num_seeds: must be a multiple of 2 for the 2 devices of 2 processes, got 3"),
        (["--devices 3"] * 2, "error: devices: must be a multiple of the 2 processes, got 3; use 2"),
        (["--dry-run --for h200"] * 2, "error: for: compiles in one process, got h200; leave out --distributed"),
    ],
)
def test_mistakes_get_one_line_of_process_0(options, said, tmp_path):
    both = processes.Processes("ppo", 2, tmp_path, options=options)
    assert both.wait() == [2, 2]
    assert said in both.text(0) and both.text(0).count("\n") == 1 and both.text(1) == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_help_needs_no_other_process(tmp_path):
    one = processes.Processes("ppo --help", 1, tmp_path, addresses=["127.0.0.1:{port},2,1"])
    assert one.wait() == [0] and "--num-envs" in one.text(0)


@pytest.mark.slow
def test_process_0_alone_prints_a_dry_run(tmp_path):
    both = processes.Processes(f"{LINES['ppo']} --dry-run", 2, tmp_path)
    assert both.wait() == [0, 0]
    assert "dry run: " in both.text(0) and both.text(1) == ""


@pytest.mark.slow
@pytest.mark.parametrize("seeds", ["", "--num-seeds 2"])
def test_divergence_ends_all_with_one_line_of_process_0(seeds, tmp_path):
    both = processes.Processes(f"{LINES['ppo']} {COMMON} --learning-rate 1e30 --run-dir one {seeds}", 2, tmp_path)
    assert both.wait() == [1, 1]
    assert "is not finite at step" in both.text(0) and "Traceback" not in both.text(0) and both.text(1) == ""
    summary = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())
    assert summary["status"] == "diverged"


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["true", "false"])
def test_replay_dir_has_the_files_of_all_processes(keep, tmp_path):
    line = f"{LINES['dqn-disk']} {COMMON} --replay-dir files --keep-replay {keep} --run-dir one"
    processes.run(line, 2, tmp_path)
    links, found = sorted((tmp_path / "runs" / "one").glob("replay-*")), sorted((tmp_path / "files").glob("*/*"))
    assert ([link.name for link in links], bool(found)) == (
        (["replay-0", "replay-1"], True) if keep == "true" else ([], False)
    )


def test_folder_that_not_all_processes_see(tmp_path, monkeypatch):
    """Process 1 of this test looks for the folder in another place."""

    class Second(team.Team):
        count = 2

        def gather(self, value, topic="main"):
            return [value, (tmp_path / "elsewhere" / directory.TOKEN).is_file()]

    monkeypatch.setattr(team, "CURRENT", [Second()])
    with pytest.raises(ValueError, match=f"run_dir: process 1 does not see the folder, got {tmp_path}; use a folder"):
        directory.check_shared(tmp_path, "run_dir")
    assert not any(tmp_path.iterdir())
