"""Check that a change of the code changes no bits: train small runs of everything and digest the results.

    PYTHONPATH=. python benchmarks/digests.py --out before.json                      # before the change
    PYTHONPATH=. python benchmarks/digests.py --out after.json --compare before.json  # after it

Run both commands on the same machine, with the same versions and the same number of cores; otherwise the bits differ.
Each case of `CASES` becomes an entry of the JSON file:

    params       SHA-256 of the agent's final state without a replay buffer: parameters, optimizer, running statistics.
                 For a run by the command line, SHA-256 of its last checkpoint, with environments and PRNG keys
    metrics      SHA-256 of the numbers of metrics.jsonl, without clocks
    keys         the names of these numbers, each with a digest of all its values, record by record
    clocks       the names that were left out
    num_records  lines of metrics.jsonl
    summary      SHA-256 of the numbers of summary.json, without clocks

No digest depends on a name: arrays are sorted by shape, dtype and bytes, and the numbers of a record by their text. A
renamed parameter or metric is therefore reported as a new name, not as a different number. `--compare` prints "same" or
"DIFFERENT" for each case. The exit status is 1 if params or metrics differ, if a case is missing, or if a name in both
files has different values. It is also 1 if a resumed run differs from an uninterrupted one. A different summary is
reported but does not fail, because its contents may change while the learned parameters stay the same.

If an option is renamed, change it in `CASES` below. The names of the cases must stay.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 2)  # before JAX looks for devices; each case sets how many it uses

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402
from gymnax.environments import spaces  # noqa: E402

import jaxrl_fast  # noqa: E402


class Line:
    """A random walk on a line. Rewards are higher near 0; it terminates beyond 3 and truncates after 50 steps."""

    default_params = ()

    def reset_env(self, key, params):
        state = jnp.array([jax.random.uniform(key, minval=-1.0), 0.0])  # position, time
        return state[:1], state

    def step_env(self, key, state, action, params):
        push = jnp.where(action == 1, 0.3, -0.3) + 0.1 * jax.random.normal(key)
        state = state + jnp.array([push, 1.0])
        died = jnp.abs(state[0]) > 3
        return state[:1], state, 1 - jnp.abs(state[0]), died, {}

    def is_truncated(self, state, params):
        return state[1] >= 50

    def action_space(self, params):
        return spaces.Discrete(2)


# Options of every run. Each case sets `log_every` so that it writes about four to ten records.
COMMON = dict(devices=1, seed=3, eval_episodes=8, eval_envs=8, tensorboard=False, log_level="quiet")
CARTPOLE = dict(env="CartPole-v1", num_envs=8, total_steps=8192, log_every=1024)
SHORT = CARTPOLE | dict(total_steps=2048, log_every=256)
PENDULUM = dict(env="Pendulum-v1", num_envs=8, total_steps=8192, log_every=1024)
MINATAR = dict(env="Breakout-MinAtar", num_envs=16, total_steps=4096, log_every=512)
POOL = dict(env="envpool/CartPole-v1", num_envs=8, total_steps=4096, log_every=512, env_options=dict(num_threads=1))
ATARI = dict(env="envpool/Breakout-v5", protocol="dqn2015", num_envs=4, total_steps=768, log_every=128)
ATARI |= dict(env_options=dict(img_height=36, img_width=36, max_episode_steps=200, num_threads=1), eval_episodes=4)

PPO = dict(rollout_length=32, num_minibatches=4, num_epochs=2, learning_rate=1e-3)
NORMALISED = PPO | dict(normalize_observations=True, normalize_rewards=True)
DQN = dict(
    buffer_size=4096,
    batch_size=32,
    replay_ratio=0.1,
    learning_starts=512,
    target_update_interval=256,
    epsilon_steps=4096,
)
DQN |= dict(learning_rate=1e-3)
GREEDY = dict(epsilon_start=0.0, epsilon_end=0.0)
RANGE = dict(v_min=0.0, v_max=100.0)
PQN = dict(rollout_length=32, num_minibatches=4, num_epochs=2, learning_rate=1e-3, epsilon_steps=4096)
RAINBOW = dict(buffer_size=4096, learning_starts=512, target_update_interval=256)

# Name of the case: options of `fit` in addition to COMMON; `preset` is its first argument.
CASES: dict[str, dict[str, Any]] = {
    "ppo_cartpole": dict(algo="ppo", **CARTPOLE, agent=PPO),
    "ppo_cartpole_target_kl": dict(algo="ppo", **CARTPOLE, agent=PPO | dict(target_kl=0.002, clip_vloss=False)),
    "ppo_pendulum_squash": dict(algo="ppo", **PENDULUM, agent=NORMALISED | dict(tanh_squash=True)),
    "ppo_pendulum": dict(algo="ppo", **PENDULUM, agent=PPO),
    "ppo_minatar": dict(algo="ppo", **MINATAR, agent=PPO),
    "dqn_cartpole": dict(algo="dqn", **CARTPOLE, agent=DQN),
    "dqn_double_dueling_n_step": dict(algo="dqn", **CARTPOLE, agent=DQN | dict(double=True, dueling=True, n_step=3)),
    "dqn_prioritised": dict(algo="dqn", **CARTPOLE, agent=DQN | dict(prioritized=True)),
    "dqn_c51": dict(algo="dqn", **CARTPOLE, agent=DQN | RANGE | dict(value_head="c51")),
    "dqn_quantile": dict(algo="dqn", **CARTPOLE, agent=DQN | dict(value_head="quantile", loss="huber")),
    "dqn_noisy": dict(algo="dqn", **CARTPOLE, agent=DQN | GREEDY | dict(noisy=True)),
    "dqn_munchausen": dict(algo="dqn", **CARTPOLE, agent=DQN | dict(munchausen=True, tau=0.5)),
    "dqn_rainbow": dict(preset="rainbow_cartpole", total_steps=8000, log_every=1000, agent=RAINBOW),
    "dqn_epsilon_ladder": dict(algo="dqn", **CARTPOLE, agent=DQN | dict(apex_alpha=7.0)),
    "dqn_minatar": dict(algo="dqn", **MINATAR, agent=DQN | dict(layer_norm=True, clip_rewards=True)),
    "pqn_cartpole": dict(algo="pqn", **CARTPOLE, agent=PQN),
    "pqn_minatar": dict(algo="pqn", **MINATAR, agent=PQN),
    "ppo_3_seeds": dict(algo="ppo", **CARTPOLE, num_seeds=3, agent=PPO),
    "dqn_2_seeds": dict(algo="dqn", **CARTPOLE, num_seeds=2, agent=DQN | dict(prioritized=True)),
    "ppo_2_shards": dict(algo="ppo", **CARTPOLE, devices=2, agent=NORMALISED),
    "dqn_2_shards": dict(algo="dqn", **CARTPOLE, devices=2, agent=DQN | dict(prioritized=True, n_step=3)),
    "dqn_2_hands": dict(algo="dqn", **SHORT, devices="auto", agent=DQN | dict(batch_size=256)),
    "ppo_own_environment": dict(algo="ppo", env=Line, num_envs=16, total_steps=8192, log_every=1024, agent=PPO),
    "ppo_pool": dict(algo="ppo", **POOL, agent=PPO),
    "ppo_pool_in_flight": dict(algo="ppo", **POOL, async_pools=2, agent=PPO),
    "ppo_pool_overlap": dict(algo="ppo", **POOL, async_pools=1, overlap=True, agent=PPO),
    "dqn_pool_in_flight": dict(algo="dqn", **POOL, async_pools=1, agent=DQN),
    "ppo_atari": dict(algo="ppo", **ATARI, agent=PPO | dict(network="dqn2013")),
    "dqn_atari": dict(algo="dqn", **ATARI, agent=DQN | dict(network="dqn2013", learning_starts=128, n_step=2)),
}
# Name: options of the first training, of the resumed run, and of an uninterrupted one. The last two must end with
# the same bits.
SPLIT_PPO = dict(algo="ppo", **CARTPOLE, eval_every=4096, agent=PPO | dict(anneal_lr=False))
SPLIT_DQN = dict(algo="dqn", **CARTPOLE, eval_every=4096, agent=DQN)
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ppo_resumed": (SPLIT_PPO | dict(total_steps=4096), dict(total_steps=8192), SPLIT_PPO),
    "dqn_resumed": (SPLIT_DQN | dict(total_steps=4096), dict(total_steps=8192), SPLIT_DQN),
}
# Cases whose runs are also evaluated: by `evaluate`, greedily and with exploration, and by `policy` on observations of
# this size.
PLAYED = {"ppo_cartpole": 4, "ppo_pendulum_squash": 3, "dqn_rainbow": 4, "pqn_cartpole": 4, "ppo_3_seeds": 4}
EVALUATIONS: dict[str, dict[str, Any]] = {"evaluated": dict(episodes=8), "explored": dict(episodes=8, explore=True)}
SWEEPS: dict[str, dict[str, Any]] = {
    "sweep": dict(algo="ppo", **CARTPOLE, seed=[0, 1], agent=PPO | dict(learning_rate=[5e-4, 2e-3])),
}
# Options of the commands `train` and `evaluate`, in separate processes; RUN stands for the run's folder.
COMMANDS: dict[str, tuple[str, str]] = {
    "command_line": (
        "ppo --env CartPole-v1 --num-envs 8 --total-steps 8192 --log-every 1024 --devices 1 --seed 3 --eval-episodes 8 "
        "--no-tensorboard --log-level quiet --agent.rollout-length 32 --agent.num-epochs 2 --run-dir RUN",
        "RUN --episodes 8",
    ),
}
ARRAYS, EVALUATION = "checkpoints/*/*.safetensors", "evaluation.json"  # in a run's folder
# Words in the names of numbers that differ between two runs with the same bits.
CLOCKS = {"time", "times", "s", "second", "seconds", "sps", "speed", "share", "duration", "memory", "mb"}


def train_run(folder: Path, preset: str | None = None, **options: Any) -> jaxrl_fast.Run:
    """Train a run in this folder."""
    return jaxrl_fast.fit(preset, **COMMON | options, run_dir=str(folder))


def train_and_resume(folder: Path, first: dict[str, Any], then: dict[str, Any]) -> jaxrl_fast.Run:
    """Train a run in this folder, then resume it."""
    run = train_run(folder, **first)
    return jaxrl_fast.fit(resume=str(run.folder), **then)


def sha(parts: list[bytes] | list[str]) -> str:
    """Digest parts, each after its length, so that the digest depends on where a part ends."""
    digest = hashlib.sha256()
    for part in parts:
        part = part if isinstance(part, bytes) else part.encode()
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def digest_arrays(arrays: list[tuple[str, tuple[int, ...], bytes]]) -> str:
    """Digest arrays, given as dtype, shape and bytes, in sorted order. Arrays without elements are left out."""
    return sha(sorted(f"{dtype}{list(shape)}".encode() + b":" + data for dtype, shape, data in arrays if data))


def digest_state(tree: Any) -> str:
    """Digest the leaves of a tree."""
    arrays = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        arrays.append((str(array.dtype), array.shape, array.tobytes()))
    return digest_arrays(arrays)


def digest_checkpoint(folder: Path) -> str:
    """Digest the arrays of a run's last checkpoint without clocks.

    Clocks are float64. An environment may have arrays with the names of clocks, but of other dtypes.
    """
    arrays = safetensors.numpy.load_file(max(folder.glob(ARRAYS)))
    kept = [x for name, x in arrays.items() if not (is_clock(name) and x.dtype == np.float64)]
    return digest_arrays([(str(x.dtype), x.shape, x.tobytes()) for x in kept])


def is_clock(name: str) -> bool:
    """Return whether the number with this name differs between two runs with the same bits."""
    return not CLOCKS.isdisjoint(re.split(r"[._/]", name))


def flatten_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values within dictionaries and lists with their names. The elements of a list share a name."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flatten_values(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from flatten_values(part, name)
    else:
        yield name, value


def digest_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Digest the numbers of records. None counts as a number, because a number may be missing; strings do not."""
    lines: list[str] = []
    columns: dict[str, list[str]] = {}
    clocks = set()
    for i, record in enumerate(records):
        numbers = [(name, x) for name, x in flatten_values(record) if x is None or isinstance(x, (int, float))]
        clocks |= {name for name, _ in numbers if is_clock(name)}
        numbers = [(name, x) for name, x in numbers if not is_clock(name)]
        lines.append(" ".join(sorted(repr(x) for _, x in numbers)))
        for name, x in numbers:
            columns.setdefault(name, []).append(f"{i} {x!r}")
    keys = {name: sha(columns[name])[:12] for name in sorted(columns)}
    return {"metrics": sha(lines), "keys": keys, "clocks": sorted(clocks), "num_records": len(records)}


