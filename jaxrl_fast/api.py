"""From Python: `fit("ppo_cartpole", num_envs=256, total_steps=1_000_000)` trains, `load("runs/mine")` acts."""

import base64
import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxrl_fast import command, config, plan, report, sinks, trainer

if TYPE_CHECKING:
    from jaxrl_fast.policy import Trained


def fit(preset: str | None = None, *, algo: str = "", agent: Mapping[str, Any] | None = None, **options: Any) -> "Run":
    """Trains, and returns the run.

    The names are those of the command line: a preset's name or file, its options as keywords (`num_envs=256`,
    `env="Acrobot-v1"`, `env_options={"max_steps_in_episode": 200}`), and the algorithm's own options by name in
    `agent={"learning_rate": 1e-3}`. `env` may also be a class, a factory or an instance with gymnax's interface.
    What is wrong is a ValueError of one sentence, raised before anything is compiled or written. A training whose
    numbers are no longer finite is a FloatingPointError; its folder holds what there was until then.
    """
    settings = config.from_keywords(preset, algo, agent, **options)
    outcome = trainer.execute(plan.prepare(settings))
    if outcome.failure:
        raise FloatingPointError(outcome.failure)
    return Run(outcome.folder.resolve(), outcome.summary, outcome.agent_state, settings.options.env)


def load(
    run: "str | Path | Run", seed: int | None = None, which: Literal["best", "last"] = "best", env: Any = None
) -> "Trained":
    """What a run has learnt: `load("runs/mine").policy(obs)` is the action for an observation (see `policy.Trained`).

    It is as it was when it evaluated best, or at the last checkpoint. `seed` is one of the run's, by default the first;
    `env` is what it was trained in, where an id does not find that. What is wrong is a ValueError of one sentence.
    """
    from jaxrl_fast import policy

    if isinstance(run, Run):
        return policy.load(run.folder, seed, which, run.env if env is None else env)
    return policy.load(Path(run).expanduser(), seed, which, env)


@dataclass(frozen=True, repr=False)
class Run:
    """A training that has ended. Its folder holds the same numbers."""

    folder: Path
    summary: dict[str, Any]
    agent_state: Any  # what the algorithm's functions take; it has a leading axis where there are several seeds
    env: Any = None  # what it was trained in, where an id does not find that

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dictionary for each record (and seed), as in metrics.jsonl: `pandas.DataFrame(run.metrics)` is a table."""
        return report.read_metrics(self.folder)

    def plot(self, **options: Any) -> Any:
        """The learning curve, as a matplotlib figure; with options of the plot command (`x="seconds"`), that curve."""
        from jaxrl_fast import plot

        return plot.compare([self.folder], **options) if options else report.picture(self.folder)

    def evaluate(self, **options: Any) -> dict[str, Any]:
        """Plays fresh episodes, as the evaluate command does and with its options: what evaluation.json then holds."""
        from jaxrl_fast import evaluate

        chosen = command.from_keywords(evaluate.Options, options)
        return evaluate.run(evaluate.open_run(self.folder, chosen, self.env), chosen)

    def video(self, **options: Any) -> Any:
        """A GIF of the greedy policy, as the video command makes it and with its options; a notebook shows it."""
        from jaxrl_fast import video

        return video.run(*video.open_run(self.folder, command.from_keywords(video.Options, options), self.env))

    def __repr__(self) -> str:
        return f"Run({self._words()}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        picture = base64.b64encode(self.plot()._repr_png_()).decode("ascii")
        words = html.escape(f"{self._words()} · {self.folder}")
        return f'<div>{words}<br><img src="data:image/png;base64,{picture}" width="720"></div>'

    def _words(self) -> str:
        s = self.summary
        steps = f"{sinks.short(s['env_steps'])} steps in {sinks.seconds(s['train_time_s'])}"
        score = "" if s["final_return_mean"] is None else f", return {s['final_return_mean']:.1f}"
        return f"{s['algo']} on {s['env_id']}, {steps}{score}"
