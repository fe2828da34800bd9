"""Write config.yaml, and compute the contents of summary.json."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_fast.config import paths, settings
from jaxrl_fast.config.presets import read_meta
from jaxrl_fast.runs import fingerprint
from jaxrl_fast.utils import devices, files, memory

if TYPE_CHECKING:
    from jaxrl_fast.metrics.tracker import MetricsTracker
    from jaxrl_fast.training.plan import Plan


class RunResult(NamedTuple):
    """The outcome of a run, and the time and memory that it took."""

    status: str  # done, stopped, diverged or failed
    failure: str  # the reason why it could not continue, in a sentence
    updates: int
    seconds: Mapping[str, float]  # train, compile, eval, idle, save and wall, in all processes
    program_memory: int  # bytes
    num_saved: int  # checkpoints
    last_saved: str | None  # the name of the last
    replay: Mapping[str, float] | None = None  # `of_replay`; None: it is on the device, or there is none


def write_config(plan: "Plan") -> None:
    """Write all resolved settings, and list resumes. The file is a preset too: config runs/NAME/config.yaml.

    What the run starts from is written before, so that a run with this file can be resumed.
    """
    import yaml

    from jaxrl_fast.training import bonus_data, init_from

    if plan.start and not plan.settings.options.resume:
        init_from.keep(plan.start, plan.folder)
    path, options = plan.folder / paths.CONFIG, plan.settings.options
    now = {
        "format": paths.FORMAT,
        "id": secrets.token_hex(4),
        "preset": plan.settings.preset,
        "env_id": plan.env.spec.id,
        "num_shards": plan.placement.num_shards,
        "num_grad_workers": plan.placement.num_grad_workers,
        "device": devices.device(),
        "versions": fingerprint.versions(),
        "decided": list(plan.decided),
        **bonus_data.fingerprint(plan.settings.agent),
    } | ({"members": [m.label for m in plan.members]} if plan.members else {})
    if not isinstance(options.env, (str, type)):
        now["env_is_an_object"] = True  # the environment may not be rebuilt from its id
    if options.resume:
        before = read_meta(path)
        again = {"env_steps": plan.saved.manifest["env_steps"] if plan.saved else 0, "total_steps": options.total_steps}
        kept = {name: now[name] for name in ("env_is_an_object",) if name in now}
        now = (
            {name: now[name] for name in ("format", "id")}
            | before
            | kept
            | {"resumed": [*before.get("resumed", []), again | fingerprint.fingerprint()]}
        )
    content = settings.to_mapping(plan.settings) | {"env": plan.env.spec.id, "meta": now}
    files.replace(path, yaml.safe_dump(content, sort_keys=False))


def of_replay(reports: Sequence[Mapping[str, float]], train_time: float) -> dict[str, float]:
    """Return numbers about the observations of a replay in host or disk storage, of all shards.

    Shares are fractions of this process's training time: the time in which the program waits for reads, and the
    processor time that all threads spend on compression.
    """
    num_bytes = sum(report["bytes"] for report in reports)
    raw = sum(report["bytes"] * report["compression_ratio"] for report in reports)
    share = lambda name: round(sum(report[name] for report in reports) / max(train_time, 1e-9), 5)
    return {
        "bytes": int(num_bytes),
        "compression_ratio": round(raw / num_bytes, 2) if num_bytes else 1.0,
        "reading_share": share("read_time_s"),
        "compression_share": share("codec_time_s"),
    }


def summarize(plan: "Plan", tracker: "MetricsTracker", ended: RunResult) -> dict[str, Any]:
    """Return the contents of summary.json. Times are seconds; env_steps are of one seed, env_steps_per_s of all."""
    import numpy as np

    from jaxrl_fast.metrics import statistics

    options, times = plan.settings.options, ended.seconds
    steps = ended.updates * plan.steps_per_update
    per_seed = tracker.final_returns()
    final_returns = [mean for mean in per_seed if mean is not None]
    last = tracker.evaluations[-1] if tracker.evaluations else {}
    best = _best(plan.folder / paths.CHECKPOINTS, tracker.best())
    solved = [s for s in tracker.solved if s is not None]
    all_solved = len(solved) == options.num_seeds
    return {
        "status": ended.status,
        "algo": plan.settings.algo,
        "env_id": plan.env.spec.id,
        "protocol": plan.env.protocol or None,
        "num_envs": options.num_envs,
        "seed": options.seed,
        "num_seeds": options.num_seeds,
        "members": tracker.labels,
        "env_steps": steps,
        "num_updates": ended.updates,
        "valid_steps": tracker.valid_steps,
        "train_time_s": round(times["train"], 4),
        "compile_time_s": round(times["compile"], 4),
        "eval_time_s": round(times["eval"], 4),
        "save_time_s": round(times["save"], 4),
        "wall_time_s": round(times["wall"], 4),
        "env_steps_per_s": round(steps * options.num_seeds / times["train"], 1) if steps else None,
        "peak_memory_mb": memory.peak_memory_mb(),
        "program_memory_mb": round(ended.program_memory / 2**20, 3),
        "device_idle_fraction": round(times["idle"] / times["train"], 5) if steps else None,
        "final_return_mean": statistics.finite(np.mean(final_returns)) if final_returns else None,
        "final_return_std": statistics.finite(np.std(final_returns, ddof=1)) if len(final_returns) > 1 else None,
        "final_return_iqm": statistics.finite(statistics.iqm(np.array(final_returns))) if final_returns else None,
        "final_return_per_seed": per_seed,
        "eval_return_mean": last.get("eval_return_mean"),
        "eval_return_std": last.get("eval_return_std"),
        "eval_length_mean": last.get("eval_length_mean"),
        "eval_episodes": last.get("eval_episodes"),
        "eval_truncated": last.get("eval_truncated"),
        "best_eval_return_mean": best.get("eval_return_mean"),
        "best_eval_env_steps": best.get("env_steps"),
        "evaluations": tracker.evaluations,
        "solved_threshold": options.solved_threshold,
        "solved": all_solved if options.solved_threshold is not None else None,
        "steps_to_solve": int(np.median([s[0] for s in solved])) if all_solved else None,
        "time_to_solve_s": statistics.finite(np.median([s[1] for s in solved])) if all_solved else None,
        "steps_to_solve_per_seed": [s and s[0] for s in tracker.solved],
        "time_to_solve_s_per_seed": [s and s[1] for s in tracker.solved],
        "diverged_at_per_seed": tracker.diverged,
        "failure": ended.failure or None,
        "num_checkpoints": ended.num_saved,
        "last_checkpoint": ended.last_saved,
        "replay": ended.replay,
        "init_from": options.init_from or None,
        "num_shards": plan.placement.num_shards,
        "num_grad_workers": plan.placement.num_grad_workers,
        "device": devices.device(),
        "versions": fingerprint.versions(),
    }


def _best(checkpoints: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Return the best evaluation: the known one, or a better one from before the run was extended."""
    from jaxrl_fast.runs import checkpoint

    marked = checkpoint.marked(checkpoints)
    if marked is None or known and known["eval_return_mean"] >= marked[1]:
        return known
    return {"env_steps": checkpoint.env_steps(marked[0]), "eval_return_mean": marked[1]}
