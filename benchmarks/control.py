"""Train SAC with the parts of FlashSAC, and REPPO next to PPO, at reduced sizes, and store the returns.

    python benchmarks/control.py pendulum --num-seeds 3                # flash and sac; all seeds in one program
    python benchmarks/control.py half_cheetah --num-seeds 3 --steps 100k
    python benchmarks/control.py cartpole_swingup_reppo cartpole_swingup_ppo --num-seeds 3
    python benchmarks/control.py --ablation --num-seeds 3              # Pendulum, without a part after another
    python benchmarks/control.py half_cheetah_flash --runs runs/control  # resumes the runs of that folder
    python benchmarks/control.py                                       # only prints the table of stored results

The reduced size is one residual block of 128 (64 on Pendulum) and a batch of 256, which fits two cores; the authors
have two blocks of 128 and 256 and a batch of 512. REPPO and PPO have layers of 128, 64 environments of dm_control and
2,048 rows an update; the authors have layers of 512, 1,024 environments of MuJoCo Playground and 32,768 rows.
`return` is the mean return of the last training episodes of each seed, and `greedy` that of the evaluation at the
end. `curve` has the mean return of the training episodes that end in each tenth of the steps. A pool of envpool
trains one seed after another; other environments' seeds share a program.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import jaxrl_fast
from jaxrl_fast.utils import files
from jaxrl_fast.utils.parsing import parse_int

KEPT = Path(__file__).parent / "results" / "control.json"
TASKS = {
    "pendulum": {"env": "gymnax/Pendulum-v1", "total_steps": 20_000, "learning_starts": 1_000, "width": 64},
    "swingup": {"env": "envpool/PendulumSwingup-v1", "total_steps": 100_000, "learning_starts": 5_000, "width": 128},
    "half_cheetah": {"env": "envpool/HalfCheetah-v4", "total_steps": 300_000, "learning_starts": 10_000, "width": 128},
}
FLASH = {
    "policy_delay": 2, "schedule": {"kind": "cosine", "final": 0.5}, "temperature": 0.01, "target_sigma": 0.15,
    "std_bounds": "tanh", "rewards": "scaled", "noise": "held", "target": {"tau": 0.01},
    "value": {"kind": "c51", "atoms": 101, "v_min": -5, "v_max": 5}, "network": "flash",
}  # fmt: skip
# From everything to an MLP, in the reverse order of the authors' ablation; each leaves out what those before do.
STEPS = {
    "flash": {},
    "no_c51": {"value": "mean"},
    "no_norms": {"network": "simba"},  # layer normalization in place of batch statistics, and no constraint
    "no_blocks": {"network": "mlp"},
    "no_scale": {"rewards": "raw"},
}
VARIANTS = {name: FLASH for name in STEPS}
for number, name in enumerate(STEPS):
    for changes in [*STEPS.values()][: number + 1]:
        VARIANTS[name] = VARIANTS[name] | changes
VARIANTS["sac"] = {"critic_learning_rate": 1e-3, "network": "mlp"}  # the settings of our sac_* presets


def options_of(task: str, variant: str) -> dict:
    """Return the options of a run: of the task, of the variant, and a network of the task's width."""
    options = TASKS[task] | VARIANTS[variant]
    width, kind = options.pop("width"), options["network"]
    plain = 256 if variant == "sac" and width == 128 else width  # the presets' networks
    sizes = [width] if kind in ("flash", "simba") else [plain, plain]
    return options | {"network": {"kind": kind, "hidden_sizes": sizes, "activation": "relu"}}


CASES = {
    f"{task}_{variant}": {"algo": "sac", "num_envs": 1} | options_of(task, variant)
    for task in TASKS
    for variant in VARIANTS
}
ON_POLICY = {
    "num_envs": 64, "rollout_length": 32, "num_minibatches": 16, "num_epochs": 8, "learning_rate": 3e-4,
    "total_steps": 1_000_000, "normalize_observations": True, "network": {"hidden_sizes": [128, 128]},
    "eval_episodes": 16, "eval_envs": 16,
}  # fmt: skip
REPPO = {"algo": "reppo", "critic_width": 128, "value": {"v_min": 0, "v_max": 150}}
PPO = {"algo": "ppo", "rewards": "normalized", "entropy_coef": 0.0, "policy": "tanh"}
for task, env in (("cartpole_swingup", "CartpoleSwingup-v1"), ("ball_in_cup", "BallInCupCatch-v1")):
    for variant, own in (("reppo", REPPO), ("ppo", PPO)):
        CASES[f"{task}_{variant}"] = ON_POLICY | own | {"env": f"envpool/{env}"}


