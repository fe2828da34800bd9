"""All that is to be measured on a GPU, unattended, on a machine that may be taken away.

Three commands of nine minutes each, for a machine that is lent for half an hour:

    python benchmarks/on_a_gpu.py ffi same_bits speed --minutes 9
    python benchmarks/on_a_gpu.py pong --minutes 9
    python benchmarks/on_a_gpu.py speed pong --minutes 9          # what was not reached, and the run goes on

Each step is a process of its own. It begins if the minutes that it wants are left, and what it printed, measured and
how it ended is written to `on_a_gpu.json` at once: that one file is all that need be copied. A step that ended well is
not repeated by a later command; a training goes on where it stopped. `--list` says what there is.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "on_a_gpu.json"
SHOWN = 4_000  # characters of what a step printed, its last ones
SAME_BITS = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}


class Step(NamedTuple):
    """A command: a script with `--output NAME.json`, a check of this file, or a training."""

    name: str
    minutes: float  # it is not begun with less; a script gets twice as many if they are there, a training all
    words: tuple[str, ...]
    grace: float = 20  # seconds from the signal to stop to the one that kills: a replay takes time to save


def script(name: str, minutes: float, words: str, file: str = "") -> Step:
    """A benchmark."""
    return Step(
        name, minutes, (f"benchmarks/{file or name}.py", *words.split(), "--output", "{folder}/" + name + ".json")
    )


def check(name: str, minutes: float) -> Step:
    """One of `CHECKS`."""
    return Step(name, minutes, ("benchmarks/on_a_gpu.py", "--child", name, "--output", "{folder}/" + name + ".json"))


def training(name: str, words: str, grace: float = 20) -> Step:
    """A run in a folder of its own."""
    return Step(name, 2, ("-m", "jaxrl_fast.train", "{run}", *words.split()), grace)


def atari(num_envs: int, minutes: float) -> Step:
    """One number of environments; all of them share a file."""
    words = (
        f"benchmarks/atari_speed.py --preset ppo_pong_fast --num-envs {num_envs} --in-flight 0,2 --rounds 2 --seconds 2"
    )
    return Step(f"atari_{num_envs}", minutes, (*words.split(), "--append", "--output", "{folder}/atari.json"))


PARTS = {  # run in the order in which they are named
    "ffi": [check("ffi", 1)],
    "same_bits": [check("same_bits", 2)],
    "speed": [
        atari(128, 1.5),
        script("ppo_speed", 2, "--num-envs 64,1024,16384,65536 --num-seeds 1,64 --rounds 3 --seconds 1 --no-start-up"),
        atari(1024, 3),
        script("dqn_speed", 2, "--num-envs 64,1024,4096 --rounds 2 --seconds 1"),
        script("pqn_speed", 2, "--num-envs 64,1024,4096,16384 --rounds 2 --seconds 3"),
        script("replay_speed", 2, "--rounds 3 --seconds 1"),
        atari(32, 1.5),
        atari(512, 2),
    ],
    "population": [
        script("population_speed", 3, "--only seeds,curve --num-envs 1,64,1024,16384 --rounds 2 --seconds 2"),
    ],
    "pong": [training("pong", "--config ppo_pong_fast --save-every 1min")],
    "dqn": [training("dqn", "--config dqn_pong_fast --save-every 10min --keep 1", grace=90)],
}


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="in all")
    parser.add_argument("--folder", default=".gpu/results")
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
    folder = Path(args.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    done = read(folder)
    for step in (step for part in args.parts for step in PARTS[part]):
        left = end - time.monotonic()
        if not wanted(step, done, left):
            print(f"{step.name}: {'done before' if is_done(step, done) else f'{left:.0f} s are too few'}", flush=True)
            continue
        done[step.name] = run(step, folder, left)
        (folder / RESULTS).write_text(json.dumps(done, indent=2) + "\n")
    return 0


def read(folder: Path) -> dict[str, dict]:
    """What earlier commands found, by the step's name."""
    path = folder / RESULTS
    return json.loads(path.read_text()) if path.exists() else {}


def is_done(step: Step, done: dict[str, dict]) -> bool:
    """It has ended well."""
    return step.name in done and done[step.name]["status"] == 0


