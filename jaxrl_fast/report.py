"""What a run leaves in its folder: config.yaml, what summary.json holds, and its learning curve."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_fast import config, files, host
from jaxrl_fast.members import by_member
from jaxrl_fast.spelling import why
from jaxrl_fast.written import made

METRICS, SUMMARY, CURVE = "metrics.jsonl", "summary.json", "curve.png"

if TYPE_CHECKING:
    from jaxrl_fast.plan import Plan
    from jaxrl_fast.scores import Scores


class Ended(NamedTuple):
    """How a run ended and what it took."""

    status: str  # done, stopped, diverged or failed
    failure: str  # why it could not go on, in a sentence
    updates: int
    seconds: Mapping[str, float]  # train, compile, eval, idle, save and wall, in all processes
    program_memory: int  # bytes
    num_saved: int  # checkpoints
    last_saved: str | None  # the name of the last


def write_config(plan: "Plan") -> None:
    """Everything, resolved. It is a preset too: --config runs/NAME/config.yaml. A run that goes on says so in it."""
    import yaml

    path, options = plan.folder / config.CONFIG, plan.settings.options
    now = {
        "id": secrets.token_hex(4),
        "preset": plan.settings.preset,
        "env_id": plan.env.spec.id,
        "num_shards": plan.placement.num_shards,
        "num_hands": plan.placement.num_hands,
        "device": host.device(),
        "versions": host.versions(),
    } | ({"members": [m.label for m in plan.members]} if plan.members else {})
    if not isinstance(options.env, (str, type)):
        now["env_is_an_object"] = True  # which its id may not make again as it was
    if options.resume:
        before = made(path)
        again = {"env_steps": plan.saved.manifest["env_steps"] if plan.saved else 0, "total_steps": options.total_steps}
        kept = {name: now[name] for name in ("env_is_an_object",) if name in now}
        now = {"id": now["id"]} | before | kept | {"resumed": [*before.get("resumed", []), again | host.fingerprint()]}
    content = config.to_mapping(plan.settings) | {"env": plan.env.spec.id, "made": now}
    files.replace(path, yaml.safe_dump(content, sort_keys=False))


def mark_running(folder: Path) -> None:
    """A summary of a run that goes on says so, until it ends again: who asks for its status is not told "done"."""
    with host.warned(f"{SUMMARY} could not be written"):
        if (folder / SUMMARY).is_file():
            write_summary(folder, read_summary(folder) | {"status": "running"})


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """What `summarise` gave, where `read_summary` finds it."""
    files.replace(folder / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def summarise(plan: "Plan", results: "Scores", ended: Ended) -> dict[str, Any]:
    """What summary.json holds. Times are seconds; env_steps are those of one seed, env_steps_per_s those of all."""
    import numpy as np

    from jaxrl_fast import keeper, population

    options, times = plan.settings.options, ended.seconds
    steps = ended.updates * plan.steps_per_update
    per_seed = results.finals()
    finals = [mean for mean in per_seed if mean is not None]
    last = results.evaluations[-1] if results.evaluations else {}
    best = _best(plan.folder / keeper.FOLDER, results.best())
    solved = [s for s in results.solved if s is not None]
    all_solved = len(solved) == options.num_seeds
    return {
        "status": ended.status,
        "algo": plan.settings.algo,
        "env_id": plan.env.spec.id,
        "protocol": plan.env.protocol or None,
        "num_envs": options.num_envs,
        "seed": options.seed,
        "num_seeds": options.num_seeds,
        "members": results.labels,
        "env_steps": steps,
        "updates": ended.updates,
        "valid_steps": results.valid_steps,
        "train_time_s": round(times["train"], 4),
        "compile_time_s": round(times["compile"], 4),
        "eval_time_s": round(times["eval"], 4),
        "save_time_s": round(times["save"], 4),
        "wall_time_s": round(times["wall"], 4),
        "env_steps_per_s": round(steps * options.num_seeds / times["train"], 1) if steps else None,
        "peak_memory_mb": host.peak_memory_mb(),
        "program_memory_mb": round(ended.program_memory / 2**20, 3),
        "host_share": round(times["idle"] / times["train"], 5) if steps else None,
        "final_return_mean": population.finite(np.mean(finals)) if finals else None,
        "final_return_std": population.finite(np.std(finals, ddof=1)) if len(finals) > 1 else None,
        "final_return_iqm": population.finite(population.iqm(np.array(finals))) if finals else None,
        "final_return_per_seed": per_seed,
        "eval_return_mean": last.get("eval_return_mean"),
        "eval_return_std": last.get("eval_return_std"),
        "eval_length_mean": last.get("eval_length_mean"),
        "eval_episodes": last.get("eval_episodes"),
        "eval_unfinished": last.get("eval_unfinished"),
        "best_eval_return_mean": best.get("eval_return_mean"),
        "best_eval_env_steps": best.get("env_steps"),
        "evaluations": results.evaluations,
        "solved_threshold": options.solved,
        "solved": all_solved if options.solved is not None else None,
        "steps_to_solve": int(np.median([s[0] for s in solved])) if all_solved else None,
        "time_to_solve_s": population.finite(np.median([s[1] for s in solved])) if all_solved else None,
        "steps_to_solve_per_seed": [s and s[0] for s in results.solved],
        "time_to_solve_s_per_seed": [s and s[1] for s in results.solved],
        "diverged_at_per_seed": results.diverged,
        "failure": ended.failure or None,
        "checkpoints": ended.num_saved,
        "last_checkpoint": ended.last_saved,
        "num_shards": plan.placement.num_shards,
        "num_hands": plan.placement.num_hands,
        "device": host.device(),
        "versions": host.versions(),
    }


def _best(checkpoints: Path, known: dict[str, Any]) -> dict[str, Any]:
    """The best evaluation: of those that are known, or that of a run before it was made longer, if it was better."""
    from jaxrl_fast import checkpoint

    marked = checkpoint.marked(checkpoints)
    if marked is None or known and known["eval_return_mean"] >= marked[1]:
        return known
    return {"env_steps": checkpoint.env_steps(marked[0]), "eval_return_mean": marked[1]}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; none where it failed before the first, and not one that is still being written.

    ValueError where a line is none.
    """
    if not (folder / METRICS).is_file():
        return []
    records = []
    with open(folder / METRICS, encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                records.append(_record(json.loads(text)))
            except (ValueError, RecursionError) as error:
                if text.endswith("\n"):
                    raise ValueError(f"line {number}: {why(error)}") from error
    return records


def _record(found: Any) -> dict[str, Any]:
    """ValueError for what no run has written."""
    if not isinstance(found, dict) or not all(isinstance(found.get(name), int) for name in ("seed", "env_steps")):
        raise ValueError("no record")
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in found.values()):
        raise ValueError("a number that is too large")
    return found


