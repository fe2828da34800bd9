"""Run all GPU measurements unattended, on a machine that may be taken away at any time.

A machine that is available for a quarter of an hour has time for one of these pairs of calls, most important first:

    python benchmarks/on_a_gpu.py ffi atari --minutes 9       # then:  atari --minutes 3.5
    python benchmarks/on_a_gpu.py ffi pong --minutes 9        # then:  pong --minutes 3.5
    python benchmarks/on_a_gpu.py ffi dqn --minutes 9         # then:  dqn --minutes 3.5
    python benchmarks/on_a_gpu.py versions --minutes 9        # then:  versions --minutes 3.5
    python benchmarks/on_a_gpu.py speed --minutes 9           # then:  speed replay same_bits --minutes 3.5
    python benchmarks/on_a_gpu.py control --minutes 9         # then:  control --minutes 3.5
    python benchmarks/on_a_gpu.py mujoco --minutes 9          # then:  mujoco --minutes 3.5
    python benchmarks/on_a_gpu.py seaquest --minutes 9        # then:  seaquest --minutes 3.5
    python benchmarks/on_a_gpu.py kernel_init --minutes 9     # then:  kernel_init --minutes 3.5

Each step is a separate process. It starts only if its minutes are left. Its output, results and exit status are stored
in one JSON as soon as it ends; for a training also its preset and its thinned curve. A later command does not repeat a
step that succeeded, and resumes a training. Any other started step comes after all steps that were not started, because
the same problem may stop it again; its earlier results are kept under `earlier`. A status of null means that the step
was killed together with this script. If the check `ffi` has failed, later steps run Atari through Python, and their
`pool_path` shows it.

At the end of each call, copy these to where the machine returns results:

    runs/on_a_gpu/on_a_gpu.json    all of the above
    runs/on_a_gpu/pong             to resume that training on another machine (dqn's replay buffer is too large for it)

With both in the same places on another machine, the script continues there. `--list` prints the parts and their steps.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "on_a_gpu.json"
SHOWN = 4_000  # last characters of a step's output that are kept
CURVE, MOST_ROWS = ("env_steps", "train_time_s", "return_mean", "episodes"), 200  # taken from metrics.jsonl
KILL_AFTER = 5.0  # seconds from SIGTERM to SIGKILL for a step that saves nothing
SAME_BITS = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}


class Step(NamedTuple):
    """A command: a script with `--output NAME.json`, a check of this file, or a training."""

    name: str
    minutes: float  # least to start with; a script gets at most twice as many, a training all that are left
    words: tuple[str, ...]
    grace: float = 0  # seconds of a training's time reserved for saving it: a replay buffer takes long
    variables: tuple[str, ...] = ()  # of the environment, NAME=VALUE


def script(name: str, minutes: float, words: str, file: str = "") -> Step:
    """Return the step that runs a benchmark script."""
    return Step(
        name, minutes, (f"benchmarks/{file or name}.py", *words.split(), "--output", "{folder}/" + name + ".json")
    )


def versions(name: str, words: str) -> list[Step]:
    """Return the steps that time a benchmark as it is, without CUDA graphs, and with the program for CPUs."""
    changes = {
        "now": (),
        "no_graphs": ("XLA_FLAGS=--xla_gpu_enable_command_buffer=",),
        "for_cpu": ("JAXRL_FAST_TARGET=cpu",),
    }
    return [script(f"{name}_{how}", 2, words, name)._replace(variables=given) for how, given in changes.items()]


def check(name: str, minutes: float) -> Step:
    """Return the step that runs one of `CHECKS`."""
    return Step(name, minutes, ("benchmarks/on_a_gpu.py", "--child", name, "--output", "{folder}/" + name + ".json"))


def training(name: str, words: str, grace: float = 20) -> Step:
    """Return the step of a training in a separate folder, in environments on the device."""
    return Step(name, 2, ("-m", "jaxrl_fast.train", "{run}", *words.split()), grace)


def host_training(name: str, words: str, grace: float = 20) -> Step:
    """Return the step of a training in envpool's environments. Words left of `{run}` also apply when it is resumed."""
    return Step(name, 2, ("-m", "jaxrl_fast.train", "--host.bridge", "{pool_path}", "{run}", *words.split()), grace)


