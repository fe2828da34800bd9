"""The groups of a sweep as an array of jobs, by submitit."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

TIMEOUT_MIN = 24 * 60  # of a job, unless told
FOLDER = "slurm"  # in the sweep's: what submitit writes


def check(options: Mapping[str, Any]) -> None:
    """ValueError where nothing could be submitted."""
    if util.find_spec("submitit") is None:
        raise ValueError('--launcher slurm: submitit is not installed here; pip install "jaxrl_fast[slurm]"')
    if shutil.which("sbatch") is None:
        raise ValueError("--launcher slurm: there is no sbatch here; run it where jobs are submitted")
    with tempfile.TemporaryDirectory() as folder:
        _executor(Path(folder), options, "slurm")


def submit(folder: Path, names: Sequence[str], options: Mapping[str, Any], cluster: str = "slurm") -> list[Any]:
    """A job for each group of the sweep in this folder."""
    from jaxrl_fast.sweep import worker

    executor = _executor(folder / FOLDER, options, cluster)
    return executor.map_array(worker.run_group_by_name, [str(folder.resolve())] * len(names), names) if names else []


def _executor(folder: Path, options: Mapping[str, Any], cluster: str) -> Any:
    import submitit
    import yaml

    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    given = {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in options.items()}
    try:
        executor.update_parameters(**{"name": "jaxrl_fast", "timeout_min": TIMEOUT_MIN} | given)
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"--slurm-options: {str(error).splitlines()[0]}") from error
    return executor
