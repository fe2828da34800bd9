"""Run a sweep from Python: `jaxrl_fast.sweep(...)`."""

import base64
import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_fast.config import paths
from jaxrl_fast.sweep import directory, grid, prepare, runner
from jaxrl_fast.sweep import report as sweep_report
from jaxrl_fast.sweep import table as sweep_table

MEASURES = (
    "status",
    "final_return",
    "env_steps_per_s",
    "steps_to_solve",
    "time_to_solve_s",
)  # columns shown in a notebook


def sweep(
    preset: str | None = None, *, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> "Sweep":
    """Train with every combination of the given values and return the results.

    Any option of `fit` may be a list of values. Called again with the same `sweep_dir`, an unfinished sweep is resumed
    and no run is repeated. A program that fails is recorded in `results`; the others still run. With `resume`, given
    values are added to the sweep: `sweep(resume="sweeps/a", seed=[3, 4])`; a larger `total_steps` extends every run.

    Args:
        preset: Name of a preset or path of a YAML file.
        algo: Name of a built-in algorithm, or the module or module name of a custom one.
        agent: Options of the algorithm: `{"learning_rate": [1e-4, 1e-3]}`.
        **options: Options of `fit`: `num_envs=[64, 256], seed=range(5)`. The options `scale`, `sweep_dir`, `workers`,
            `launcher`, `slurm_options`, `ray_options`, `retry` and `resume` belong to the sweep itself.

    Returns:
        The finished sweep: its folder and a dictionary for each training.

    Raises:
        ValueError: If an option or a combination is not valid; nothing has been trained then.
    """
    if isinstance(options.get("resume"), Sweep):
        options["resume"] = options["resume"].folder
    ready = prepare.prepare(grid.from_keywords(preset, algo, agent, **options))
    status = runner.execute(ready)
    return Sweep(ready.folder.resolve(), sweep_table.table_rows(ready), status)


@dataclass(frozen=True, repr=False)
class Sweep:
    """The results of a sweep. Its folder holds the same table, a report and figures."""

    folder: Path
    results: list[dict[str, Any]]  # a dictionary for each training: `pandas.DataFrame(sweep.results)` is a table
    status: int  # 0; 1 if a program failed, diverged or could not be saved; 128 + n if signal n stopped the sweep

    def plot(self, name: str = "") -> Any:
        """Return one of the figures.

        Args:
            name: File name of the figure, with or without ".png". Default: "throughput", or else "curves".

        Raises:
            ValueError: If no such figure exists, or nothing has been trained yet.
        """
        drawn = sweep_report.figures_of(directory.read_plan(self.folder), self.results)
        if not drawn:
            raise ValueError(f"{self.folder}: nothing has been trained yet, so no figure exists")
        file_name = f"{name.removesuffix('.png')}.png" if name else next(iter(drawn))
        if file_name not in drawn:
            available = ", ".join(n.removesuffix(".png") for n in drawn)
            raise ValueError(f"unknown figure {name!r}; available: {available}")
        return drawn[file_name]

    @property
    def report(self) -> str:
        """Return the report as Markdown."""
        return (self.folder / paths.SWEEP_REPORT).read_text(encoding="utf-8")

    def __repr__(self) -> str:
        return f"Sweep({len(self.results)} trainings, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """Return the main figure and the table for a notebook."""
        names = [name for name in self.results[0] if name not in sweep_table.MEASURES] + list(MEASURES)
        text = lambda value: "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        row = lambda tag, cells: f"<tr>{''.join(f'<{tag}>{html.escape(text(cell))}</{tag}>' for cell in cells)}</tr>"
        table = row("th", names) + "".join(row("td", [result[name] for name in names]) for result in self.results)
        shown = f"<table>{table}</table>{html.escape(str(self.folder))}"
        try:
            image = base64.b64encode(self.plot()._repr_png_()).decode("ascii")
        except ValueError:  # nothing has been trained yet
            return shown
        return f'<img src="data:image/png;base64,{image}" width="640">{shown}'