def atari(num_envs: int, minutes: float, ways: str = "0") -> Step:
    """Return the step that times one number of environments. Several `ways` also include the contender `overlapped`."""
    contenders = "raw,acting,training,network" + (",overlapped" if "," in ways else "")
    words = f"--preset ppo_pong_fast --num-envs {num_envs} --async-pools {ways} --contenders {contenders}"
    return script(
        f"atari_{num_envs}", minutes, f"{words} --host.bridge {{pool_path}} --rounds 2 --seconds 2", "atari_speed"
    )


def mujoco(seed: int) -> list[Step]:
    """A seed of each preset of MuJoCo for algorithms with a replay, 1M steps each."""
    names = [f"{algo}_{task}" for task in ("half_cheetah", "hopper", "walker2d", "ant") for algo in CONTROL]
    words = "--config {name} --seed {seed} --save-every 5min --keep-checkpoints 1"
    return [host_training(f"{name}_{seed}", words.format(name=name, seed=seed), grace=60) for name in names]


def five_seeds(name: str, words: str) -> Step:
    """Return the step that trains five seeds in one program."""
    return training(name, f"{words} --num-seeds 5 --save-every 5min --keep-checkpoints 1", grace=60)


def dqn_step(preset: str, minutes: float) -> Step:
    """Return the step that times DQN with a preset, without a plain program."""
    words = f"--preset {preset} --num-envs 64,256,1024,4096,16384 --rounds 2 --seconds 2"
    return script(preset, minutes, words, "dqn_speed")


CONTROL = ("sac", "td3", "ddpg")
PARTS = {  # run in the order in which they are named
    "ffi": [check("ffi", 1.5)],
    "atari": [atari(8, 1.5), atari(32, 1.5), atari(128, 3, "0,2"), atari(1024, 3), atari(512, 2)],
    "pong": [host_training("pong", "--config ppo_pong_fast --save-every 1min")],
    "dqn": [host_training("dqn", "--config dqn_pong_fast --save-every 10min --keep-checkpoints 1", grace=60)],
    "speed": [
        script("ppo_speed", 2, "--num-envs 64,1024,16384,65536 --num-seeds 1,64 --rounds 3 --seconds 1 --no-start-up"),
        script("dqn_speed", 2, "--num-envs 64,1024,4096 --rounds 2 --seconds 1"),
        script("pqn_speed", 2, "--num-envs 64,1024,4096,16384 --rounds 2 --seconds 3"),
        dqn_step("dqn_minatar_breakout", 1.5),
        dqn_step("rainbow_minatar_breakout", 1.5),
        script("replay_speed", 2, "--rounds 3 --seconds 1"),
        script("sac_speed", 2, "--only plain,population --num-envs 1,256,4096 --gradient-steps 10000"),
    ],
    "versions": [
        *versions("ppo_speed", "--num-envs 2048 --num-seeds 1 --rounds 3 --seconds 1 --no-start-up"),
        *versions("dqn_speed", "--num-envs 64,1024 --rounds 2 --seconds 1"),
        *versions("pqn_speed", "--num-envs 1024 --rounds 2 --seconds 3"),
        *versions("sac_speed", "--only plain --num-envs 1,256 --gradient-steps 10000"),
    ],
    "replay": [
        script("replay_dqn", 3, "--stores device-none host-none disk-none --rounds 5"),
    ],
    "same_bits": [check("same_bits", 2)],
    "control": [
        training("td3_fast", "--config td3_cheetah_run_fast --save-every 5min --keep-checkpoints 1", grace=60),
        training("sac_fast", "--config sac_cheetah_run_fast --save-every 5min --keep-checkpoints 1", grace=60),
    ],
    "mujoco": [step for seed in range(3) for step in mujoco(seed)],
    "seaquest": [five_seeds(f"seaquest_{algo}", f"--config {algo}_minatar_seaquest") for algo in ("ppo", "pqn", "dqn")],
    "kernel_init": [
        five_seeds(f"lecun_{algo}_{task}", f"--config {algo}_minatar_{task} --network.kernel-init lecun_normal")
        for algo in ("dqn", "rainbow")
        for task in ("breakout", "asterix", "freeway", "space_invaders")
    ],
    "population": [
        script("population_speed", 3, "--only seeds,curve --num-envs 1,64,1024,16384 --rounds 2 --seconds 2"),
    ],
}


