"""Name the files and folders that a run, a sweep or a search writes. Standard library only."""

from pathlib import Path

FORMAT = 3  # of config.yaml, sweep.yaml and checkpoints: increased when older ones cannot be read
RUNS, SWEEPS, SEARCHES = Path("runs"), Path("sweeps"), Path("searches")  # the default parents of their directories
CONFIG, METRICS, SUMMARY, CURVE = "config.yaml", "metrics.jsonl", "summary.json", "curve.png"
CHECKPOINTS = "checkpoints"
SWEEP_FILE, SWEEP_TABLE, SWEEP_REPORT = "sweep.yaml", "results.csv", "report.md"
SEARCH_FILE = "search.yaml"


def in_folder(parent: Path, text: str) -> str:
    """Return the folder that text means: a bare word is in `parent`."""
    return str(parent / text) if text and "/" not in text and text.strip(". ~") else text


def check_format(found: object, origin: object) -> None:
    """Raise ValueError for a file in a format of another version that this one cannot read."""
    if found != FORMAT:
        is_newer = isinstance(found, int) and found > FORMAT
        age, remedy = ("a newer", "update jaxrl_fast") if is_newer else ("an older", "train it again")
        raise ValueError(
            f"{origin}: written by {age} version of jaxrl_fast (format {found}, this is {FORMAT}); {remedy}"
        )