def main():
    """Train the named cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(CASES)}, or a task for its flash and sac")
    parser.add_argument("--num-seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", help="environment steps of each seed, if not those of the task")
    parser.add_argument("--ablation", action="store_true", help="all variants of pendulum")
    parser.add_argument("--runs", type=Path, help="keep the run folders in this one, and resume those that are there")
    args = parser.parse_args()
    names = args.names + [f"pendulum_{variant}" for variant in VARIANTS if args.ablation]
    names = [case for name in names for case in ([name] if name in CASES else [f"{name}_flash", f"{name}_sac"])]
    for name in names:
        options = CASES[name] | ({"total_steps": parse_int(args.steps)} if args.steps else {})
        seeds = range(args.first_seed, args.first_seed + args.num_seeds)
        alone = options["env"].startswith("envpool/")
        for part in [[s] for s in seeds] if alone else [[*seeds]]:
            store(name, options, part, args.runs)
    print(table(json.loads(KEPT.read_text())))


def store(name: str, options: dict, seeds: list[int], runs: Path | None) -> None:
    """Train some seeds in one program, and store their results. A seed that is trained again replaces its old entry."""
    of_run = {"seed": seeds[0], "num_seeds": len(seeds), "devices": 1, "save_every": "5min" if runs else "0"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (runs or Path(temporary)) / "_".join([name, str(options["total_steps"]), *map(str, seeds)])
        how = {"resume": folder} if folder.exists() else {"run_dir": folder} | of_run | options
        run = jaxrl_fast.fit(loggers=(), console_every=60, **how)
        records = run.metrics  # read from the folder
    if run.summary["status"] == "stopped":
        raise SystemExit(f"{name} was stopped; nothing is stored")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    case = kept.setdefault(f"{name}_{options['total_steps'] // 1000}k", {"seeds": {}})
    case |= {key: run.summary[key] for key in ("env_id", "env_steps", "device", "versions")} | {"options": options}
    evaluated = [r["eval_return_mean"] for r in records if r.get("eval_return_mean") is not None]
    greedy = [run.summary["eval_return_mean"]] if len(seeds) == 1 else evaluated[-len(seeds) :]
    for i, seed in enumerate(seeds):
        own = [r for r in records if r.get("seed", seed) == seed and r.get("episodes")]
        case["seeds"][str(seed)] = {
            "return": run.summary["final_return_per_seed"][i],
            "greedy": greedy[i],
            "curve": tenths(own, run.summary["env_steps"]),
            "train_time_s": run.summary["train_time_s"],
            "together": len(seeds),
        }
    kept[f"{name}_{options['total_steps'] // 1000}k"] = case
    files.replace(KEPT, json.dumps(kept, indent=2) + "\n")


def tenths(records: list[dict], steps: int) -> list[float | None]:
    """Return the mean return of the training episodes that ended in each tenth of the steps; None without any."""
    found = []
    for i in range(10):
        own = [r for r in records if i * steps < 10 * r["env_steps"] <= (i + 1) * steps]
        count = sum(r["episodes"] for r in own)
        found.append(sum(r["return_mean"] * r["episodes"] for r in own) / count if count else None)
    return found


def table(kept: dict) -> str:
    """Return the table in Markdown, with a line for each case."""
    lines = ["| case | env steps | seeds | return | greedy |", "| --- | --- | --- | --- | --- |"]
    for name, case in kept.items():
        seeds = case["seeds"].values()
        cells = [
            name,
            f"{case['env_steps']:,}",
            str(len(seeds)),
            *(spread([s[k] for s in seeds]) for k in ("return", "greedy")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Return the mean and the standard deviation over seeds, as text."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


if __name__ == "__main__":
    main()