def main(argv: list[str] | None = None) -> int:
    """Run the named parts. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="total time limit")
    parser.add_argument("--folder", default="runs/on_a_gpu")
    parser.add_argument("--any-device", action="store_true", help="run even if JAX finds no GPU")
    parser.add_argument("--list", action="store_true", help="only print the parts and their steps")
    parser.add_argument("--child", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--output", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        found = json.dumps(CHECKS[args.child]())
        print(found)
        if args.output:
            Path(args.output).write_text(found + "\n")
        return 0
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    if args.list or not args.parts:
        for name, steps in PARTS.items():
            print(f"{name:<12}{', '.join(f'{step.name} ({step.minutes:g} min)' for step in steps)}")
        return 0
    end = time.monotonic() + 60 * args.minutes
    why = "" if args.any_device else reason_not_to_run()
    if why:
        print(f"nothing is measured: {why}; --any-device measures anyway", file=sys.stderr)
        return 2
    run_parts(args.parts, Path(args.folder).absolute(), end)
    return 0


def run_parts(parts: list[str], folder: Path, end: float) -> None:
    """Run the steps of these parts until the clock's `end`. Store the results after each step."""
    folder.mkdir(parents=True, exist_ok=True)
    done = parse_json(read_file(folder / RESULTS)) or {}
    for step in order_steps(parts, done):
        left = end - time.monotonic()
        if not is_due(step, done, left):
            print(f"{step.name}: {'already done' if is_done(step, done) else f'{left:.0f} s are too few'}", flush=True)
            continue
        path = pool_path(done)
        words = command(step, folder, path)
        begun = earlier_results(step, folder, done) | {"command": words, "status": None} | hidden_settings(step, path)
        store_results(folder, done | {step.name: begun})  # marks it as started, in case this process is killed
        output(step, folder).unlink(missing_ok=True)
        done[step.name] = begun | run(step, words, folder, left)
        store_results(folder, done)


def order_steps(parts: list[str], done: dict[str, dict]) -> list[Step]:
    """Return the steps in the named order. Steps with an earlier attempt come last, except trainings."""
    steps = [step for part in parts for step in PARTS[part]]
    return sorted(steps, key=lambda step: step.name in done and not is_training(step))


def is_training(step: Step) -> bool:
    """Return whether the step is a training, which can be saved and resumed."""
    return "{run}" in step.words


def is_done(step: Step, done: dict[str, dict]) -> bool:
    """Return whether the step has succeeded."""
    return step.name in done and done[step.name]["status"] == 0


def is_due(step: Step, done: dict[str, dict], left: float) -> bool:
    """Return whether the step has not succeeded yet and its minutes fit into the seconds that are left."""
    return not is_done(step, done) and left >= 60 * step.minutes


def pool_path(done: dict[str, dict]) -> str:
    """Return how Atari is stepped: through Python if the check `ffi` was started but did not succeed."""
    if "ffi" not in done:
        return "auto"
    entry = done["ffi"]
    return "auto" if entry["status"] == 0 and (entry["found"] or {}).get("agree") else "callback"


