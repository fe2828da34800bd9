"""What the shipped presets reach: trains each over several seeds and keeps the summaries, for the README's table.

    python benchmarks/learning.py ppo_cartpole ppo_acrobot --num-seeds 5
    python benchmarks/learning.py ppo_minatar_breakout --num-seeds 1 --one-by-one    # long ones: a seed at a time
    python benchmarks/learning.py                                            # only prints the table of what is kept

The returns are those of training, sampled actions and all, over the last episodes of each seed
(docs/reference/metrics.md); greedy ones are of 128 episodes of evaluation at the end.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import jaxrl_fast

KEPT = Path(__file__).parent / "results" / "learning.json"
REFERENCE_PPO = {"num_envs": 4, "total_steps": 500_000, "agent": {}}  # CleanRL's setting is our default otherwise
MEMORY_CHAIN = {  # without memory
    "algo": "ppo", "env": "MemoryChain-bsuite", "env_options": {"memory_length": 100}, "num_envs": 32,
    "total_steps": 300_000, "solved_threshold": 0.9,
    "agent": {"hidden_sizes": [64], "num_epochs": 16, "learning_rate": 1e-3, "gamma": 0.999, "entropy_coef": 0},
}  # fmt: skip
EXTRA = {
    "ppo_cartpole_4_envs": {"algo": "ppo", "env": "CartPole-v1", "solved_threshold": 475, **REFERENCE_PPO},
    "ppo_acrobot_4_envs": {"algo": "ppo", "env": "Acrobot-v1", "solved_threshold": -100, **REFERENCE_PPO},
    "ppo_pendulum_500k": {"preset": "ppo_pendulum", "total_steps": 500_000},
    # The same agents without memory.
    "ppo_cartpole_no_velocity_mlp": {
        "algo": "ppo", "env": "CartPole-v1", "hide": [1, 3], "num_envs": 8, "total_steps": 100_000,
        "solved_threshold": 475,
        "agent": {
            "hidden_sizes": [64], "num_epochs": 10, "learning_rate": 1e-3, "gamma": 0.98, "entropy_coef": 0,
            "normalize_observations": True, "normalize_rewards": True,
        },
    },
    "ppo_pendulum_no_velocity_mlp": {
        "algo": "ppo", "env": "Pendulum-v1", "hide": [2], "num_envs": 8, "total_steps": 100_000,
        "solved_threshold": -200,
        "agent": {
            "hidden_sizes": [64], "rollout_length": 256, "num_minibatches": 16, "num_epochs": 10,
            "learning_rate": 1e-3, "gamma": 0.95, "entropy_coef": 0, "log_std_init": 0.2,
            "normalize_observations": True, "normalize_rewards": True,
        },
    },
    "ppo_mountain_car_continuous_no_velocity_mlp": {
        "algo": "ppo", "env": "MountainCarContinuous-v0", "hide": [1], "num_envs": 8, "total_steps": 300_000,
        "solved_threshold": 90,
        "agent": {
            "hidden_sizes": [64], "gsde": True, "sde_sample_freq": 8, "rollout_length": 1024, "num_minibatches": 32,
            "num_epochs": 10, "learning_rate": 2e-4, "anneal_lr": False, "gamma": 0.9999, "gae_lambda": 0.9,
            "clip_coef": 0.1, "clip_vloss": False, "entropy_coef": 0.00429, "value_coef": 0.19, "max_grad_norm": 5.0,
            "normalize_observations": True, "normalize_rewards": True,
        },
    },
    "ppo_memory_chain_mlp": MEMORY_CHAIN,
    "ppo_memory_chain_30": {"preset": "ppo_memory_chain", "total_steps": 100_000, "env_options": {"memory_length": 30}},
    "ppo_memory_chain_30_mlp": MEMORY_CHAIN | {"total_steps": 100_000, "env_options": {"memory_length": 30}},
    "ppo_memory_chain_10": {"preset": "ppo_memory_chain", "total_steps": 100_000, "env_options": {"memory_length": 10}},
    "ppo_memory_chain_10_mlp": MEMORY_CHAIN | {"total_steps": 100_000, "env_options": {"memory_length": 10}},
    "ppo_simple_spread": {  # JaxMARL's baselines/IPPO/config/ippo_ff_mpe.yaml, of fewer steps; needs jaxrl_fast[marl]
        "algo": "ppo", "env": "jaxmarl/MPE_simple_spread_v3", "players": "shared", "num_envs": 16,
        "total_steps": 1_000_000, "time_limit_terminates": True, "solved_threshold": None, "agent": {},
    },
}  # fmt: skip


def main():
    """Trains what is named and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"presets, or of {', '.join(EXTRA)}")
    parser.add_argument("--num-seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--one-by-one", action="store_true")
    args = parser.parse_args()
    for name in args.names:
        seeds = range(args.first_seed, args.first_seed + args.num_seeds)
        for part in [[s] for s in seeds] if args.one_by_one else [list(seeds)]:
            keep(name, train(name, part))
    print(table(json.loads(KEPT.read_text())))


def train(name: str, seeds: list[int]) -> dict:
    """The summary of one run."""
    options = EXTRA.get(name, {"preset": name})
    with tempfile.TemporaryDirectory() as folder:
        run = jaxrl_fast.fit(
            **options, seed=seeds[0], num_seeds=len(seeds), run_dir=f"{folder}/run", tensorboard=False, console_every=60
        )
        final_returns, solved = run.summary["final_return_per_seed"], run.summary["steps_to_solve_per_seed"]
        greedy = [r["eval_return_mean"] for r in run.metrics if r.get("eval_return_mean") is not None][-len(seeds) :]
        return {**run.summary, "seeds": seeds, "final_returns": final_returns, "greedy": greedy, "solved_at": solved}


def keep(name: str, summary: dict) -> None:
    """Adds a run's seeds to those kept; a seed trained again replaces the old one."""
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
    KEPT.write_text(json.dumps(kept, indent=2) + "\n")


def program() -> str:
    """The commit that trains, with "-dirty" where files differ from it; empty where there is no git."""
    command = ["git", "-C", str(KEPT.parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def table(kept: dict) -> str:
    """Markdown, a line for each name."""
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
    """Mean and standard deviation over seeds."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


if __name__ == "__main__":
    main()
