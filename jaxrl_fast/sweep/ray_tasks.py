"""Run the groups of a sweep as Ray tasks, on this machine or on the nodes of a cluster.

A task trains one group in a new process. If the process or its node ends, the group is started again, from its last
checkpoint. All nodes need the sweep's folder under the same path, as with Slurm.
"""

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_fast import __version__
from jaxrl_fast.config.paths import SWEEP_FILE
from jaxrl_fast.loggers.terminal import Console, QuietConsole
from jaxrl_fast.sweep.directory import SweepPlan, is_finished, read_plan, unfinished
from jaxrl_fast.sweep.grid import offer_devices
from jaxrl_fast.sweep.worker import Finished, run_group, write_results
from jaxrl_fast.utils import devices, ray_cluster, signals, warnings

MAX_STARTS = 10  # of a group whose processes end without a result
LOCKED_S = 120.0  # for the lock of a process that has ended, on a file system of several machines
ANSWER_S = 120.0  # for every node to look at the sweep's folder
AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU"}  # options of a task, and the names of a node's resources


def check(options: Mapping[str, Any]) -> None:
    """Connect to Ray. Raise ValueError if that fails, or if no node can run a task with these options."""
    ray = ray_cluster.connect("launcher", "ray")
    resources = _resources(ray, options)
    try:
        ray.remote(**resources)(_train)
    except (TypeError, ValueError) as error:
        raise ValueError(f"ray_options: {str(error).splitlines()[0]}") from error
    for option, name in AMOUNTS.items():
        most = max((node["Resources"].get(name, 0) for node in _nodes(ray)), default=0)
        if resources[option] > most:
            problem = f"a task needs more than any node of the cluster has ({most:g})"
            raise ValueError(f"ray_options: {option}: {problem}, got {resources[option]:g}; use at most {most:g}")


def check_nodes(folder: Path) -> None:
    """Raise ValueError if a node does not see the sweep's folder, or has another version of this package."""
    ray = ray_cluster.connect("launcher", "ray")
    nodes = _nodes(ray)
    if len(nodes) == 1:
        return
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look, problems = ray.remote(num_cpus=0, max_retries=0)(_problem), []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        problems.append(look.options(scheduling_strategy=there).remote(str(folder), __version__))
    for node, problem in zip(nodes, problems, strict=True):
        try:
            found = ray.get(problem, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            found = f"cannot run jaxrl_fast ({ray_cluster.reason_of(error)}); install it on every node"
        if found:
            raise ValueError(f"launcher ray: the node {node['NodeManagerAddress']} {found}")


def run(sweep: SweepPlan, terminal: Console) -> tuple[int | None, int]:
    """Run every group that is left, as many at a time as the cluster has room for.

    Returns:
        The signal that stopped them, or None; and the number of groups that could not be saved or started.
    """
    from jaxrl_fast.sweep import table

    ray = ray_cluster.connect("launcher", "ray")
    resources = _resources(ray, sweep.sweep_options.ray_options)
    # A new process for each group: JAX reads its devices once. A retry by Ray would not be told to the user.
    task = ray.remote(max_calls=1, max_retries=0, **resources)(_train)
    start = lambda name: task.remote(str(sweep.folder), name, resources["num_cpus"])
    finished, starts = Finished(sweep, terminal), Counter(unfinished(sweep))
    pending = {start(name): name for name in starts}
    stopped: list[int] = []
    num_unsaved, is_told = 0, False
    with signals.stop_signals(stopped.append):
        while pending:
            for ref in ray.wait([*pending], timeout=signals.POLL_S)[0]:
                name = pending.pop(ref)
                try:
                    result = ray.get(ref)
                    num_unsaved += bool(result and result["unsaved"])
                except ray.exceptions.TaskCancelledError:
                    continue
                except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
                    num_unsaved += 1
                    warnings.warn(f"{name}: its task failed ({ray_cluster.reason_of(error)}); resume tries it again")
                except ray.exceptions.RayError as error:  # the process or its node has ended
                    is_here = isinstance(error, ray.exceptions.LocalRayletDiedError)  # of this process
                    again = starts[name] < MAX_STARTS and not stopped and not is_here
                    starts[name] += 1
                    num_unsaved += not again
                    what = "it is started again" if again else "resume tries it again"
                    warnings.warn(f"{name}: its task has ended ({ray_cluster.reason_of(error)}); {what}")
                    if again:
                        pending[start(name)] = name
                finished.report()
                write_results(table.write_table, sweep)
            if stopped and not is_told:
                is_told = True
                for ref in pending:
                    ray.cancel(ref)  # interrupts a training, which saves itself
    return (stopped[0] if stopped else None), num_unsaved


def _train(folder: str, name: str, num_cpus: float) -> dict[str, Any] | None:
    """Train one group of the sweep in `folder` in this process. Return as `worker.run_group`."""
    from jaxrl_fast.parallel import placement

    sweep = read_plan(Path(folder))
    placement.share_cores(max(int(devices.num_cores() // max(num_cpus, 1)), 1))
    offer_devices(group.settings for group in sweep.groups.values())
    until, place, group = time.monotonic() + LOCKED_S, sweep.folder / name, sweep.groups[name]
    while True:
        result = run_group(place, group, QuietConsole(), lambda: None)
        if result is not None or is_finished(place, group) or time.monotonic() > until:
            return result
        time.sleep(signals.POLL_S)


def _problem(folder: str, version: str) -> str:
    """Return why this node cannot train groups of a sweep, or ""."""
    if version != __version__:
        return f"has jaxrl_fast {__version__}, where this process has {version}; install the same on every node"
    if not (Path(folder) / SWEEP_FILE).is_file():
        return f"does not see {folder}; set sweep_dir to a folder that all nodes share"
    return ""


def _resources(ray: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a task: one CPU, and one GPU if the cluster has any, unless the user has set them."""
    import yaml

    default = {"num_cpus": 1, "num_gpus": int(any(node["Resources"].get("GPU") for node in _nodes(ray)))}
    given = {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in options.items()}
    for name in AMOUNTS:
        if name in given and (isinstance(given[name], bool) or not isinstance(given[name], int | float)):
            raise ValueError(f"ray_options: {name}: must be a number, got {given[name]}; use 1")
    return default | given


def _nodes(ray: Any) -> list[dict[str, Any]]:
    """Return Ray's descriptions of the nodes that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]
