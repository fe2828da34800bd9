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

`evaluated`, `explored`, `acted` and `exported_FORMAT` after a case's name are what its policy does afterwards.
A case that raises an error is reported as FAILED; the other cases run nevertheless, and the exit status is 1.

If an option is renamed, change it in the dictionaries above `CASES`, or in a case. The names of the cases must stay.
Environments and networks that other processes import are in `digest_parts.py`.
"""

import argparse
import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 2)  # before JAX looks for devices; each case sets how many it uses

import jax.export  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
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


class Faulty(Line):
    """The same walk, whose reward is NaN in one of 64 steps on average."""

    def step_env(self, key, state, action, params):
        obs, state, reward, died, info = super().step_env(key, state, action, params)
        return obs, state, jnp.where(jax.random.uniform(key) < 1 / 64, jnp.nan, reward), died, info


# Options of every run. Each case sets `log_every` so that it writes about four to ten records.
COMMON = dict(devices=1, seed=3, eval_episodes=8, eval_envs=8, loggers=(), log_level="quiet")
CARTPOLE = dict(env="CartPole-v1", num_envs=8, total_steps=8192, log_every=1024)
SHORT = CARTPOLE | dict(total_steps=2048, log_every=256)
PENDULUM = dict(env="Pendulum-v1", num_envs=8, total_steps=8192, log_every=1024)
MINATAR = dict(env="Breakout-MinAtar", num_envs=16, total_steps=4096, log_every=512)
POOL = dict(env="envpool/CartPole-v1", num_envs=8, total_steps=4096, log_every=512, env_options=dict(num_threads=1))
ATARI = dict(env="envpool/Breakout-v5", protocol="dqn2015", num_envs=4, total_steps=768, log_every=128)
ATARI |= dict(env_options=dict(img_height=36, img_width=36, max_episode_steps=200, num_threads=1), eval_episodes=4)

PPO = dict(rollout_length=32, num_minibatches=4, num_epochs=2, learning_rate=1e-3)
NORMALISED = PPO | dict(normalize_observations=True, rewards="normalized")
DQN = {
    "replay.size": 4096,
    "batch_size": 32,
    "replay_ratio": 0.1,
    "learning_starts": 512,
    "target.interval": 256,
    "explore.steps": 4096,
}
DQN |= dict(learning_rate=1e-3)
GREEDY = {"explore.start": 0.0, "explore.end": 0.0}
RANGE = {"value.v_min": 0.0, "value.v_max": 100.0}
PQN = {"rollout_length": 32, "num_minibatches": 4, "num_epochs": 2, "learning_rate": 1e-3, "explore.steps": 4096}
TINY = dict(env="CartPole-v1", num_envs=4, total_steps=1024, log_every=128)
TORQUE = dict(env="Pendulum-v1", num_envs=4, total_steps=1024, log_every=128)
TORQUE_PPO = TORQUE | dict(num_envs=8, total_steps=2048, log_every=256)
BOARD = MINATAR | dict(total_steps=2048, log_every=256)
GYM = {"env": "digest_parts:Walk", "num_envs": 4, "total_steps": 1024, "log_every": 128, "host.workers": 0}
GAME = dict(env="games/Paddles", num_envs=8, total_steps=2048, log_every=256)
GAME |= dict(env_options=dict(max_steps_in_episode=100))
FRAMES = dict(env="games/Paddles", num_envs=4, total_steps=1024, log_every=128)
CHANGES = dict(resize="20x20", frame_stack=2, frame_skip=2)
SCREEN = dict(observation="image", opponent="scripted", max_steps_in_episode=100) | CHANGES

SMALL_PPO = PPO | {"network.hidden_sizes": (16,)}
SMALL_PQN = PQN | {"network.hidden_sizes": (16,), "explore.steps": 1024}
SMALL_DQN = {"replay.size": 512, "batch_size": 16, "replay_ratio": 0.1, "learning_starts": 128, "explore.steps": 512}
SMALL_DQN |= {"target.interval": 128, "learning_rate": 1e-3, "network.hidden_sizes": (16,)}
CRITICS = {
    "replay.size": 512,
    "batch_size": 16,
    "replay_ratio": 0.25,
    "learning_starts": 128,
    "network.hidden_sizes": (16, 16),
}
TORQUE_RANGE = {"value.v_min": -200.0, "value.v_max": 0.0}
CROSSQ = {"target": "none", "target.warmup": 20}
NOISE = {"noise": "ou", "noise.theta": 0.15, "noise.std": 0.38}
GRU = {"memory": "gru", "memory.size": 8, "memory.sequence_length": 16}
LSTM = {"memory": "lstm", "memory.size": 8, "memory.sequence_length": 10, "memory.burn_in": 2}
LRU = {"memory": "lru", "memory.size": 8, "memory.sequence_length": 16, "memory.burn_in": 4}
GSDE = {"policy": "gsde", "policy.sample_freq": 8}
KL = {"schedule": "kl", "schedule.target": 0.01}
HOST_REPLAY = {"replay.storage": "host", "replay.compression": "none"}
DISK_REPLAY = {"replay.storage": "disk", "replay.compression": "zstd"}
OWN_NETWORK = {"network": "digest_parts:Wide", "network.options": dict(width=12), "network.hidden_sizes": (16,)}
RAINBOW = {"replay.size": 4096, "learning_starts": 512, "target.interval": 256}

# Name of the case: options of `fit` in addition to COMMON; `preset` is its first argument.
CASES: dict[str, dict[str, Any]] = {
    "ppo_cartpole": dict(algo="ppo", **CARTPOLE, agent=PPO),
    "ppo_cartpole_target_kl": dict(algo="ppo", **CARTPOLE, agent=PPO | dict(target_kl=0.002, clip_vloss=False)),
    "ppo_pendulum_squash": dict(algo="ppo", **PENDULUM, agent=NORMALISED | dict(policy="tanh")),
    "ppo_pendulum": dict(algo="ppo", **PENDULUM, agent=PPO),
    "ppo_minatar": dict(algo="ppo", **MINATAR, agent=PPO),
    "dqn_cartpole": dict(algo="dqn", **CARTPOLE, agent=DQN),
    "dqn_double_dueling_n_step": dict(
        algo="dqn", **CARTPOLE, agent=DQN | {"double": True, "dueling": True, "replay.n_step": 3}
    ),
    "dqn_prioritised": dict(algo="dqn", **CARTPOLE, agent=DQN | dict(replay="prioritized")),
    "dqn_c51": dict(algo="dqn", **CARTPOLE, agent=DQN | RANGE | dict(value="c51")),
    "dqn_quantile": dict(algo="dqn", **CARTPOLE, agent=DQN | {"value": "quantile", "value.loss": "huber"}),
    "dqn_noisy": dict(algo="dqn", **CARTPOLE, agent=DQN | GREEDY | dict(noisy=True)),
    "dqn_munchausen": dict(algo="dqn", **CARTPOLE, agent=DQN | {"bonus": "munchausen", "target.tau": 0.5}),
    "dqn_rainbow": dict(preset="rainbow_cartpole", total_steps=8000, log_every=1000, agent=RAINBOW),
    "dqn_epsilon_ladder": dict(algo="dqn", **CARTPOLE, agent=DQN | {"explore.apex_alpha": 7.0}),
    "dqn_minatar": dict(algo="dqn", **MINATAR, agent=DQN | {"network.layer_norm": True, "rewards": "sign"}),
    "pqn_cartpole": dict(algo="pqn", **CARTPOLE, agent=PQN),
    "pqn_minatar": dict(algo="pqn", **MINATAR, agent=PQN),
    "ppo_3_seeds": dict(algo="ppo", **CARTPOLE, num_seeds=3, agent=PPO),
    "dqn_2_seeds": dict(algo="dqn", **CARTPOLE, num_seeds=2, agent=DQN | dict(replay="prioritized")),
    "ppo_2_shards": dict(algo="ppo", **CARTPOLE, devices=2, agent=NORMALISED),
    "dqn_2_shards": dict(algo="dqn", **CARTPOLE, devices=2, agent=DQN | {"replay": "prioritized", "replay.n_step": 3}),
    "dqn_2_hands": dict(algo="dqn", **SHORT, devices="auto", agent=DQN | dict(batch_size=256)),
    "ppo_own_environment": dict(algo="ppo", env=Line, num_envs=16, total_steps=8192, log_every=1024, agent=PPO),
    "ppo_pool": dict(algo="ppo", **POOL, agent=PPO),
    "ppo_pool_in_flight": {"algo": "ppo", **POOL, "host.async_pools": 2, "agent": PPO},
    "ppo_pool_overlap": {"algo": "ppo", **POOL, "host.async_pools": 1, "host.overlap": True, "agent": PPO},
    "dqn_pool_in_flight": {"algo": "dqn", **POOL, "host.async_pools": 1, "agent": DQN},
    "ppo_atari": dict(algo="ppo", **ATARI, agent=PPO | dict(network="dqn2013")),
    "dqn_atari": dict(
        algo="dqn", **ATARI, agent=DQN | {"network": "dqn2013", "learning_starts": 128, "replay.n_step": 2}
    ),
    "sac": dict(algo="sac", **TORQUE, agent=CRITICS),
    "sac_crossq": dict(algo="sac", **TORQUE, agent=CRITICS | CROSSQ | dict(normalize_observations=True)),
    "sac_quantile": dict(algo="sac", **TORQUE, agent=CRITICS | {"value": "quantile", "value.atoms": 5}),
    "sac_redq": dict(
        algo="sac", **TORQUE, agent=CRITICS | {"num_critics": 4, "num_target_critics": 2, "replay.n_step": 3}
    ),
    "sac_2_shards": dict(algo="sac", **TORQUE, devices=2, agent=CRITICS | dict(learn_temperature=False)),
    "td3": dict(algo="td3", **TORQUE, agent=CRITICS | {"critic_layer_norm": True, "optimizer.max_grad_norm": 1.0}),
    "td3_c51": dict(
        algo="td3",
        **TORQUE,
        agent=CRITICS | TORQUE_RANGE | {"value": "c51", "value.atoms": 11, "replay": "prioritized"},
    ),
    "td3_noise": dict(algo="td3", **TORQUE, agent=CRITICS | NOISE | dict(critic_hidden_sizes=(24,))),
    "sac_flash": dict(
        algo="sac",
        **TORQUE,
        agent=CRITICS | {"network": "flash", "value": "c51", "rewards": "scaled", "noise": "held"},
    ),
    "ddpg": dict(algo="ddpg", **TORQUE, agent=CRITICS),
    "ppo_gru": dict(algo="ppo", **TINY, agent=SMALL_PPO | GRU, wrap=["hide=1", "hide=3"]),
    "pqn_lru": dict(algo="pqn", **TINY, agent=SMALL_PQN | LRU, wrap=["hide=1", "hide=3"]),
    "dqn_lstm": dict(algo="dqn", **TINY, agent=SMALL_DQN | LSTM, wrap=["hide=1", "hide=3"]),
    "ppo_gsde": dict(algo="ppo", **TORQUE_PPO, agent=SMALL_PPO | GSDE),
    "ppo_state_dependent_std": dict(algo="ppo", **TORQUE_PPO, agent=SMALL_PPO | dict(policy="state_dependent")),
    "ppo_adaptive_kl": dict(algo="ppo", **TORQUE_PPO, agent=SMALL_PPO | KL),
    "dqn_value_rescaling": dict(algo="dqn", **TINY, agent=SMALL_DQN | {"value.rescaling": True}),
    "dqn_simba": dict(algo="dqn", **TINY, agent=SMALL_DQN | dict(network="simba")),
    "dqn_own_network": dict(algo="dqn", **TINY, agent=SMALL_DQN | OWN_NETWORK),
    "ppo_bfloat16": dict(algo="ppo", **TINY, agent=SMALL_PPO | {"network.compute_dtype": "bfloat16"}),
    "pqn_board_as_vector": dict(algo="pqn", **BOARD, agent=SMALL_PQN | {"network.observations": "vector"}),
    "ppo_frames_impala": dict(algo="ppo", **FRAMES, env_options=SCREEN, agent=SMALL_PPO | dict(network="impala")),
    "dqn_frames": dict(
        algo="dqn", **FRAMES, env_options=SCREEN, agent=SMALL_DQN | {"network": "impala", "replay.n_step": 2}
    ),
    "ppo_players_shared": dict(algo="ppo", **GAME, players="shared", agent=SMALL_PPO),
    "ppo_players_independent": dict(algo="ppo", **GAME, players="independent", agent=SMALL_PPO),
    "dqn_players_independent": dict(algo="dqn", **GAME, players="independent", agent=SMALL_DQN),
    "ppo_self_play": {"algo": "ppo", **GAME, "players": "self-play", "players.pool": 2, "agent": SMALL_PPO},
    "gym": dict(algo="ppo", **GYM, agent=SMALL_PPO),
    "gym_workers": dict(algo="ppo", **GYM | {"host.workers": 2}, agent=SMALL_PPO),
    "gym_in_flight": {"algo": "dqn", **GYM | {"host.workers": 2}, "host.async_pools": 1, "agent": SMALL_DQN},
    "gym_callback": {"algo": "ppo", **GYM, "host.bridge": "callback", "agent": SMALL_PPO},
    "gym_masks": dict(algo="ppo", **GYM, env_options=dict(masked=True, limit=30), agent=SMALL_PPO),
    "gym_frames": dict(
        algo="ppo", **GYM | dict(env="digest_parts:Dot"), env_options=CHANGES | dict(gray=True), agent=SMALL_PPO
    ),
    "gym_mixed": dict(algo="ppo", **GYM | dict(env="digest_parts:Mixed"), agent=SMALL_PPO),
    "gym_indices": dict(algo="dqn", **GYM | dict(env="gymnasium/FrozenLake-v1"), agent=SMALL_DQN),
    "gym_wrapped": dict(algo="ppo", **GYM, agent=SMALL_PPO, wrap=["hide=1", "previous", "time-limit"]),
    "dqn_host_replay": dict(algo="dqn", **BOARD, agent=SMALL_DQN | HOST_REPLAY),
    "dqn_disk_replay": dict(
        algo="dqn", **BOARD, agent=SMALL_DQN | DISK_REPLAY | {"replay": "prioritized", "replay.n_step": 2}
    ),
    "ppo_observe_previous": dict(algo="ppo", **TINY, agent=SMALL_PPO, wrap=["previous"]),
    "ppo_quarantine": dict(algo="ppo", **TINY | dict(env=Faulty), agent=SMALL_PPO, wrap=["quarantine"]),
    "ppo_time_limit": dict(
        algo="ppo",
        **TINY,
        env_options=dict(max_steps_in_episode=20, frame_skip=2),
        agent=SMALL_PPO,
        wrap=["time-limit"],
    ),
}
# Name: options of the first training, of the resumed run, and of an uninterrupted one. The last two must end with
# the same bits.
SPLIT_PPO = dict(algo="ppo", **CARTPOLE, eval_every=4096, agent=PPO | dict(schedule="constant"))
SPLIT_DQN = dict(algo="dqn", **CARTPOLE, eval_every=4096, agent=DQN)
SPLIT_DISK = dict(algo="dqn", **TINY, eval_every=512, agent=SMALL_DQN | {"replay.storage": "disk"})
SPLIT_SAC = dict(algo="sac", **TORQUE, eval_every=512, agent=CRITICS)
SPLIT_GYM = dict(algo="dqn", **GYM, eval_every=512, agent=SMALL_DQN)
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ppo_resumed": (SPLIT_PPO | dict(total_steps=4096), dict(total_steps=8192), SPLIT_PPO),
    "dqn_resumed": (SPLIT_DQN | dict(total_steps=4096), dict(total_steps=8192), SPLIT_DQN),
    "dqn_resumed_disk": (SPLIT_DISK | dict(total_steps=512), dict(total_steps=1024), SPLIT_DISK),
    "sac_resumed": (SPLIT_SAC | dict(total_steps=512), dict(total_steps=1024), SPLIT_SAC),
    "gym_resumed": (SPLIT_GYM | dict(total_steps=512), dict(total_steps=1024), SPLIT_GYM),
}
# Cases whose runs are also evaluated: by `evaluate`, greedily and with exploration, and by `policy` on observations of
# this size.
PLAYED = {"ppo_cartpole": 4, "ppo_pendulum_squash": 3, "dqn_rainbow": 4, "pqn_cartpole": 4, "ppo_3_seeds": 4}
PLAYED |= {"sac": 3, "ppo_gsde": 3}
# Cases whose policies are also exported, with the size of an observation and the formats.
EXPORTED: dict[str, tuple[int, list[str]]] = {
    "ppo_cartpole": (4, ["stablehlo", "onnx", "npz"]),
    "ppo_pendulum_squash": (3, ["stablehlo", "onnx", "npz"]),
    "dqn_rainbow": (4, ["onnx", "npz"]),
    "td3": (3, ["npz"]),
}
EVALUATIONS: dict[str, dict[str, Any]] = {"evaluated": dict(episodes=8), "explored": dict(episodes=8, explore=True)}
SWEEPS: dict[str, dict[str, Any]] = {
    "sweep": dict(algo="ppo", **CARTPOLE, seed=[0, 1], agent=PPO | dict(learning_rate=[5e-4, 2e-3])),
    "sweep_memory": dict(algo="ppo", **TINY, agent=SMALL_PPO | dict(memory=["none", "gru"])),
}
# Options of the commands `train` and `evaluate`, in separate processes; RUN stands for the run's folder.
COMMANDS: dict[str, tuple[str, str]] = {
    "command_line": (
        "ppo --env CartPole-v1 --num-envs 8 --total-steps 8192 --log-every 1024 --devices 1 --seed 3 --eval-episodes 8 "
        "--loggers none --log-level quiet --rollout-length 32 --num-epochs 2 --run-dir RUN",
        "RUN --episodes 8",
    ),
    "command_line_memory": (
        "dqn --env CartPole-v1 --wrap hide=1,hide=3 --num-envs 4 --total-steps 1k --log-every 128 --devices 1 --seed 3 "
        "--eval-episodes 8 --loggers none --log-level quiet --replay prioritized --replay.size 512 --alpha 0.6 "
        "--learning-starts 128 --memory gru --memory.size 8 --sequence-length 10 --burn-in 2 "
        "--value quantile --value.atoms 5 --hidden-sizes 16 16 "
        "--run-dir RUN",
        "RUN --episodes 8",
    ),
}
ARRAYS, EVALUATION = "checkpoints/*/*.safetensors", "evaluation.json"  # in a run's folder
# Words in the names of numbers that differ between two runs with the same bits.
CLOCKS = {"idle", "time", "times", "s", "second", "seconds", "sps", "speed", "share", "duration", "memory", "mb"}


def train_run(folder: Path, preset: str | None = None, **options: Any) -> jaxrl_fast.Run:
    """Train a run in this folder. Raise RuntimeError if a signal has stopped it, since its digests would differ."""
    run = jaxrl_fast.fit(preset, **COMMON | options, run_dir=str(folder))
    if run.summary["status"] != "done":
        raise RuntimeError(f"the run has ended early: {run.summary['status']}")
    return run


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


def act_exported(folder: Path, to: str, observations: np.ndarray) -> np.ndarray:
    """Return the actions of an exported policy."""
    if to == "stablehlo":
        policy = jax.export.deserialize(bytearray((folder / "policy.stablehlo").read_bytes()))
        return np.asarray(jax.tree.leaves(jax.jit(policy.call)(observations))[0])
    if to == "onnx":
        session = onnxruntime.InferenceSession(str(folder / "policy.onnx"))
        return session.run(None, {session.get_inputs()[0].name: observations})[0]
    return runpy.run_path(str(folder / "policy.py"))["policy"](observations)


def digest_exports(run: jaxrl_fast.Run, size: int, formats: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Export the policy of a run in each format, apply it to observations, and yield the digests."""
    observations = np.random.default_rng(0).normal(size=(64, size)).astype(np.float32)
    for to in formats:
        actions = act_exported(run.export(to=to, which="last"), to, observations)
        yield f"exported_{to}", {"params": digest_state(actions), **digest_records([])}


