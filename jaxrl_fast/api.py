"""From Python: `fit("ppo_cartpole", num_envs=256, total_steps=1_000_000)` trains, `load("runs/mine")` acts."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from jaxrl_fast import cli
from jaxrl_fast.config import resume
from jaxrl_fast.config.convert import convert
from jaxrl_fast.config.load import from_keywords
from jaxrl_fast.config.sources import from_mapping
from jaxrl_fast.plotting import run_curve
from jaxrl_fast.runs import files
from jaxrl_fast.training import plan, trainer
from jaxrl_fast.utils import devices, formatting
from jaxrl_fast.utils.files import path_of

if TYPE_CHECKING:
    from jaxrl_fast.evaluation.policy import Trained


def fit(
    preset: str | None = None, *, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> "Run":
    """Trains, and returns the run.

    The names are those of the command line: a preset's name or file, its options as keywords (`num_envs=256`,
    `env="Acrobot-v1"`, `env_options={"max_steps_in_episode": 200}`), and the algorithm's own options by name in
    `agent={"learning_rate": 1e-3}`. `env` may also be a class, a factory or an instance with gymnax's interface, and
    `algo` a module of your own, with `Config` and `make` in it.
    What is wrong is a ValueError of one sentence, raised before anything is compiled or written. A training whose
    numbers are no longer finite is a FloatingPointError, one without room in memory a MemoryError; its folder holds
    what there was until then. By Ctrl-C while it trains it is ended, saved and returned, with the status "stopped"; a
    second one is a KeyboardInterrupt.
    """
    if isinstance(options.get("resume"), Run):
        options |= {"env": options["resume"].env} if options["resume"].env is not None and "env" not in options else {}
        options["resume"] = options["resume"].folder
    settings = from_keywords(preset, algo, agent, **options)
    ready = plan.make_plan(settings)
    outcome = trainer.execute(ready)
    if not ready.env.on_device:  # where that raised, a program may still be under way, so its pools stay
        devices.release_envs([ready.env, ready.eval_env])
    if outcome.failure:
        raise FloatingPointError(outcome.failure)
    return Run(outcome.folder.resolve(), outcome.summary, outcome.agent_state, settings.options.env)


def load(
    run: "str | Path | Run",
    seed: int | None = None,
    which: Literal["best", "last"] = "best",
    env: Any = None,
    member: Mapping[str, Any] | str | Sequence[str] | None = None,
) -> "Trained":
    """What a run has learned: `load("runs/mine").policy(obs)` is the action for an observation (see `policy.Trained`).

    It is as it was when it evaluated best, all seeds or members of the run taken together, or at the last
    checkpoint. `seed` is one of the run's, by default the first; `env` is what it was trained in, where an id does
    not find that. In a part of a sweep `member` tells which of those that were trained together: {"agent.gamma":
    0.9}, or "gamma=0.9". What is wrong is a ValueError of one sentence.
    """
    from jaxrl_fast.evaluation import policy

    values = convert(dict[str, Any], from_mapping({"member": {} if member is None else member}, lambda name: name)[0])
    if isinstance(run, Run):
        return policy.load(run.folder, seed, which, run.env if env is None else env, values)
    return policy.load(path_of(str(run)), seed, which, env, values)


@dataclass(frozen=True, repr=False)
class Run:
    """A training that has ended. Its folder holds the same numbers."""

    folder: Path
    summary: dict[str, Any]
    agent_state: Any = None  # what `fit` ended with but for a replay, [S, ...] where there are S seeds: to act by
    env: Any = None  # what it was trained in, where an id does not find that

    @classmethod
    def open(cls, folder: str | Path, env: Any = None) -> "Run":
        """The run in this folder, whoever trained it: all but `agent_state`, for which there is `load`.

        `env` is what it was trained in, where an id does not find that. ValueError where no run has ended there.
        """
        path = path_of(str(folder)).resolve()
        resume.file_of_run(path, str(folder))
        return cls(path, files.read_summary(path), None, env)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dictionary for each record (and seed), as in metrics.jsonl: `pandas.DataFrame(run.metrics)` is a table."""
        return files.read_metrics(self.folder)

    def plot(self, **options: Any) -> Any:
        """The learning curve, as a matplotlib figure; with options of the plot command (`x="seconds"`), that curve."""
        from jaxrl_fast.plotting import compare

        return compare.compare([self.folder], **options) if options else run_curve.figure(self.folder)

    def evaluate(self, **options: Any) -> dict[str, Any]:
        """Plays fresh episodes, as the evaluate command does and with its options: what evaluation.json then holds."""
        from jaxrl_fast.evaluation import episodes

        chosen = cli.from_keywords(episodes.Options, options)
        return episodes.evaluate_run(episodes.open_run(self.folder, chosen, self.env), chosen)

    def video(self, **options: Any) -> Any:
        """A GIF of the greedy policy, as the video command makes it and with its options; a notebook shows it."""
        from jaxrl_fast.evaluation import video

        return video.record_video(*video.open_run(self.folder, cli.from_keywords(video.Options, options), self.env))

    def __repr__(self) -> str:
        return f"Run({self._words()}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        words = html.escape(f"{self._words()} · {self.folder}")
        try:
            picture = base64.b64encode(self.plot()._repr_png_()).decode("ascii")
        except ValueError:  # there is nothing to see
            return words
        return f'<div>{words}<br><img src="data:image/png;base64,{picture}" width="720"></div>'

    def _words(self) -> str:
        s = self.summary
        steps = f"{formatting.short_number(s['env_steps'])} steps in {formatting.seconds(s['train_time_s'])}"
        score = "" if s["final_return_mean"] is None else f", return {s['final_return_mean']:.1f}"
        return f"{s['algo']} on {s['env_id']}, {steps}{score}"
