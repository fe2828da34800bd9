"""Define the interface of loggers and the tags that they use."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxrl_fast.config.population import LABEL

Record = Mapping[str, Any]
# Tags as in CleanRL, so that curves can be compared; td_loss differs by a factor, for CleanRL omits the 1/2.
CHARTS = {
    "return_mean": "charts/episodic_return",
    "return_min": "charts/episodic_return_min",
    "return_max": "charts/episodic_return_max",
    "episode_length_mean": "charts/episodic_length",
    "env_steps_per_s": "charts/SPS",
    "learning_rate": "charts/learning_rate",
    "epsilon": "charts/epsilon",
    "td_loss": "losses/td_loss",
    "q_value": "losses/q_values",
    "clip_fraction": "losses/clipfrac",
    "episodes": "charts/episodes",
    "gradient_steps": "charts/gradient_steps",
    "replay_size": "charts/replay_size",
    "eval_return_mean": "eval/episodic_return",
    "eval_return_std": "eval/episodic_return_std",
    "eval_return_min": "eval/episodic_return_min",
    "eval_return_max": "eval/episodic_return_max",
    "eval_episodes": "eval/episodes",
    "eval_truncated": "eval/truncated",
    "eval_length_mean": "eval/episodic_length",
}
SILENT = ("env_steps", "valid_steps", "wall_time_s", "train_time_s", "num_updates", "seed")


class Sink(Protocol):
    """A destination of records, which come in lists of one record per seed."""

    def write(self, records: Sequence[Record]) -> None:
        """Write the records of one step."""

    def close(self) -> None:
        """Write the remaining records and release resources."""


def tags(records: Sequence[Record]) -> dict[str, float]:
    """Return the mean over seeds for each tag; metrics without a value are left out."""
    found = {}
    for name in records[0]:
        values = [r[name] for r in records if r.get(name) is not None]
        if name not in SILENT and values and not name.startswith(LABEL):
            found[CHARTS.get(name, f"losses/{name}")] = sum(values) / len(values)
    return found
