"""From Python: `fit("ppo_cartpole", num_envs=256, total_steps=1_000_000)` trains, `load("runs/mine")` acts."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from jaxrl_fast import command, config, grid, host, layout, plan, report, results, sweeper, trainer, wording
from jaxrl_fast.values import convert
from jaxrl_fast.written import from_mapping, path_of

if TYPE_CHECKING:
    from jaxrl_fast.policy import Trained

MEASURES = ("status", "final_return", "env_steps_per_s", "steps_to_solve", "time_to_solve_s")  # that a notebook shows


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
    settings = config.from_keywords(preset, algo, agent, **options)
    ready = plan.prepare(settings)
    outcome = trainer.execute(ready)
    if not ready.env.on_device:  # where that raised, a program may still be under way, so its pools stay
        host.forget([ready.env, ready.eval_env])
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
    """What a run has learnt: `load("runs/mine").policy(obs)` is the action for an observation (see `policy.Trained`).

    It is as it was when it evaluated best, all seeds or members of the run taken together, or at the last
    checkpoint. `seed` is one of the run's, by default the first; `env` is what it was trained in, where an id does
    not find that. In a part of a sweep `member` tells which of those that were trained together: {"agent.gamma":
    0.9}, or "gamma=0.9". What is wrong is a ValueError of one sentence.
    """
    from jaxrl_fast import policy

    values = convert(dict[str, Any], from_mapping({"member": {} if member is None else member}, lambda name: name)[0])
    if isinstance(run, Run):
        return policy.load(run.folder, seed, which, run.env if env is None else env, values)
    return policy.load(path_of(str(run)), seed, which, env, values)


def sweep(
    preset: str | None = None, *, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> "Sweep":
    """Trains with every combination of the values given, and returns what came of it.

    As `fit`, but any option may be a list of values: `num_envs=[64, 256], seed=range(5),
    agent={"learning_rate": [1e-4, 1e-3]}`; `scale`, `name`, `sweep_dir`, `workers` and `resume` are the sweep's own.
    Called again with the same `name` it goes on, and repeats nothing. A program that cannot be run is recorded in
    `results`, and the rest goes on.
    """
    if isinstance(options.get("resume"), Sweep):
        options["resume"] = options["resume"].folder
    ready = layout.prepare(grid.from_keywords(preset, algo, agent, **options))
    status = sweeper.execute(ready)
    return Sweep(ready.folder.resolve(), results.rows(ready), status)


@dataclass(frozen=True, repr=False)
class Sweep:
    """A sweep that has been gone through. Its folder holds the same table, a report and figures."""

    folder: Path
    results: list[dict[str, Any]]  # a dictionary for each training: `pandas.DataFrame(sweep.results)` is a table
    status: int  # 0; 1 where a program failed or diverged, or is not on the disk; or 128 and the signal that stopped it

    def plot(self, name: str = "") -> Any:
        """One of its figures, by the name of its file; left out, steps per second, or the curves where that is none."""
        drawn = results.figures_of(layout.read(self.folder), self.results)
        if not drawn:
            raise ValueError(f"{self.folder}: nothing has been trained yet, so there is nothing to see")
        wanted = f"{name.removesuffix('.png')}.png" if name else next(iter(drawn))
        if wanted not in drawn:
            there = ", ".join(n.removesuffix(".png") for n in drawn)
            raise ValueError(f"there is no figure {name!r}; there are {there}")
        return drawn[wanted]

    @property
    def report(self) -> str:
        """In words, as Markdown."""
        return (self.folder / results.REPORT).read_text(encoding="utf-8")

    def __repr__(self) -> str:
        return f"Sweep({len(self.results)} trainings, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        names = [name for name in self.results[0] if name not in results.MEASURES] + list(MEASURES)
        text = lambda value: "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        row = lambda tag, cells: f"<tr>{''.join(f'<{tag}>{html.escape(text(cell))}</{tag}>' for cell in cells)}</tr>"
        table = row("th", names) + "".join(row("td", [result[name] for name in names]) for result in self.results)
        words = f"<table>{table}</table>{html.escape(str(self.folder))}"
        try:
            picture = base64.b64encode(self.plot()._repr_png_()).decode("ascii")
        except ValueError:  # there is nothing to see yet
            return words
        return f'<img src="data:image/png;base64,{picture}" width="640">{words}'


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
        config.file_of_run(path, str(folder))
        return cls(path, report.read_summary(path), None, env)

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
        words = html.escape(f"{self._words()} · {self.folder}")
        try:
            picture = base64.b64encode(self.plot()._repr_png_()).decode("ascii")
        except ValueError:  # there is nothing to see
            return words
        return f'<div>{words}<br><img src="data:image/png;base64,{picture}" width="720"></div>'

    def _words(self) -> str:
        s = self.summary
        steps = f"{wording.short(s['env_steps'])} steps in {wording.seconds(s['train_time_s'])}"
        score = "" if s["final_return_mean"] is None else f", return {s['final_return_mean']:.1f}"
        return f"{s['algo']} on {s['env_id']}, {steps}{score}"