def read_summary(folder: Path) -> dict[str, Any]:
    """What a run said of itself when it last ended. ValueError where it has not, or where that cannot be read."""
    path = folder / SUMMARY
    if not path.is_file():
        go_on = f"train with --resume {quote(str(folder))} goes on with it, unless it is still under way"
        raise ValueError(f"{folder} has no {SUMMARY}, for its run has not ended; {go_on}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({why(error)})") from error


def summary_if_any(folder: Path) -> dict[str, Any]:
    """The same, or nothing where there is none that can be read."""
    try:
        return read_summary(folder)
    except (OSError, ValueError):
        return {}


def draw(folder: Path) -> None:
    """A run's learning curve, as a file in its folder."""
    from jaxrl_fast import curves

    curves.save(picture(folder), folder / CURVE)


def picture(folder: Path) -> Any:
    """A run's learning curve as a matplotlib figure."""
    import numpy as np

    from jaxrl_fast import curves, population

    summary = read_summary(folder)
    members = by_member(read_metrics(folder))
    if not members:
        raise ValueError(f"{folder}: nothing was written of its training, so there is nothing to see")
    column = lambda name: np.array([[r[name] for r in records] for records in members.values()], np.float64)
    at, means, counts = map(column, ("env_steps", "return_mean", "episodes"))  # a mean that is unknown is NaN
    steps, returns, episodes = curves.thin(at[0], means, counts)
    if len(members) > 1:
        curve = curves.gathered("", steps, returns)
    else:
        curve = curves.Curve("", steps, returns, _last_episodes(returns[0], episodes[0], population.WINDOW), None)
    of = "seed" if all(len(member) == 1 for member in members) else "member"
    title = f"{summary['algo'].rpartition('.')[2].upper()} on {summary['env_id']}"
    return curves.figure(title, curve, summary["evaluations"], summary["solved_threshold"], of)


def _last_episodes(returns: Any, episodes: Any, window: int) -> Any:
    """At each record, the mean over the last `window` episodes or a few more."""
    import numpy as np

    total, count = np.cumsum(np.nan_to_num(returns) * episodes), np.cumsum(episodes)
    start = np.searchsorted(count, count - window, side="right") - 1
    before_total, before_count = np.where(start >= 0, total[start], 0), np.where(start >= 0, count[start], 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total - before_total) / np.where(count > before_count, count - before_count, np.nan)
