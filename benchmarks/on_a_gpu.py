"""All that is to be measured on a GPU, unattended, on a machine that may be taken away.

A machine lent for a quarter of an hour has time for one of these pairs of calls. Their order is that of what matters:

    python benchmarks/on_a_gpu.py ffi atari --minutes 9       # then:  atari --minutes 3.5
    python benchmarks/on_a_gpu.py ffi pong --minutes 9        # then:  pong --minutes 3.5
    python benchmarks/on_a_gpu.py ffi dqn --minutes 9         # then:  dqn --minutes 3.5
    python benchmarks/on_a_gpu.py speed --minutes 9           # then:  speed same_bits --minutes 3.5
    python benchmarks/on_a_gpu.py control --minutes 9         # then:  control --minutes 3.5
    python benchmarks/on_a_gpu.py mujoco --minutes 9          # then:  mujoco --minutes 3.5

Each step is a process of its own. It begins if the minutes that it wants are left, and what it printed, measured and
how it ended is written to one JSON at once; of a training also its curve, thinned, and its preset. A step that ended
well is not repeated by a later command, and a training goes on where it stopped. Any other step that was begun comes
after all that were not, for what stopped it may stop it again; what it had found by then is kept under `earlier`. A
status of null is that of a step that was killed along with us. Where the check `ffi` has failed, Atari is stepped
through Python from then on, and the steps' `pool_path` says so.

At the end of each call, copy to where the machine gives results back:

    runs/on_a_gpu/on_a_gpu.json    all of the above
    runs/on_a_gpu/pong             if that training is to go on on another machine (dqn's is too large: its replay)

Put into the same places there, both are gone on with. `--list` says what there is.
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
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "on_a_gpu.json"
SHOWN = 4_000  # characters of what a step printed, its last ones
CURVE, MOST_ROWS = ("env_steps", "train_time_s", "return_mean", "episodes"), 200  # of metrics.jsonl
KILL_AFTER = 5.0  # seconds from the signal to stop, where nothing is to be saved
SAME_BITS = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}


class Step(NamedTuple):
    """A command: a script with `--output NAME.json`, a check of this file, or a training."""

    name: str
    minutes: float  # it is not begun with less; a script gets twice as many if they are there, a training all
    words: tuple[str, ...]
    grace: float = 0  # seconds of a training's time that are for saving it: a replay takes long


def script(name: str, minutes: float, words: str, file: str = "") -> Step:
    """A benchmark."""
    return Step(
        name, minutes, (f"benchmarks/{file or name}.py", *words.split(), "--output", "{folder}/" + name + ".json")
    )


def check(name: str, minutes: float) -> Step:
    """One of `CHECKS`."""
    return Step(name, minutes, ("benchmarks/on_a_gpu.py", "--child", name, "--output", "{folder}/" + name + ".json"))


def training(name: str, words: str, grace: float = 20) -> Step:
    """A run in a folder of its own. What stands before the folder also holds where it goes on."""
    return Step(name, 2, ("-m", "jaxrl_fast.train", "--host-bridge", "{pool_path}", "{run}", *words.split()), grace)


def atari(num_envs: int, minutes: float, ways: str = "0") -> Step:
    """One number of environments. Only where several ways of waiting are compared is `overlapped` among them."""
    contenders = "raw,acting,training,network" + (",overlapped" if "," in ways else "")
    words = f"--preset ppo_pong_fast --num-envs {num_envs} --async-pools {ways} --contenders {contenders}"
    return script(
        f"atari_{num_envs}", minutes, f"{words} --host-bridge {{pool_path}} --rounds 2 --seconds 2", "atari_speed"
    )


def mujoco(seed: int) -> list[Step]:
    """A seed of each preset of MuJoCo for algorithms with a replay, 1M steps each."""
    names = [f"{algo}_{task}" for task in ("half_cheetah", "hopper", "walker2d", "ant") for algo in CONTROL]
    words = "--config {name} --seed {seed} --save-every 5min --keep-checkpoints 1"
    return [training(f"{name}_{seed}", words.format(name=name, seed=seed), grace=60) for name in names]


def alone(preset: str, minutes: float) -> Step:
    """DQN by a preset, beside nothing."""
    words = f"--preset {preset} --num-envs 64,256,1024,4096,16384 --rounds 2 --seconds 2"
    return script(preset, minutes, words, "dqn_speed")


CONTROL = ("sac", "td3", "ddpg")
PARTS = {  # run in the order in which they are named
    "ffi": [check("ffi", 1.5)],
    "atari": [atari(8, 1.5), atari(32, 1.5), atari(128, 3, "0,2"), atari(1024, 3), atari(512, 2)],
    "pong": [training("pong", "--config ppo_pong_fast --save-every 1min")],
    "dqn": [training("dqn", "--config dqn_pong_fast --save-every 10min --keep-checkpoints 1", grace=60)],
    "speed": [
        script("ppo_speed", 2, "--num-envs 64,1024,16384,65536 --num-seeds 1,64 --rounds 3 --seconds 1 --no-start-up"),
        script("dqn_speed", 2, "--num-envs 64,1024,4096 --rounds 2 --seconds 1"),
        script("pqn_speed", 2, "--num-envs 64,1024,4096,16384 --rounds 2 --seconds 3"),
        alone("dqn_minatar_breakout", 1.5),
        alone("rainbow_minatar_breakout", 1.5),
        script("replay_speed", 2, "--rounds 3 --seconds 1"),
        script("sac_speed", 2, "--only plain,population --num-envs 1,256,4096 --gradient-steps 10000"),
    ],
    "same_bits": [check("same_bits", 2)],
    "control": [
        training("td3_fast", "--config td3_cheetah_run_fast --save-every 5min --keep-checkpoints 1", grace=60),
        training("sac_fast", "--config sac_cheetah_run_fast --save-every 5min --keep-checkpoints 1", grace=60),
    ],
    "mujoco": [step for seed in range(3) for step in mujoco(seed)],
    "population": [
        script("population_speed", 3, "--only seeds,curve --num-envs 1,64,1024,16384 --rounds 2 --seconds 2"),
    ],
}


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="in all")
    parser.add_argument("--folder", default="runs/on_a_gpu")
    parser.add_argument("--any-device", action="store_true", help="also where JAX finds no GPU")
    parser.add_argument("--list", action="store_true", help="only say what there is")
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
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if args.list or not args.parts:
        for name, steps in PARTS.items():
            print(f"{name:<12}{', '.join(f'{step.name} ({step.minutes:g} min)' for step in steps)}")
        return 0
    end = time.monotonic() + 60 * args.minutes
    why = "" if args.any_device else why_not_here()
    if why:
        print(f"nothing is measured: {why}; --any-device does it all the same", file=sys.stderr)
        return 2
    go_through(args.parts, Path(args.folder).absolute(), end)
    return 0


def go_through(parts: list[str], folder: Path, end: float) -> None:
    """Runs what is wanted of the parts, by the clock's `end`; what is found is written down after each step."""
    folder.mkdir(parents=True, exist_ok=True)
    done = parsed(text_of(folder / RESULTS)) or {}
    for step in in_order(parts, done):
        left = end - time.monotonic()
        if not wanted(step, done, left):
            print(f"{step.name}: {'done before' if is_done(step, done) else f'{left:.0f} s are too few'}", flush=True)
            continue
        path = pool_path(done)
        words = command(step, folder, path)
        begun = before(step, folder, done) | {"command": words, "status": None} | said(step, path)
        write(folder, done | {step.name: begun})  # so that it is known to have been begun, should we be killed
        output(step, folder).unlink(missing_ok=True)
        done[step.name] = begun | run(step, words, folder, left)
        write(folder, done)


