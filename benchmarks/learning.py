"""Train the shipped presets over several seeds, and store their results for the tables of the documentation.

    python benchmarks/learning.py ppo_cartpole ppo_acrobot --num-seeds 5
    python benchmarks/learning.py ppo_minatar_breakout --num-seeds 1 --one-by-one    # long runs: one seed at a time
    python benchmarks/learning.py sac_hopper --one-by-one --runs runs/learning   # resumes the runs of that folder
    python benchmarks/learning.py                                            # only prints the table of stored results

    python benchmarks/learning.py --suites   # one environment of each suite that is installed, five seeds
    python benchmarks/learning.py --best-reply                               # the exact reference of pgx/tic_tac_toe

gymnax's Seaquest has room for 100 entities of each kind, and a step takes time for all of them. At most a few are on
the board, so these presets train with room for 32: the transitions are the same and a step takes a fifth of the time.

`return` is the mean return of the last training episodes of each seed, with sampled actions
(docs/reference/metrics.md). `greedy` is the mean return of 128 evaluation episodes at the end.
"""

import argparse
import functools
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxrl_fast
from jaxrl_fast import envs
from jaxrl_fast.rl import distributions
from jaxrl_fast.types import Box
from jaxrl_fast.utils import files

KEPT = Path(__file__).parent / "results" / "learning.json"
REFERENCE_PPO = {"num_envs": 4, "total_steps": 500_000}  # all other defaults are CleanRL's
MEMORY_CHAIN = {  # without memory
    "algo": "ppo", "env": "MemoryChain-bsuite", "env_options": {"memory_length": 100}, "num_envs": 32,
    "total_steps": 300_000, "solved_threshold": 0.9,
    "network": {"hidden_sizes": [64]}, "num_epochs": 16, "learning_rate": 1e-3, "gamma": 0.999, "entropy_coef": 0,
}  # fmt: skip
EXTRA = {
    "ppo_cartpole_4_envs": {"algo": "ppo", "env": "CartPole-v1", "solved_threshold": 475, **REFERENCE_PPO},
    "ppo_acrobot_4_envs": {"algo": "ppo", "env": "Acrobot-v1", "solved_threshold": -100, **REFERENCE_PPO},
    "ppo_pendulum_500k": {"preset": "ppo_pendulum", "total_steps": 500_000},
    # Few steps, with SAC and DQN next to each other.
    "breakout_300k_sac": {"preset": "sac_minatar_breakout", "total_steps": 300_000},
    "breakout_300k_dqn": {
        "preset": "dqn_minatar_breakout", "total_steps": 300_000, "explore": {"end": 0.01, "steps": 30_000},
    },
    # The same agents without memory.
    "ppo_cartpole_no_velocity_mlp": {
        "algo": "ppo", "env": "CartPole-v1", "wrap": ["hide=1", "hide=3"], "num_envs": 8, "total_steps": 100_000,
        "solved_threshold": 475,
        "network": {"hidden_sizes": [64]}, "num_epochs": 10, "learning_rate": 1e-3, "gamma": 0.98, "entropy_coef": 0,
        "normalize_observations": True, "rewards": "normalized",
    },
    "ppo_pendulum_no_velocity_mlp": {
        "algo": "ppo", "env": "Pendulum-v1", "wrap": ["hide=2"], "num_envs": 8, "total_steps": 100_000,
        "solved_threshold": -200,
        "network": {"hidden_sizes": [64]}, "rollout_length": 256, "num_minibatches": 16, "num_epochs": 10,
        "learning_rate": 1e-3, "gamma": 0.95, "entropy_coef": 0, "policy": {"log_std_init": 0.2},
        "normalize_observations": True, "rewards": "normalized",
    },
    "ppo_mountain_car_continuous_no_velocity_mlp": {
        "algo": "ppo", "env": "MountainCarContinuous-v0", "wrap": ["hide=1"], "num_envs": 8, "total_steps": 300_000,
        "solved_threshold": 90,
        "network": {"hidden_sizes": [64]}, "policy": {"kind": "gsde", "sample_freq": 8},
        "rollout_length": 1024, "num_minibatches": 32, "num_epochs": 10, "learning_rate": 2e-4, "schedule": "constant",
        "gamma": 0.9999, "gae_lambda": 0.9, "clip_coef": 0.1, "clip_vloss": False, "entropy_coef": 0.00429,
        "value_coef": 0.19, "optimizer": {"max_grad_norm": 5.0},
        "normalize_observations": True, "rewards": "normalized",
    },
    "ppo_memory_chain_mlp": MEMORY_CHAIN,
    "ppo_memory_chain_30": {"preset": "ppo_memory_chain", "total_steps": 100_000, "env_options": {"memory_length": 30}},
    "ppo_memory_chain_30_mlp": MEMORY_CHAIN | {"total_steps": 100_000, "env_options": {"memory_length": 30}},
    "ppo_memory_chain_10": {"preset": "ppo_memory_chain", "total_steps": 100_000, "env_options": {"memory_length": 10}},
    "ppo_memory_chain_10_mlp": MEMORY_CHAIN | {"total_steps": 100_000, "env_options": {"memory_length": 10}},
    "ppo_simple_spread": {  # JaxMARL's baselines/IPPO/config/ippo_ff_mpe.yaml, of fewer steps; needs jaxrl_fast[marl]
        "algo": "ppo", "env": "jaxmarl/MPE_simple_spread_v3", "players": "shared", "num_envs": 16,
        "total_steps": 1_000_000, "wrap": ["time-limit"], "solved_threshold": None,
    },
    "ppo_craftax_gru": {  # needs jaxrl_fast[craftax]; the largest return is 226
        "algo": "ppo", "env": "craftax/Craftax-Symbolic-v1", "num_envs": 64, "total_steps": 1_000_000,
        "eval_episodes": 16,
        "network": {"hidden_sizes": [256], "activation": "relu"}, "memory": {"kind": "gru", "size": 256},
        "rollout_length": 64, "num_minibatches": 8, "gae_lambda": 0.8, "learning_rate": 3e-4,
        "optimizer": {"max_grad_norm": 1.0},
    },
    "ppo_paddles_frames": {  # the settings of ppo_pong_small; a mean return above 0 beats the script
        "algo": "ppo", "env": "games/Paddles", "num_envs": 16, "total_steps": 1_000_000, "solved_threshold": 0,
        "env_options": {"opponent": "scripted", "observation": "image", "frame_stack": 4},
        "rollout_length": 64, "num_minibatches": 4, "num_epochs": 4, "learning_rate": 1e-3, "clip_coef": 0.2,
        "clip_vloss": False, "entropy_coef": 0.02, "rewards": "sign", "network": "dqn2013",
    },
    # The settings of rl-baselines3-zoo, whose PPO scored 242.1 on LunarLander-v2 after 1M steps (one run).
    "ppo_lunar_lander": {
        "algo": "ppo", "env": "gymnasium/LunarLander-v3", "num_envs": 16, "total_steps": 1_000_000,
        "rollout_length": 1024, "num_minibatches": 256, "num_epochs": 4, "learning_rate": 3e-4, "gamma": 0.999,
        "gae_lambda": 0.98, "entropy_coef": 0.01, "schedule": "constant", "clip_vloss": False,
    },
    # One environment of each suite.
    "suite_navix": {
        "algo": "ppo", "env": "navix/Navix-Empty-8x8-v0", "env_options": {"observation_fn": "symbolic_first_person"},
        "num_envs": 64, "total_steps": 500_000, "network": "mlp",
    },
    "suite_pgx": {
        "algo": "ppo", "env": "pgx/tic_tac_toe", "num_envs": 64, "total_steps": 1_000_000, "network": "mlp",
    },
    "suite_jumanji": {
        "algo": "ppo", "env": "jumanji/Snake-v1", "env_options": {"num_rows": 6, "num_cols": 6}, "num_envs": 64,
        "total_steps": 1_000_000, "network": "mlp",
    },
    "suite_xminigrid": {
        "algo": "ppo", "env": "xminigrid/MiniGrid-Empty-8x8", "num_envs": 64, "total_steps": 500_000,
        "network": "mlp",
    },
    "suite_brax": {
        "algo": "ppo", "env": "brax/inverted_pendulum", "env_options": {"backend": "spring"}, "num_envs": 64,
        "total_steps": 1_000_000,
        "normalize_observations": True, "rewards": "normalized", "entropy_coef": 0,
    },
    "suite_playground": {
        "algo": "ppo", "env": "playground/CartpoleBalance", "num_envs": 64, "total_steps": 2_000_000,
        "normalize_observations": True, "rewards": "normalized", "entropy_coef": 0, "gamma": 0.995,
        "num_minibatches": 32,
    },
    "suite_craftax": {
        "algo": "ppo", "env": "craftax/Craftax-Classic-Symbolic-v1", "num_envs": 64, "total_steps": 1_000_000,
        "network": {"kind": "mlp", "hidden_sizes": [256, 256]}, "rollout_length": 64, "num_minibatches": 8,
    },
}  # fmt: skip
SEAQUEST_ENTITIES = 32
RANDOM_ENVS, RANDOM_STEPS = 64, 2048  # of a random policy, a reference where nothing is published


