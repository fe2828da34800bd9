"""Submit the groups of a sweep as a job array, with submitit."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

from jaxrl_fast.utils.importing import install

TIMEOUT_MIN = 24 * 60  # default time limit of a job
FOLDER = "slurm"  # submitit's files, in the sweep's folder


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError if submitit or sbatch is missing, or submitit rejects the options."""
    if util.find_spec("submitit") is None:
        raise ValueError(f"launcher slurm: submitit is not installed; {install('slurm')}")
    if shutil.which("sbatch") is None:
        raise ValueError("launcher slurm: sbatch was not found; run it on a machine that can submit jobs")
    with tempfile.TemporaryDirectory() as folder:
        _executor(Path(folder), options, "slurm")


def submit(folder: Path, names: Sequence[str], options: Mapping[str, Any], cluster: str = "slurm") -> list[Any]:
    """Submit one job for each named group of the sweep in `folder`; return the submitit jobs."""
    from jaxrl_fast.sweep import worker

    executor = _executor(folder / FOLDER, options, cluster)
    return executor.map_array(worker.run_group_by_name, [str(folder.resolve())] * len(names), names) if names else []


def _executor(folder: Path, options: Mapping[str, Any], cluster: str) -> Any:
    """Return a submitit executor. Raise ValueError if it rejects the options."""
    import submitit
    import yaml

    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    given = {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in options.items()}
    try:
        executor.update_parameters(**{"name": "jaxrl_fast", "timeout_min": TIMEOUT_MIN} | given)
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"slurm_options: {str(error).splitlines()[0]}") from error
    return executor
