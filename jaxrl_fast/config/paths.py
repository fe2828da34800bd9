"""Names of files and folders that a run or a sweep writes. Standard library only."""

from pathlib import Path

CHECKPOINTS = "checkpoints"


METRICS, SUMMARY, CURVE = "metrics.jsonl", "summary.json", "curve.png"


SWEEP_TABLE, SWEEP_REPORT = "results.csv", "report.md"


CONFIG = "config.yaml"  # of a run: everything, resolved; a preset too


RUNS = Path("runs")  # where they are kept unless told
SWEEP_FILE = "sweep.yaml"  # of a sweep: its groups and their members
