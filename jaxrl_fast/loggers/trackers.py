"""Send records to Weights & Biases or trackio."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_fast.loggers.sinks import Record, tags


class Tracker:
    """Weights & Biases or trackio, which share their calls. A run that goes on is found again there by its `identity`.

    trackio finds a run by its name alone, so the name there has the identity in it.
    """

    def __init__(self, service: str, project: str, name: str, identity: str, config: Mapping[str, Any]):
        self.service = importlib.import_module(service)
        who = {"name": name, "id": identity} if service == "wandb" else {"name": f"{name}-{identity}"}
        self.service.init(project=project, config=dict(config), resume="allow", **who)

    def write(self, records: Sequence[Record]) -> None:
        self.service.log(tags(records), step=records[0]["env_steps"])

    def close(self) -> None:
        self.service.finish()