def in_order(parts: list[str], done: dict[str, dict]) -> list[Step]:
    """As they are named, but what was begun before comes last, unless it goes on where it stopped."""
    steps = [step for part in parts for step in PARTS[part]]
    return sorted(steps, key=lambda step: step.name in done and not is_training(step))


def is_training(step: Step) -> bool:
    """It can be saved, and goes on."""
    return "{run}" in step.words


def is_done(step: Step, done: dict[str, dict]) -> bool:
    """It has ended well."""
    return step.name in done and done[step.name]["status"] == 0


def wanted(step: Step, done: dict[str, dict], left: float) -> bool:
    """It has not ended well yet, and its minutes fit into the seconds that are left."""
    return not is_done(step, done) and left >= 60 * step.minutes


def pool_path(done: dict[str, dict]) -> str:
    """How Atari is stepped: through Python where envpool's own calls were tried and did not give the same games."""
    if "ffi" not in done:
        return "auto"
    entry = done["ffi"]
    return "auto" if entry["status"] == 0 and (entry["found"] or {}).get("agree") else "callback"


def said(step: Step, path: str) -> dict[str, str]:
    """What the words of a command may not show: the preset of a training that goes on, how Atari is stepped."""
    preset = {"preset": step.words[step.words.index("--config") + 1]} if is_training(step) else {}
    return preset | ({"pool_path": path} if "{pool_path}" in step.words else {})