def digest_run(run: jaxrl_fast.Run) -> dict[str, Any]:
    """Digest the final state, the metrics and the summary of a run."""
    opened = run.agent_state is None  # opened from its folder, not trained in this process
    params = digest_checkpoint(run.folder) if opened else digest_state(run.agent_state)
    return {"params": params, **digest_records(run.metrics), "summary": digest_records([run.summary])["metrics"]}


def digest_evaluations(run: jaxrl_fast.Run, size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Evaluate a run, apply its policy to observations, and yield the digests."""
    for name, options in EVALUATIONS.items():
        yield name, {"params": "", **digest_records([run.evaluate(**options)])}
    observations = np.random.default_rng(0).normal(size=(64, size)).astype(np.float32)
    actions = np.asarray(jaxrl_fast.load(run, which="last").policy(observations))
    yield "acted", {"params": digest_state(actions), **digest_records([])}


def digest_commands(folder: Path, train: str, evaluate: str) -> dict[str, Any]:
    """Run the commands `train` and `evaluate`, and digest the results of both."""
    for module, words in (("train", train), ("evaluate", evaluate)):
        command = [sys.executable, "-m", f"jaxrl_fast.{module}", *words.replace("RUN", str(folder)).split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    digests = digest_run(jaxrl_fast.Run.open(folder))
    evaluation = digest_records([json.loads((folder / EVALUATION).read_text(encoding="utf-8"))])
    keys = digests["keys"] | {f"evaluation.{name}": digest for name, digest in evaluation["keys"].items()}
    return digests | {"metrics": sha([digests["metrics"], evaluation["metrics"]]), "keys": keys}


def run_cases(scratch: Path, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the cases whose names contain `wanted`. Yield each name with its digests."""
    for name in (name for name in CASES if wanted in name):
        run = train_run(scratch / name, **CASES[name])
        yield name, digest_run(run)
        for what, digests in digest_evaluations(run, PLAYED[name]) if name in PLAYED else ():
            yield f"{name}.{what}", digests
    for name in (name for name in RESUMED if wanted in name):
        first, then, whole = RESUMED[name]
        yield name, digest_run(train_and_resume(scratch / name, first, then))
        yield f"{name}.never_stopped", digest_run(train_run(scratch / f"{name}.never_stopped", **whole))
    for name in (name for name in SWEEPS if wanted in name):
        common = {key: value for key, value in COMMON.items() if key not in SWEEPS[name]}
        table = jaxrl_fast.sweep(**common | SWEEPS[name], sweep_dir=str(scratch / name)).results
        yield name, {"params": "", **digest_records(table)}
    for name in (name for name in COMMANDS if wanted in name):
        yield name, digest_commands(scratch / name, *COMMANDS[name])


def compare(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Print what is the same and what differs, case by case. Return whether nothing fails."""
    well = True
    for name in before:
        old, new = before[name], after.get(name)
        if new is None:
            print(f"MISSING    {name}")
            well = False
            continue
        wrong = [what for what in ("params", "metrics") if old[what] != new[what]]
        gone, come = old["keys"].keys() - new["keys"].keys(), new["keys"].keys() - old["keys"].keys()
        wrong += [key for key in old["keys"].keys() & new["keys"].keys() if old["keys"][key] != new["keys"][key]]
        well &= not wrong
        print(f"{'DIFFERENT' if wrong else 'same':10} {name} {', '.join(wrong)}".rstrip())
        for key in sorted(gone):
            now = [other for other in sorted(come) if new["keys"][other] == old["keys"][key]]
            print(f"           {key} is now {' or '.join(now) or 'gone'}")
        if come and not gone:
            print(f"           new: {', '.join(sorted(come))}")
        if old.get("summary") != new.get("summary"):
            print("           the summary differs")
    for name in after.keys() - before.keys():
        print(f"NEW        {name}")
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description="Train small runs and digest them.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--compare", type=Path, help="JSON file of an earlier run to compare with")
    parser.add_argument("--read", type=Path, help="compare the digests of this JSON file, and train nothing")
    parser.add_argument("--only", default="", help="only cases whose names contain this")
    chosen = parser.parse_args()
    cases: dict[str, Any] = {}
    began = time.perf_counter()
    if chosen.read:
        cases = json.loads(chosen.read.read_text(encoding="utf-8"))["cases"]
    else:
        with tempfile.TemporaryDirectory() as scratch:
            for name, digests in run_cases(Path(scratch), chosen.only):
                cases[name] = digests
                short = f"params {digests['params'][:12]:12}  metrics {digests['metrics'][:12]}"
                print(f"{name:32} {short}  at {time.perf_counter() - began:.0f} s", flush=True)
    well = True
    for name in (name for name in RESUMED if name in cases):
        one, other = cases[name], cases[f"{name}.never_stopped"]
        if one["params"] != other["params"] or one["metrics"] != other["metrics"]:
            print(f"{name}: differs from the uninterrupted run")
            well = False
    print(f"{len(cases)} cases in {time.perf_counter() - began:.0f} s", flush=True)
    if chosen.out:
        made = {"cores": len(os.sched_getaffinity(0)), "jax": jax.__version__, "cases": cases}
        chosen.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if chosen.compare:
        before = json.loads(chosen.compare.read_text(encoding="utf-8"))["cases"]
        well &= compare({name: case for name, case in before.items() if chosen.only in name}, cases)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
