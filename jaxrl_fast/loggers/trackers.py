"""Send records to Weights & Biases or trackio."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_fast.loggers.sinks import Record, tags


class Tracker:
    """A run in Weights & Biases or trackio, which have the same functions.

    Args:
        service: Name of the module, "wandb" or "trackio".
        project: Name of the project.
        name: Name of the run.
        identity: A unique id by which a resumed run is found. trackio has only names, so the id is appended there.
        config: The run's configuration.
    """

    def __init__(self, service: str, project: str, name: str, identity: str, config: Mapping[str, Any]):
        self.service = importlib.import_module(service)
        run_id = {"name": name, "id": identity} if service == "wandb" else {"name": f"{name}-{identity}"}
        self.service.init(project=project, config=dict(config), resume="allow", **run_id)

    def write(self, records: Sequence[Record]) -> None:
        """Send the means over seeds."""
        self.service.log(tags(records), step=records[0]["env_steps"])

    def close(self) -> None:
        """Finish the run."""
        self.service.finish()