def before(step: Step, folder: Path, done: dict[str, dict]) -> dict:
    """What is kept of a step that was begun before: all of one that goes on; or under `earlier`, the oldest first."""
    if step.name not in done or goes_on(step, folder):
        return done.get(step.name, {})
    last = {"found": None} | done[step.name]
    oldest = last.pop("earlier", [])
    last["found"] = last["found"] or parsed(text_of(output(step, folder)))  # we were killed before we had read it
    return {"earlier": [*oldest, last]}


def output(step: Step, folder: Path) -> Path:
    """What a script writes, anew each time; a training does not."""
    return folder / f"{step.name}.json"


def goes_on(step: Step, folder: Path) -> bool:
    """A training that had begun."""
    return is_training(step) and (folder / step.name / "config.yaml").exists()


def environment() -> dict[str, str]:
    """Of a child: it finds the package, whether or not it is installed, and what we find."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}


def command(step: Step, folder: Path, path: str) -> list[str]:
    """Its words. A training begins in its folder, or goes on there if it had begun, and knows the rest itself."""
    words = [word.replace("{folder}", str(folder)).replace("{pool_path}", path) for word in step.words]
    if not is_training(step):
        return words
    place, at = folder / step.name, words.index("{run}")
    if goes_on(step, folder):
        return [*words[:at], "--resume", str(place)]
    return [*words[:at], "--run-dir", str(place), *words[at + 1 :]]


def run(step: Step, words: list[str], folder: Path, left: float) -> dict:
    """A step's end, and what it wrote: a benchmark's numbers, or a run's summary and curve."""
    place = folder / step.name
    if place.is_dir() and not goes_on(step, folder):
        shutil.rmtree(place)  # a training that was killed before it had written anything
    seconds = left if is_training(step) else min(left, 120 * step.minutes)
    print("$ python", *words, f"({seconds:.0f} s)", flush=True)
    began = time.monotonic()
    status, out, timed_out = watch(words, max(seconds - step.grace, 5), max(step.grace, KILL_AFTER))
    print(out[-SHOWN:], flush=True)
    took = round(time.monotonic() - began, 1)
    entry = {"status": status, "timed_out": timed_out, "seconds": took, "output": out[-SHOWN:]}
    if is_training(step):
        return entry | {"found": parsed(text_of(place / "summary.json")), "curve": curve(place / "metrics.jsonl")}
    return entry | {"found": parsed(text_of(output(step, folder)))}


def watch(words: list[str], seconds: float, grace: float) -> tuple[int, str, bool]:
    """Status and output of a process, and whether its time was over: then it and its children are told to stop.

    A training takes that as a wish to be saved. What is still there after the grace is killed.
    """
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own
    )
    timed_out = False
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        timed_out, out = True, stop(process, grace)
    except BaseException:  # we are told to stop
        stop(process, grace)
        raise
    return process.returncode, out, timed_out