def wanted(step: Step, done: dict[str, dict], left: float) -> bool:
    """It has not ended well yet, and its minutes fit into the seconds that are left."""
    return not is_done(step, done) and left >= 60 * step.minutes


def environment() -> dict[str, str]:
    """Of a child: it finds the package, whether or not it is installed, and what we find."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}


def command(step: Step, folder: Path) -> list[str]:
    """Its words. A training begins in its folder, or goes on there if it had begun, and knows the rest itself."""
    words = [word.replace("{folder}", str(folder)) for word in step.words]
    if "{run}" not in words:
        return words
    place, at = folder / step.name, words.index("{run}")
    if (place / "config.yaml").exists():
        return [*words[:at], "--resume", str(place)]
    return [*words[:at], "--run-dir", str(place), *words[at + 1 :]]


def run(step: Step, folder: Path, left: float) -> dict:
    """A step's end: told to stop when its time is over, which a training takes as a wish to be saved."""
    place = folder / step.name
    if place.is_dir() and not (place / "config.yaml").exists():
        shutil.rmtree(place)  # a training that was killed before it had written anything
    seconds = left if "{run}" in step.words else min(left, 120 * step.minutes)
    words = command(step, folder)
    print("$ python", *words, f"({seconds:.0f} s)", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        out, _ = process.communicate(timeout=max(seconds - step.grace, 5))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, _ = process.communicate(timeout=step.grace)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
    print(out[-SHOWN:], flush=True)
    took = round(time.monotonic() - began, 1)
    entry = {"command": words, "status": process.returncode, "seconds": took, "output": out[-SHOWN:]}
    return entry | {"found": found(step, words, place)}


def found(step: Step, words: list[str], place: Path) -> dict | None:
    """What the step wrote: a benchmark's numbers, a run's summary."""
    path = Path(words[words.index("--output") + 1]) if "--output" in words else place / "summary.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # it was killed before it had written, or while it wrote
        return None


def why_not_here() -> str:
    """Why this machine will not do; "" where it will. Asked of a child, for who asks JAX holds the GPU."""
    code = "import envpool, jax; print(jax.default_backend())"
    asked = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        return (asked.stderr.strip().splitlines() or [f"python ended with status {asked.returncode}"])[-1]
    backend = asked.stdout.split()[-1]
    return "" if backend == "gpu" else f"JAX computes on the {backend} here"


def ffi() -> dict:
    """Whether envpool's own calls load, and give what Python's give."""
    import jax
    import numpy as np

    from jaxrl_fast import envs
    from jaxrl_fast.envs import envpool
    from jaxrl_fast.types import Conditions

    def play(path):
        env = envs.make("envpool/Pong-v5", 8, Conditions((0,), path=path))

        def steps(key):
            state, _ = env.reset(key)
            return jax.lax.scan(env.step, state, jax.numpy.zeros((500, 8), jax.numpy.int32))[1]

        return jax.device_get(jax.jit(steps)(jax.random.key(0)))

    why = envpool.why_no_ffi()
    same = None if why else jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), play("ffi"), play("callback"))
    return {"device": str(jax.devices()), "why_no_ffi": why, "agree": same and all(jax.tree.leaves(same))}


SMALL = dict(env="Breakout-MinAtar", num_envs=32, eval_episodes=1, tensorboard=False, log_level="quiet")
SMALL |= dict(compile_cache=False)
TRAINED = {
    "ppo": dict(total_steps=20_480, agent=dict(rollout_length=32, network="minatar")),
    "dqn": dict(total_steps=8_192, agent=dict(capacity=8_192, batch_size=32, learning_starts=512, network="minatar")),
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
    words = [sys.executable, __file__, "--child", "bits"]
    ends = {}
    for name, more in (("deterministic", SAME_BITS), ("as_it_is", {})):
        outs = [
            subprocess.run(words, check=True, env=environment() | more, capture_output=True, text=True).stdout
            for _ in range(2)
        ]
        first, second = (json.loads(out.strip().splitlines()[-1]) for out in outs)
        ends[name] = {algo: first[algo] == second[algo] for algo in first}
    return ends


CHECKS = {"ffi": ffi, "bits": bits, "same_bits": same_bits}

if __name__ == "__main__":
    sys.exit(main())
