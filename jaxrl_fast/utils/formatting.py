"""Format numbers and records for people. Standard library only."""

from collections.abc import Mapping, Sequence
from typing import Any

SPARKS = "▁▂▃▄▅▆▇█"


def progress_line(record: Mapping[str, Any], width: int | None = None) -> str:
    """Return the line that shows a record, for example

    step  12k   return  24.4 (len 24, 410 eps)   greedy  31.2   value loss 0.3100   entropy 0.6400   96k steps/s

    Args:
        record: A record of metrics.jsonl.
        width: The maximum number of characters, or None. A longer line loses losses first, then the episodes.
    """
    score = "no episode ended"
    if record["return_mean"] is not None:
        episodes = f"{short_number(record['episodes'])} ep{'s' * (record['episodes'] != 1)}"
        played = f"(len {record['episode_length_mean']:.0f}, {episodes})"
        score = f"return {record['return_mean']:7.1f} {played}"
    losses = [name for name in record if name.endswith("loss") and name != "policy_loss"][:1]
    losses += [name for name in record if name == "entropy"]
    evaluation = record.get("eval_return_mean")
    parts = [f"step {short_number(record['env_steps']):>5}", f"{score:<34}"]
    means = {name: x for name, x in record.items() if name.startswith("return_mean/") and x is not None}
    parts += [" ".join(f"{name.partition('/')[2]} {x:.1f}" for name, x in means.items())] if means else []
    parts += [f"greedy {evaluation:7.1f}"] if evaluation is not None else []
    parts += [f"{name.replace('_', ' ')} {_fixed(record[name])}" for name in losses]
    parts += [f"{short_number(record['env_steps_per_s'])} steps/s"]
    while width and len("   ".join(parts)) > width and len(parts) > 3:
        del parts[-2]
    if width and len("   ".join(parts)) > width:
        parts[1] = score.partition(" (")[0]
    return "   ".join(parts)


def short_number(number: float) -> str:
    """Return a number with at most three digits: 12.3k for 12345."""
    for power, letter in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
        if abs(number) >= 0.9995 * 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def seconds(duration: float) -> str:
    """Return a duration in seconds as "1.3 s", "74 s", "12 min" or "3.2 h"."""
    if duration < 99.5:
        return f"{duration:.2g} s" if duration < 9.95 else f"{duration:.0f} s"
    return f"{duration / 60:.0f} min" if duration < 5970 else f"{duration / 3600:.1f} h"


def counted(number: int, what: str, ending: str = "s") -> str:
    """Return a number with its noun: "1 program", "2 programs"."""
    return f"{number} {what}{ending * (number != 1)}"


def steps_of_rollout(length: int, num_envs: int) -> str:
    """Return the steps of a rollout: "1 step in 1 environment", "128 steps in each of 16 environments"."""
    each = "each of " if num_envs > 1 else ""
    return f"{counted(length, 'step')} in {each}{counted(num_envs, 'environment')}"


def sparkline(values: Sequence[float | None], width: int = 16) -> str:
    """Return a curve as at most `width` block characters, each the mean of an equal part of the known values."""
    known = [v for v in values if v is not None]
    if not known:
        return ""
    width = min(width, len(known))
    cells = [known[i * len(known) // width : (i + 1) * len(known) // width] for i in range(width)]
    means = [sum(c) / len(c) for c in cells]
    low, spread = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(int((m - low) / spread * len(SPARKS)), len(SPARKS) - 1)] for m in means)


def _fixed(value: float | None) -> str:
    """Return a number in six characters."""
    if value is None:
        return "   n/a"
    return f"{value:6.0e}" if 0 < abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:6.4f}"[:6]