def hidden_settings(step: Step, path: str) -> dict[str, str]:
    """Return settings that the command may not show: the preset of a resumed training, and how Atari is stepped."""
    preset = {"preset": step.words[step.words.index("--config") + 1]} if is_training(step) else {}
    return preset | ({"pool_path": path} if "{pool_path}" in step.words else {})


def earlier_results(step: Step, folder: Path, done: dict[str, dict]) -> dict:
    """Return the kept results of an earlier attempt: all of a resumed training, otherwise `earlier`, oldest first."""
    if step.name not in done or is_resumed(step, folder):
        return done.get(step.name, {})
    last = {"found": None} | done[step.name]
    oldest = last.pop("earlier", [])
    last["found"] = last["found"] or parse_json(read_file(output(step, folder)))  # it was not read yet
    return {"earlier": [*oldest, last]}


def output(step: Step, folder: Path) -> Path:
    """Return the path of a script's JSON. A training has none."""
    return folder / f"{step.name}.json"


def is_resumed(step: Step, folder: Path) -> bool:
    """Return whether the step is a training that was started earlier."""
    return is_training(step) and (folder / step.name / "config.yaml").exists()


def environment(variables: Sequence[str] = ()) -> dict[str, str]:
    """Return a child's environment variables, and some more, NAME=VALUE.

    PYTHONPATH lets it import this checkout, even if it is not installed.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path} | dict(variable.split("=", 1) for variable in variables)


def command(step: Step, folder: Path, path: str) -> list[str]:
    """Return the command line of a step. A training starts in its folder, or is resumed there by its saved options."""
    words = [word.replace("{folder}", str(folder)).replace("{pool_path}", path) for word in step.words]
    if not is_training(step):
        return words
    place, at = folder / step.name, words.index("{run}")
    if is_resumed(step, folder):
        return [*words[:at], "--resume", str(place)]
    return [*words[:at], "--run-dir", str(place), *words[at + 1 :]]


def run(step: Step, words: list[str], folder: Path, left: float) -> dict:
    """Run a step. Return its status, output and results: a benchmark's JSON, or a training's summary and curve."""
    place = folder / step.name
    if place.is_dir() and not is_resumed(step, folder):
        shutil.rmtree(place)  # left by a training that was killed at its start
    seconds = left if is_training(step) else min(left, 120 * step.minutes)
    print("$ python", *words, f"({seconds:.0f} s)", flush=True)
    began = time.monotonic()
    status, out, timed_out = watch(words, max(seconds - step.grace, 5), max(step.grace, KILL_AFTER), step.variables)
    print(out[-SHOWN:], flush=True)
    took = round(time.monotonic() - began, 1)
    entry = {"status": status, "timed_out": timed_out, "seconds": took, "output": out[-SHOWN:]}
    if is_training(step):
        return entry | {"found": parse_json(read_file(place / "summary.json")), "curve": curve(place / "metrics.jsonl")}
    return entry | {"found": parse_json(read_file(output(step, folder)))}


def watch(words: list[str], seconds: float, grace: float, variables: Sequence[str] = ()) -> tuple[int, str, bool]:
    """Run a process. Return its status and output, and whether it was stopped because its time was over.

    SIGTERM stops it and its children; a training saves then. Processes that remain after the grace period are killed.
    """
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a separate process group
    )
    timed_out = False
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        timed_out, out = True, stop(process, grace)
    except BaseException:  # this process is stopped itself
        stop(process, grace)
        raise
    return process.returncode, out, timed_out


def stop(process: subprocess.Popen, grace: float) -> str:
    """Stop a process and its children. Return what the process printed."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        out, _ = process.communicate(timeout=grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    return out