def stop(process: subprocess.Popen, grace: float) -> str:
    """Ends a process and its children, and says what it printed."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        out, _ = process.communicate(timeout=grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    return out


def curve(path: Path) -> list[dict]:
    """Rows of metrics.jsonl as evenly as few of them allow, the last one among them."""
    rows = [row for line in text_of(path).splitlines() if (row := parsed(line))]
    every = -(-len(rows) // MOST_ROWS) or 1
    return [{name: row.get(name) for name in CURVE} for row in rows[::-1][::every][::-1]]


def text_of(path: Path) -> str:
    """What a file holds; "" if there is none."""
    return path.read_text() if path.exists() else ""


def parsed(text: str) -> Any:
    """A JSON; None of one that was killed before it was whole."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def write(folder: Path, done: dict[str, dict]) -> None:
    """Whole or not at all, for we may be killed meanwhile."""
    aside = folder / f"{RESULTS}.new"
    aside.write_text(json.dumps(done, indent=2) + "\n")
    aside.replace(folder / RESULTS)


def why_not_here() -> str:
    """Why this machine will not do; "" where it will. Asked of a child, for who asks JAX holds the GPU."""
    code = "import envpool, jax; print(jax.default_backend())"
    asked = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        return last_words(asked)
    backend = asked.stdout.split()[-1]
    return "" if backend == "gpu" else f"JAX computes on the {backend} here"


def last_words(ended: subprocess.CompletedProcess) -> str:
    """Why a process did not end well."""
    return (ended.stderr.strip().splitlines() or [f"python ended with status {ended.returncode}"])[-1]


def ffi() -> dict:
    """Whether envpool's own calls load, and give what Python's give."""
    import jax
    import numpy as np

    from jaxrl_fast import envs
    from jaxrl_fast.envs.envpool import pool
    from jaxrl_fast.types import HostEnvConfig

    def play(path):
        env = envs.make("envpool/Pong-v5", 8, HostEnvConfig((0,), bridge=path))

        def steps(key):
            state, _ = env.reset(key)
            return jax.lax.scan(env.step, state, jax.numpy.zeros((500, 8), jax.numpy.int32))[1]

        return jax.device_get(jax.jit(steps)(jax.random.key(0)))

    why = pool.ffi_unavailable_reason()
    same = None if why else jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), play("ffi"), play("callback"))
    return {"device": str(jax.devices()), "why_no_ffi": why, "agree": same and all(jax.tree.leaves(same))}


SMALL = dict(env="Breakout-MinAtar", num_envs=32, eval_episodes=1, tensorboard=False, log_level="quiet")
SMALL |= dict(compile_cache=False)
TRAINED = {
    "ppo": dict(total_steps=20_480, agent=dict(rollout_length=32, network="minatar")),
    "dqn": dict(
        total_steps=8_192, agent=dict(buffer_size=8_192, batch_size=32, learning_starts=512, network="minatar")
    ),
}


def bits() -> dict:
    """SHA-256 of the parameters that small trainings end with."""
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
    """Whether two processes with --xla_gpu_deterministic_ops=true end with the same parameters, and without it."""
    return {name: same_twice(more) for name, more in (("deterministic", SAME_BITS), ("as_it_is", {}))}


def same_twice(more: dict[str, str]) -> dict:
    """By algorithm, whether two processes in this environment end with the same bits; or why one of them failed."""
    words, digests = [sys.executable, __file__, "--child", "bits"], []
    for _ in range(2):
        ended = subprocess.run(words, env=environment() | more, capture_output=True, text=True)
        if ended.returncode:
            return {"failed": last_words(ended)}
        digests.append(json.loads(ended.stdout.strip().splitlines()[-1]))
    first, second = digests
    return {algo: first[algo] == second[algo] for algo in first}


CHECKS = {"ffi": ffi, "bits": bits, "same_bits": same_bits}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a step is told as well
    sys.exit(main())
