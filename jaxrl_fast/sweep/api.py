"""`jaxrl_fast.sweep(...)`: a sweep from Python."""

import base64
import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_fast.config import paths
from jaxrl_fast.sweep import directory, grid, prepare, runner
from jaxrl_fast.sweep import table as sweep_table
from jaxrl_fast.sweep.report import figures_of

MEASURES = ("status", "final_return", "env_steps_per_s", "steps_to_solve", "time_to_solve_s")  # that a notebook shows


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
    ready = prepare.prepare(grid.from_keywords(preset, algo, agent, **options))
    status = runner.execute(ready)
    return Sweep(ready.folder.resolve(), sweep_table.table_rows(ready), status)


@dataclass(frozen=True, repr=False)
class Sweep:
    """A sweep that has been gone through. Its folder holds the same table, a report and figures."""

    folder: Path
    results: list[dict[str, Any]]  # a dictionary for each training: `pandas.DataFrame(sweep.results)` is a table
    status: int  # 0; 1 where a program failed or diverged, or is not on the disk; or 128 and the signal that stopped it

    def plot(self, name: str = "") -> Any:
        """One of its figures, by the name of its file; left out, steps per second, or the curves where that is none."""
        drawn = figures_of(directory.read(self.folder), self.results)
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
        return (self.folder / paths.SWEEP_REPORT).read_text(encoding="utf-8")

    def __repr__(self) -> str:
        return f"Sweep({len(self.results)} trainings, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        names = [name for name in self.results[0] if name not in sweep_table.MEASURES] + list(MEASURES)
        text = lambda value: "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        row = lambda tag, cells: f"<tr>{''.join(f'<{tag}>{html.escape(text(cell))}</{tag}>' for cell in cells)}</tr>"
        table = row("th", names) + "".join(row("td", [result[name] for name in names]) for result in self.results)
        words = f"<table>{table}</table>{html.escape(str(self.folder))}"
        try:
            picture = base64.b64encode(self.plot()._repr_png_()).decode("ascii")
        except ValueError:  # there is nothing to see yet
            return words
        return f'<img src="data:image/png;base64,{picture}" width="640">{words}'