def curve(path: Path) -> list[dict]:
    """Return at most MOST_ROWS rows of metrics.jsonl, evenly spaced, with the last one."""
    rows = [row for line in read_file(path).splitlines() if (row := parse_json(line))]
    every = -(-len(rows) // MOST_ROWS) or 1
    return [{name: row.get(name) for name in CURVE} for row in rows[::-1][::every][::-1]]


def read_file(path: Path) -> str:
    """Return the text of a file, or "" if there is none."""
    return path.read_text() if path.exists() else ""


def parse_json(text: str) -> Any:
    """Parse JSON. Return None if it is incomplete because its process was killed."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def store_results(folder: Path, done: dict[str, dict]) -> None:
    """Replace the results atomically, because this process may be killed at any time."""
    aside = folder / f"{RESULTS}.new"
    aside.write_text(json.dumps(done, indent=2) + "\n")
    aside.replace(folder / RESULTS)


def reason_not_to_run() -> str:
    """Return why this machine cannot be used, or "". A child process asks JAX, because the asker holds the GPU."""
    code = "import envpool, jax; print(jax.default_backend())"
    asked = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        return last_error_line(asked)
    backend = asked.stdout.split()[-1]
    return "" if backend == "gpu" else f"JAX computes on the {backend} here"


def last_error_line(ended: subprocess.CompletedProcess) -> str:
    """Return why a process failed."""
    return (ended.stderr.strip().splitlines() or [f"python ended with status {ended.returncode}"])[-1]


def ffi() -> dict:
    """Check that envpool's compiled calls load, and that they give the same as its Python calls."""
    import jax
    import numpy as np

    from jaxrl_fast import envs
    from jaxrl_fast.envs.envpool import pool
    from jaxrl_fast.envs.host.config import HostEnvConfig

    def play(path):
        env = envs.make("envpool/Pong-v5", 8, HostEnvConfig((0,), bridge=path))

        def steps(key):
            state, _ = env.reset(key)
            return jax.lax.scan(env.step, state, jax.numpy.zeros((500, 8), jax.numpy.int32))[1]

        return jax.device_get(jax.jit(steps)(jax.random.key(0)))

    why = pool.ffi_unavailable_reason()
    same = None if why else jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), play("ffi"), play("callback"))
    return {"device": str(jax.devices()), "why_no_ffi": why, "agree": same and all(jax.tree.leaves(same))}


SMALL = dict(env="Breakout-MinAtar", num_envs=32, eval_episodes=1, loggers=(), log_level="quiet")
SMALL |= dict(compile_cache=False)
TRAINED = {
    "ppo": dict(total_steps=20_480, rollout_length=32, network="minatar"),
    "dqn": dict(total_steps=8_192, replay={"size": 8_192}, batch_size=32, learning_starts=512, network="minatar"),
}


def bits() -> dict:
    """Return the SHA-256 of the final parameters of small trainings."""
    import jax

    import jaxrl_fast

    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        for algo, options in TRAINED.items():
            run = jaxrl_fast.fit(algo=algo, run_dir=f"{folder}/{algo}", **SMALL, **options)
            digest = hashlib.sha256()
            for leaf in jax.tree.leaves(jax.device_get(getattr(run.agent_state, "learner", run.agent_state).params)):
                digest.update(leaf.tobytes())
            digests[algo] = digest.hexdigest()
    return digests


def same_bits() -> dict:
    """Check whether two processes end with the same parameters, with and without --xla_gpu_deterministic_ops=true."""
    return {name: compare_two_processes(more) for name, more in (("deterministic", SAME_BITS), ("as_it_is", {}))}


def compare_two_processes(more: dict[str, str]) -> dict:
    """Return by algorithm whether two processes with these variables end with the same bits, or why one failed."""
    words, digests = [sys.executable, __file__, "--child", "bits"], []
    for _ in range(2):
        ended = subprocess.run(words, env=environment() | more, capture_output=True, text=True)
        if ended.returncode:
            return {"failed": last_error_line(ended)}
        digests.append(json.loads(ended.stdout.strip().splitlines()[-1]))
    first, second = digests
    return {algo: first[algo] == second[algo] for algo in first}


CHECKS = {"ffi": ffi, "bits": bits, "same_bits": same_bits}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the running step as well
    sys.exit(main())
