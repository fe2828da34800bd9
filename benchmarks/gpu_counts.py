"""Count what a GPU would run for each preset on the device, compiled on a machine without a GPU.

    pip install "jaxrl_fast[gpu-check]"
    PYTHONPATH=. python benchmarks/gpu_counts.py --out benchmarks/results/gpu_counts.json
    PYTHONPATH=. python benchmarks/gpu_counts.py --few --compare benchmarks/results/gpu_counts.json   # as in CI

A program follows from versions, options and the GPU, so the numbers are exact, but they are no times. Each entry has
the memory of the program in bytes and, of an environment step, a gradient step and an update, the kernels, the copies
among them, how often the host decides something, and the collectives. `--compare` fails if a number of kernels or host
waits is larger than in the file, or a number of collectives differs. `--few` compiles the programs of `TABLE` only,
and `--cluster` those of `CLUSTER`: with `--gpus 2x8xh200`, for two hosts with eight GPUs each.
"""

import argparse
import json
import math
import shlex
import sys
import time
from pathlib import Path

from jaxrl_fast.config import load, presets
from jaxrl_fast.gpu_check import targets

TABLE = (  # the programs that CI compares, with the sizes that a GPU is used for
    "--config ppo_cartpole --num-envs 2048",
    "--config ppo_minatar_breakout --num-envs 1024",
    "--config pqn_minatar_breakout --num-envs 1024",
    "--config ppo_cartpole_no_velocity --num-envs 1024",
    "--config ppo_pendulum --num-envs 256",
    "--config dqn_cartpole --num-envs 1024",
    "--config dqn_minatar_breakout --num-envs 64",
    "--config sac_pendulum --num-envs 64",
    "--config td3_pendulum --num-envs 64",
    "--config rainbow_cartpole --num-envs 64",
    "--config ppo_cartpole --num-envs 16384 --devices 8",
)
CLUSTER = (  # programs of several hosts
    "--config ppo_cartpole --num-envs 32768",
    "--config ppo_minatar_breakout --num-envs 16384",
    "--config pqn_minatar_breakout --num-envs 16384",
    "--config dqn_minatar_breakout --num-envs 64",
    "--config sac_pendulum --num-envs 64",
)


def count(line, gpu):
    """Return the entry of a command line for a GPU, or None if it cannot be compiled for one; then print the reason."""
    import jax

    from jaxrl_fast.parallel import program
    from jaxrl_fast.training import gpu_report

    jax.clear_caches()
    try:
        plan = gpu_report.make_plan(
            load.from_command_line([*shlex.split(line), "--total-steps", "20M", "--dry-run"]), gpu
        )
    except ValueError as error:
        print(f"{line}: left out: {error}")
        return None
    with gpu_report.compiling(plan.settings, gpu), targets.quiet():
        compiled = gpu_report.compiled(plan)
    found = gpu_report.counts(gpu_report.read(compiled.as_text()))
    return {"memory": program.most_bytes(compiled)} | found


def problems(before, now):
    """Return a sentence for each number of kernels or host waits that has grown, and of collectives that differs."""
    found = []
    for line, of_gpus in now.items():
        for gpu, entry in of_gpus.items():
            for step in set(entry) - {"memory"}:
                old = before.get(line, {}).get(gpu, {}).get(step, {})
                worse = {name for name in ("kernels", "host_waits") if entry[step][name] > old.get(name, math.inf)}
                worse |= {"collectives"} if entry[step]["collectives"] != old.get("collectives") else set()
                for name in sorted(worse):
                    found.append(f"{line} on {gpu}: {name} of {step}: {entry[step][name]}, before {old.get(name)}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--compare")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--gpus", default="h200,t4")
    args = parser.parse_args()
    gpus = args.gpus.split(",")
    for gpu in gpus:
        targets.check(gpu)
    targets.start()
    import jax

    lines = (
        [*CLUSTER]
        if args.cluster
        else [*TABLE]
        if args.few
        else [*TABLE, *(f"--config {name}" for name in presets.shipped())]
    )
    results = {}
    for line in lines:
        start = time.perf_counter()
        entries = {gpu: entry for gpu in gpus if (entry := count(line, gpu))}
        if entries:
            results[line] = entries
            print(f"{line}: {time.perf_counter() - start:.0f} s", flush=True)
    if args.out:
        text = {"jax": jax.__version__, "programs": results}
        Path(args.out).write_text(json.dumps(text, indent=1) + "\n")
    if args.compare:
        before = json.loads(Path(args.compare).read_text())
        if before["jax"] != jax.__version__:
            print(f"skipped: jax {before['jax']} compiled {args.compare}, and this is jax {jax.__version__}")
            sys.exit(3)
        if found := problems(before["programs"], results):
            sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
