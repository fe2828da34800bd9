"""Send records to Weights & Biases or trackio."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_fast.loggers.sinks import Record, tags


class Tracker:
    """Sends records to Weights & Biases or trackio, which share their calls. `identity` finds a resumed run there.

    trackio finds a run by its name alone, so the identity is part of the name.
    """

    def __init__(self, service: str, project: str, name: str, identity: str, config: Mapping[str, Any]):
        self.service = importlib.import_module(service)
        who = {"name": name, "id": identity} if service == "wandb" else {"name": f"{name}-{identity}"}
        self.service.init(project=project, config=dict(config), resume="allow", **who)

    def write(self, records: Sequence[Record]) -> None:
        self.service.log(tags(records), step=records[0]["env_steps"])

    def close(self) -> None:
        self.service.finish()
