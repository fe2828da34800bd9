"""Draw the learning curve of one run."""

from pathlib import Path
from typing import Any

from jaxrl_fast.config.paths import CURVE
from jaxrl_fast.config.population import by_member
from jaxrl_fast.runs.files import read_metrics, read_summary


def save_figure(folder: Path) -> None:
    """Draw a run's learning curve and save it in its folder."""
    from jaxrl_fast.plotting import curves

    curves.save(figure(folder), folder / CURVE)


def figure(folder: Path) -> Any:
    """Return a run's learning curve as a matplotlib figure; with several players, the first one's.

    Raises:
        ValueError: If the run has not ended or has no records.
    """
    import numpy as np

    from jaxrl_fast.metrics.window import WINDOW
    from jaxrl_fast.plotting import curves

    summary = read_summary(folder)
    members = by_member(read_metrics(folder))
    if not members:
        raise ValueError(f"{folder} has no records of its training, so no learning curve exists")
    names = next(iter(members.values()))[0]
    of_player = next((name.removeprefix("return_mean") for name in names if name.startswith("return_mean/")), "")
    column = lambda name: np.array([[r[name] for r in records] for records in members.values()], np.float64)
    at, means, counts = map(column, ("env_steps", f"return_mean{of_player}", "episodes"))  # an unknown mean is NaN
    steps, returns, episodes = curves.downsample(at[0], means, counts)
    if len(members) > 1:
        curve = curves.aggregate("", steps, returns)
    else:
        curve = curves.Curve("", steps, returns, _last_episodes(returns[0], episodes[0], WINDOW), None)
    unit = "seed" if all(len(member) == 1 for member in members) else "member"
    title = f"{summary['algo'].rpartition('.')[2].upper()} on {summary['env_id']}{of_player.replace('/', ', ')}"
    evaluations = [e | {"eval_return_mean": e[f"eval_return_mean{of_player}"]} for e in summary["evaluations"]]
    return curves.draw_run(title, curve, evaluations, summary["solved_threshold"], unit)


def _last_episodes(returns: Any, episodes: Any, window: int) -> Any:
    """Return at each record the mean return of the last `window` episodes, or slightly more."""
    import numpy as np

    total, count = np.cumsum(np.nan_to_num(returns) * episodes), np.cumsum(episodes)
    start = np.searchsorted(count, count - window, side="right") - 1
    before_total, before_count = np.where(start >= 0, total[start], 0), np.where(start >= 0, count[start], 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total - before_total) / np.where(count > before_count, count - before_count, np.nan)