def main():
    """Train the named presets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"presets, or some of {', '.join(EXTRA)}")
    parser.add_argument("--num-seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--runs", type=Path, help="keep the run folders in this one, and resume those that are there")
    parser.add_argument("--suites", action="store_true", help="the environments of installed suites")
    parser.add_argument("--best-reply", action="store_true", help="the best mean score in pgx/tic_tac_toe")
    args = parser.parse_args()
    if args.best_reply:
        print(f"{(best_reply('.' * 9, True) + best_reply('.' * 9, False)) / 2:.4f}")
        return
    of_suites = [name for name in EXTRA if envs.is_installed(name.removeprefix("suite_")) and "suite_" in name]
    for name in args.names + (of_suites if args.suites else []):
        seeds = range(args.first_seed, args.first_seed + args.num_seeds)
        for part in [[s] for s in seeds] if args.one_by_one else [list(seeds)]:
            store_seeds(name, train(name, part, args.runs))
        if name.startswith("suite_"):
            keep_random(name)
    print(table(json.loads(KEPT.read_text())))


def train(name: str, seeds: list[int], runs: Path | None = None) -> dict:
    """Train one run, in a folder of `runs` if given. Return its summary, with the results of each seed."""
    options = EXTRA.get(name, {"preset": name})
    if name.endswith("_seaquest"):
        limit_seaquest_entities(SEAQUEST_ENTITIES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (runs or Path(temporary)) / "_".join([name, *map(str, sorted({seeds[0], seeds[-1]}))])
        if folder.exists():
            run = jaxrl_fast.fit(resume=folder, loggers=(), console_every=60)
        else:
            run = jaxrl_fast.fit(
                **options, seed=seeds[0], num_seeds=len(seeds), run_dir=folder, loggers=(), console_every=60
            )
        if run.summary["status"] == "stopped":
            raise SystemExit(f"{name} was stopped; results are stored when it ends")
        final_returns, solved = run.summary["final_return_per_seed"], run.summary["steps_to_solve_per_seed"]
        greedy = [r["eval_return_mean"] for r in run.metrics if r.get("eval_return_mean") is not None][-len(seeds) :]
        return {**run.summary, "seeds": seeds, "final_returns": final_returns, "greedy": greedy, "solved_at": solved}


def limit_seaquest_entities(count: int) -> None:
    """Set the number of entities of each kind that gymnax's Seaquest has room for, in this process."""
    from gymnax.environments.minatar import seaquest, seaquest_helpers  # the import starts JAX on a single CPU device

    for module in (seaquest_helpers, seaquest):  # the second imported the constant by value
        module.MAX_ENTITIES = count
    jax.clear_caches()  # gymnax compiles reset and step, and keeps what it compiled


