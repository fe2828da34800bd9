"""Measure what a second process costs on one machine, and compute what a run on many hosts would send and write.

    python benchmarks/several_machines.py                # both; nothing else should run on the machine
    python benchmarks/several_machines.py --rounds 0     # the computation alone

Measured: PPO on CartPole in two processes with one core each, beside one process with two cores, in turn; the speed is
that of the training alone (`env_steps_per_s` of summary.json), compilation excluded. The ratio is that of the medians.

Computed, for 64 hosts with 8 GPUs each and one process a GPU: the parameters are those of the preset. A ring sends
2 (n - 1) / n times the gradient from each of n GPUs for a sum. A checkpoint has the parameters and the optimizer once
and each process's rows. `latency` assumes that a sum over all GPUs takes 100 microseconds besides the bytes, which is
not measured.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import side_by_side

RUN = (
    "ppo --env CartPole-v1 --num-envs 1024 --rollout-length 32 --num-minibatches 4 --total-steps {steps} --loggers none"
)
RUN += " --eval-episodes 0"
PRESETS = ("ppo_minatar_breakout", "dqn_minatar_breakout", "sac_half_cheetah", "ppo_breakout_fast")
HOSTS, GPUS, ENVS_PER_GPU, LATENCY_S = 64, 8, 1024, 100e-6


def main():
    """Measure, compute, print and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20_000_000)
    parser.add_argument("--output", default="benchmarks/results/several_machines_cpu.json")
    arguments = parser.parse_args()
    path = Path(arguments.output)
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found["paper"] = {"hosts": HOSTS, "gpus": GPUS, "presets": {name: on_paper(name) for name in PRESETS}}
    if arguments.rounds:
        measured = cost_of_a_process(arguments.rounds, arguments.steps)
        found |= side_by_side.Report("several_machines", arguments.output).content | measured
    print(json.dumps(found, indent=1))
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def cost_of_a_process(rounds, steps):
    """Return the speeds of one process with two cores and of two with one, in turn."""
    speeds = {1: [], 2: []}
    for _ in range(rounds):
        for count, found in speeds.items():
            found.append(speed(count, steps))
            print(f"{count}: {found[-1]:,.0f} steps/s", flush=True)
    one, two = (statistics.median(found) for found in speeds.values())
    return {"steps": steps, "one_process": speeds[1], "two_processes": speeds[2], "ratio": two / one}


def speed(count, steps):
    """Return the environment steps per second of a run in `count` processes that share two cores."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1] // 2 * 2
        words = [*RUN.format(steps=steps).split(), "--run-dir", f"{folder}/run"]
        words += ["--devices", "2"] if count == 1 else []
        cores = sorted(os.sched_getaffinity(0))[:2]
        started = []
        for i in range(count):
            own = ["--distributed", f"127.0.0.1:{port},{count},{i}"] if count > 1 else []
            pin = ["taskset", "-c", str(cores[i]) if count > 1 else ",".join(map(str, cores))]
            environ = os.environ | {"JAX_NUM_CPU_DEVICES": str(2 // count)}
            command = [*pin, sys.executable, "-m", "jaxrl_fast.train", *words, *own]
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environ))
        assert [process.wait() for process in started] == [0] * count
        return json.loads(Path(folder, "run", "summary.json").read_text())["env_steps_per_s"]


def on_paper(preset):
    """Return the bytes of a sum, of a checkpoint and of messages, and the seconds that sums take in an update."""
    import jax

    from jaxrl_fast.config import load
    from jaxrl_fast.parallel import program
    from jaxrl_fast.training import plan

    words = ["--config", preset, "--dry-run", "--replay.storage", "device"]
    words = words if preset.startswith(("dqn", "sac")) else words[:3]
    ready = plan.make_plan(load.from_command_line(words))
    state = program.shapes(ready.env, ready.agent, ready.placement)
    nbytes = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    gradient, learner = nbytes(ready.agent.parameters(state.agent)), nbytes(ready.agent.policy_state(state.agent))
    num, total = HOSTS * GPUS, HOSTS * GPUS * ENVS_PER_GPU
    replay = nbytes(state.agent) - learner  # of the size in the preset, which all processes divide
    each = (nbytes(state) - learner - replay) // ready.settings.options.num_envs
    rows = each * ENVS_PER_GPU + replay // num
    agent = ready.settings.agent
    steps = agent.num_epochs * agent.num_minibatches if hasattr(agent, "num_epochs") else None
    sent = 2 * (num - 1) * gradient // num
    return {
        "gradient_bytes": gradient,
        "sent_bytes_of_a_sum": sent,
        "gradient_steps_of_an_update": steps,
        "latency_s_of_an_update": None if steps is None else steps * LATENCY_S,
        "checkpoint_bytes_of_process_0": learner + rows,
        "checkpoint_bytes_of_each_other_process": rows,
        "checkpoint_bytes": learner + num * rows,
        "num_envs": total,
        "messages_to_process_0_per_s": (num - 1) / 2.0,
        "files_of_a_checkpoint": num + 2,
        "bytes_that_a_resume_reads": num * (learner + 2 * rows),
    }


if __name__ == "__main__":
    main()