def digest_commands(folder: Path, train: str, evaluate: str) -> dict[str, Any]:
    """Run the commands `train` and `evaluate`, and digest the results of both."""
    for module, words in (("train", train), ("evaluate", evaluate)):
        command = [sys.executable, "-m", f"jaxrl_fast.{module}", *words.replace("RUN", str(folder)).split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    digests = digest_run(jaxrl_fast.Run.open(folder))
    evaluation = digest_records([json.loads((folder / EVALUATION).read_text(encoding="utf-8"))])
    keys = digests["keys"] | {f"evaluation.{name}": digest for name, digest in evaluation["keys"].items()}
    return digests | {"metrics": sha([digests["metrics"], evaluation["metrics"]]), "keys": keys}


def run_case(scratch: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a case. Yield its name, and those of its evaluations and exports, with the digests."""
    if name in CASES:
        run = train_run(scratch / name, **CASES[name])
        yield name, digest_run(run)
        for what, digests in digest_evaluations(run, PLAYED[name]) if name in PLAYED else ():
            yield f"{name}.{what}", digests
        for what, digests in digest_exports(run, *EXPORTED[name]) if name in EXPORTED else ():
            yield f"{name}.{what}", digests
    elif name in RESUMED:
        first, then, whole = RESUMED[name]
        yield name, digest_run(train_and_resume(scratch / name, first, then))
        yield f"{name}.never_stopped", digest_run(train_run(scratch / f"{name}.never_stopped", **whole))
    elif name in SWEEPS:
        common = {key: value for key, value in COMMON.items() if key not in SWEEPS[name]}
        table = jaxrl_fast.sweep(**common | SWEEPS[name], sweep_dir=str(scratch / name)).results
        yield name, {"params": "", **digest_records(table)}
    else:
        yield name, digest_commands(scratch / name, *COMMANDS[name])


def is_wanted(name: str, words: list[str]) -> bool:
    """Return whether a name contains one of the words, or there are none."""
    return not words or any(word in name for word in words)


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
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only cases whose names contain a WORD")
    chosen = parser.parse_args()
    cases: dict[str, Any] = {}
    began, well = time.perf_counter(), True
    if chosen.read:
        cases = json.loads(chosen.read.read_text(encoding="utf-8"))["cases"]
    else:
        with tempfile.TemporaryDirectory() as scratch:
            for case in filter(lambda name: is_wanted(name, chosen.only), (*CASES, *RESUMED, *SWEEPS, *COMMANDS)):
                try:
                    for name, digests in run_case(Path(scratch), case):
                        cases[name] = digests
                        short = f"params {digests['params'][:12]:12}  metrics {digests['metrics'][:12]}"
                        print(f"{name:32} {short}  at {time.perf_counter() - began:.0f} s", flush=True)
                except Exception as error:  # the other cases run nevertheless
                    print(f"FAILED     {case}: {type(error).__name__}: {error}", flush=True)
                    well = False
    for name in (name for name in RESUMED if f"{name}.never_stopped" in cases):
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
        well &= compare({name: case for name, case in before.items() if is_wanted(name, chosen.only)}, cases)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
