"""All that is to be measured on a GPU, unattended, in parts that fit into the time there is.

    python benchmarks/on_a_gpu.py ffi speed --minutes 9 --folder results
    python benchmarks/on_a_gpu.py pong --minutes 9 --folder results       # again and again: it goes on where it stopped
    python benchmarks/on_a_gpu.py --list

Each step is a process of its own with a share of the minutes that are left; what it printed, how it ended and how long
it took is written to on_a_gpu.json after each, so that a machine taken away has not run for nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
FFI = """
import jax, numpy as np
from jaxrl_fast import envs
from jaxrl_fast.types import Conditions
from jaxrl_fast.envs import envpool
print("device", jax.devices(), "why no ffi:", repr(envpool.why_no_ffi()))
def play(path):
    env = envs.make("envpool/Pong-v5", 8, Conditions((0,), path=path))
    def run(key):
        state, first = env.reset(key)
        return jax.lax.scan(env.step, state, jax.numpy.zeros((500, 8), jax.numpy.int32))[1]
    return jax.device_get(jax.jit(run)(jax.random.key(0)))
same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), play("ffi"), play("callback"))
print("ffi and callback agree:", all(jax.tree.leaves(same)))
"""
MANY = "8,32,128,512,1024"
PARTS = {  # commands, run in this order
    "ffi": [["-c", FFI]],
    "speed": [
        [
            "benchmarks/atari_speed.py",
            "--num-envs",
            MANY,
            "--preset",
            "ppo_pong_fast",
            "--output",
            "{folder}/atari.json",
        ],
        ["benchmarks/ppo_speed.py", "--num-envs", "64,1024,16384,65536", "--num-seeds", "1,64"],
        ["benchmarks/dqn_speed.py", "--num-envs", "1,64,1024,4096"],
        ["benchmarks/pqn_speed.py", "--num-envs", "64,1024,4096,16384"],
        ["benchmarks/replay_speed.py"],
    ],
    "population": [["benchmarks/population_speed.py", "--num-envs", "1,8,64,512,4096,16384"]],
    "pong": [["-m", "jaxrl_fast.train", "--config", "ppo_pong_fast", "{run:pong}"]],
    "dqn": [["-m", "jaxrl_fast.train", "--config", "dqn_pong", "{run:dqn}"]],
}


def main():
    """Runs the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="in all")
    parser.add_argument("--folder", default="gpu_results")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    args = parser.parse_args()
    if args.list or not args.parts:
        print("\n".join(f"{name:<12}{len(steps)} steps" for name, steps in PARTS.items()))
        return
    folder, end = Path(args.folder), time.monotonic() + 60 * args.minutes
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "on_a_gpu.json"
    done = json.loads(path.read_text()) if path.exists() else []
    steps = [step for part in args.parts for step in PARTS[part]]
    for i, step in enumerate(steps):
        share = (end - time.monotonic()) / (len(steps) - i)
        done.append(run([word for part in step for word in fill(part, folder)], share))
        path.write_text(json.dumps(done, indent=2) + "\n")


def fill(word: str, folder: Path) -> list[str]:
    """A word of a command; a run begins in its folder or goes on there, saved every minute."""
    if not word.startswith("{run:"):
        return [word.replace("{folder}", str(folder))]
    place = folder / word[5:-1]
    if (place / "checkpoints").is_dir():
        return ["--resume", str(place)]
    return ["--run-dir", str(place), "--save-every", "1min"]


def run(words: list[str], seconds: float) -> dict:
    """A step's end: interrupted when its time is over, which a training takes as a wish to stop and be saved."""
    print("$ python", *[word if len(word) < 100 else "..." for word in words], f"({seconds:.0f} s)", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words], cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        out, _ = process.communicate(timeout=max(seconds - 20, 5))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
    print(out[-4000:], flush=True)
    took = round(time.monotonic() - began, 1)
    return {"command": words[:12], "status": process.returncode, "seconds": took, "output": out[-20_000:]}


if __name__ == "__main__":
    main()