def store_seeds(name: str, summary: dict) -> None:
    """Add a run's seeds to the stored ones. A seed that is trained again replaces its old entry."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    seeds = kept.setdefault(name, {}).setdefault("seeds", {})
    same = ("env_id", "num_envs", "env_steps", "env_steps_per_s", "train_time_s", "num_seeds", "device", "versions")
    kept[name] |= {key: summary[key] for key in same}
    for i, seed in enumerate(summary["seeds"]):
        numbers = {
            "return": summary["final_returns"][i],
            "greedy": summary["greedy"][i],
            "solved_at": summary["solved_at"][i],
        }
        seeds[str(seed)] = numbers | {"program": program()}
    KEPT.parent.mkdir(exist_ok=True)
    files.replace(KEPT, json.dumps(kept, indent=2) + "\n")


def keep_random(name: str) -> None:
    """Adds the mean score of uniformly random, legal actions, over the episodes that end."""
    env = envs.make(EXTRA[name]["env"], RANDOM_ENVS, **EXTRA[name].get("env_options", {}))

    def one(carry, key):
        state, timestep, score = carry
        if isinstance(env.spec.action, Box):
            action = jax.random.uniform(key, (RANDOM_ENVS, *env.spec.action.shape), minval=-1.0, maxval=1.0)
        else:
            logits = jnp.zeros((RANDOM_ENVS, env.spec.action.num_outputs))
            action = jax.random.categorical(key, distributions.masked(logits, timestep.action_mask))
        state, timestep = env.step(state, action)
        score += timestep.reward
        ended = jnp.where(timestep.last, score, 0.0).sum(), timestep.last.sum()
        return (state, timestep, jnp.where(timestep.last, 0.0, score)), ended

    key_reset, key_steps = jax.random.split(jax.random.key(0))
    start = (*env.reset(key_reset), jnp.zeros(RANDOM_ENVS))
    scores, counts = jax.jit(lambda start, keys: jax.lax.scan(one, start, keys))(
        start, jax.random.split(key_steps, RANDOM_STEPS)
    )[1]
    kept = json.loads(KEPT.read_text())
    kept[name]["random"] = {"return": float(scores.sum() / counts.sum()), "episodes": int(counts.sum())}
    files.replace(KEPT, json.dumps(kept, indent=2) + "\n")


@functools.cache
def best_reply(board: str, agent_moves: bool) -> float:
    """The value of a board, 9 of ".xo", to an agent x that plays tic-tac-toe best against a random player o."""
    for i, j, k in ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)):
        if board[i] != "." and board[i] == board[j] == board[k]:
            return 1.0 if board[i] == "x" else -1.0
    free = [i for i in range(9) if board[i] == "."]
    if not free:
        return 0.0
    mark = "x" if agent_moves else "o"
    values = [best_reply(board[:i] + mark + board[i + 1 :], not agent_moves) for i in free]
    return max(values) if agent_moves else statistics.mean(values)


def program() -> str:
    """Return the current commit, with "-dirty" if files other than results differ from it; without git, ""."""
    git = ["git", "-C", str(KEPT.parent)]
    printed = lambda *words: subprocess.run([*git, *words], capture_output=True, text=True).stdout.strip()
    changed = printed("status", "--porcelain", "--untracked-files=no", ":/", ":(exclude,top)benchmarks/results")
    return printed("describe", "--always") + "-dirty" * bool(changed)


def table(kept: dict) -> str:
    """Return the table in Markdown, with a line for each name."""
    lines = [
        "| run | env steps | seeds | return | greedy | solved at | steps/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, run in kept.items():
        seeds = run["seeds"].values()
        returns, greedy = [s["return"] for s in seeds], [s["greedy"] for s in seeds]
        solved = [s["solved_at"] for s in seeds if s["solved_at"]]
        at = f"{statistics.median(solved) / 1e3:.0f}k ({len(solved)} of {len(seeds)})" if solved else "-"
        speed = f"{run['env_steps_per_s'] / 1e3:.0f}k" + (" in all" if run["num_seeds"] > 1 else "")
        cells = [name, f"{run['env_steps'] / 1e6:.3g}M", str(len(seeds)), spread(returns), spread(greedy), at, speed]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Return the mean and the standard deviation over seeds, as text."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


if __name__ == "__main__":
    main()
