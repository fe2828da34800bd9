"""Search hyperparameters from Python: `jaxrl_fast.search(...)`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_fast.search import prepare, request, runner, work
from jaxrl_fast.search.trials import Trial


def search(
    preset: str | None = None, *, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> "Search":
    """Find hyperparameters, and return the trials and the best settings.

    Called again with the same `search_dir`, an unfinished search is resumed and no training is repeated.

    Args:
        preset: Name of a preset or path of a YAML file.
        algo: Name of a built-in algorithm, or the module or module name of a custom one.
        agent: Options of the algorithm.
        **options: Options of `fit`, and those of the search: `over={"learning_rate": (1e-5, 1e-2), "gamma": (0.9,
            0.999)}`, `trials`, `seeds`, `test_seeds`, `winners`, `sampler`, `batch`, `scheduler`, `score`, `judge`,
            `search_dir`, `storage`, `study`, `launcher`, `workers`, `slurm_options`, `ray_options`, `resume`.

    Returns:
        The finished search. With `launcher="slurm"`, its jobs have been submitted and write the results.

    Raises:
        ValueError: If an option is not valid; nothing has been trained then.
        KeyboardInterrupt: If a signal has stopped the search; the same call resumes it.
    """
    if isinstance(options.get("resume"), Search):
        options["resume"] = options["resume"].folder
    ready = prepare.prepare(request.from_keywords(preset, algo, agent, **options))
    if runner.execute(ready) >= 128:
        raise KeyboardInterrupt
    return Search(ready.folder.resolve())


@dataclass(frozen=True)
class Search:
    """The results of a search."""

    folder: Path

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Return all trials, in the order in which they were drawn."""
        return work.trials_of(prepare.read(self.folder))

    @property
    def best(self) -> str:
        """Return the path of the preset with the best settings: `fit(search.best)` trains with them."""
        return str(self.folder / "best.yaml")

    @property
    def report(self) -> str:
        """Return the report as Markdown."""
        return (self.folder / "report.md").read_text(encoding="utf-8")
