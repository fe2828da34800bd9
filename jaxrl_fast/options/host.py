"""Define the options of host environments: envpool's, and a user's in Python."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_fast.options.declare import NON_NEGATIVE, Bounds, Part, RayActors, Seconds, option

RAY = "ray:"  # begins a number of Ray actors


@dataclass(frozen=True)
class Host(Part):
    """How environments on the host are stepped. Environments on the device have none of these options."""

    workers: int | RayActors | Literal["auto"] = option(
        "auto",
        "Worker processes for each pool of Python environments; 0: step them in the training process. ray:N: N Ray "
        "actors, on all nodes of a cluster. auto: chosen by the measured time of a step.",
        bounds=Bounds(0, 1024),
        resumable=True,
        sweepable=False,
    )
    timeout: Seconds = option(
        Seconds(300.0),
        "Seconds (or 5min, 2h) to wait for a step of a worker process before the run fails; 0: no limit.",
        bounds=NON_NEGATIVE,
        resumable=True,
        sweepable=False,
    )
    bridge: Literal["auto", "ffi", "callback"] = option(
        "auto",
        "How compiled programs call environments: C (ffi) or Python (callback). auto: ffi where it works.",
        resumable=True,
        sweepable=False,
    )
    async_pools: int = option(
        0, "Number of asynchronous environment pools per device; 0: synchronous.", bounds=Bounds(0, 64)
    )
    overlap: bool = option(
        False, "Collect the next rollout during the update (needs async_pools); the acting policy is one update old."
    )
    ahead: int = option(
        0,
        "Updates by which the acting policy is old, so that workers need not wait for the slowest (needs a replay).",
        bounds=Bounds(0, 64),
    )
    exact_resume: bool = option(
        False,
        "Reset environments at every checkpoint so that resuming is bit-exact.",
        resumable="inexact",
        sweepable=False,
    )
