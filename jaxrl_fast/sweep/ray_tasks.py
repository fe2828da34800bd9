"""Run the groups of a sweep, or the tasks of a search, as Ray tasks, on this machine or on the nodes of a cluster.

A task trains one of them in a new process. If the process or its node ends, it is started again, from its last
checkpoint. All nodes need the folder under the same path, as with Slurm.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast import __version__
from jaxrl_fast.loggers.terminal import Console, QuietConsole
from jaxrl_fast.sweep.directory import SweepPlan, is_finished, read_plan, unfinished
from jaxrl_fast.sweep.grid import offer_devices
from jaxrl_fast.sweep.worker import Finished, run_group, write_results
from jaxrl_fast.utils import devices, ray_cluster, signals, warnings

Train = Callable[[str, str], dict[str, Any] | None]  # of folder and name: `unsaved`; None: another process has the lock
MAX_STARTS = 10  # of a task whose processes end without a result
LOCKED_S = 120.0  # for the lock of a process that has ended, on a file system of several machines
ANSWER_S = 120.0  # for every node to look at the sweep's folder
AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU"}  # options of a task, and the names of a node's resources


def check(options: Mapping[str, Any]) -> None:
    """Connect to Ray. Raise ValueError if that fails, or if no node can run a task with these options."""
    ray = ray_cluster.connect("launcher", "ray")
    resources = _resources(ray, options)
    try:
        ray.remote(**resources)(_run)
    except (TypeError, ValueError) as error:
        raise ValueError(f"ray_options: {str(error).splitlines()[0]}") from error
    for option, name in AMOUNTS.items():
        most = max((node["Resources"].get(name, 0) for node in _nodes(ray)), default=0)
        if resources[option] > most:
            problem = f"a task needs more than any node of the cluster has ({most:g})"
            raise ValueError(f"ray_options: {option}: {problem}, got {resources[option]:g}; use at most {most:g}")


def check_nodes(file: Path, option: str) -> None:
    """Raise ValueError if a node does not see the file in the folder of `option`, or has another jaxrl_fast."""
    ray = ray_cluster.connect("launcher", "ray")
    nodes = _nodes(ray)
    if len(nodes) == 1:
        return
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look, problems = ray.remote(num_cpus=0, max_retries=0)(_problem), []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        problems.append(look.options(scheduling_strategy=there).remote(str(file), option, __version__))
    for node, problem in zip(nodes, problems, strict=True):
        try:
            found = ray.get(problem, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            found = f"cannot run jaxrl_fast ({ray_cluster.reason_of(error)}); install it on every node"
        if found:
            raise ValueError(f"launcher ray: the node {node['NodeManagerAddress']} {found}")


def run(sweep: SweepPlan, terminal: Console) -> tuple[int | None, int]:
    """Run every group that is left. Return as `run_all`."""
    from jaxrl_fast.sweep import table

    finished = Finished(sweep, terminal)

    def watch() -> None:
        """Print the groups that have finished, and write the table."""
        if finished.report():
            write_results(table.write_table, sweep)

    return run_all(sweep.folder, unfinished(sweep), sweep.sweep_options.ray_options, _train_group, watch)


def run_all(
    folder: Path, names: Sequence[str], options: Mapping[str, Any], train: Train, watch: Callable[[], None]
) -> tuple[int | None, int]:
    """Run a task for each name, a group or a task that `train` trains in `folder`, as many as the cluster has room for.

    Args:
        folder: A folder that all nodes see.
        names: Of the tasks.
        options: Resources of each task.
        train: Called in each task with the folder and the name.
        watch: Called every second.

    Returns:
        The signal that stopped them, or None; and the number of tasks that could not be saved or started.
    """
    ray = ray_cluster.connect("launcher", "ray")
    resources = _resources(ray, options)
    # A new process for each task: JAX reads its devices once. A retry by Ray would not be told to the user.
    task = ray.remote(max_calls=1, max_retries=0, **resources)(_run)
    start = lambda name: task.remote(train, str(folder), name, resources["num_cpus"])
    starts = Counter(names)
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
            watch()
            if stopped and not is_told:
                is_told = True
                for ref in pending:
                    ray.cancel(ref)  # interrupts a training, which saves itself
    return (stopped[0] if stopped else None), num_unsaved


def _run(train: Train, folder: str, name: str, num_cpus: float) -> dict[str, Any] | None:
    """Return `train(folder, name)` in this process, whose share of the cores it sets.

    It waits for a while if another process has the lock.
    """
    from jaxrl_fast.parallel import placement

    placement.share_cores(max(int(devices.num_cores() // max(num_cpus, 1)), 1))
    until = time.monotonic() + LOCKED_S
    while (result := train(folder, name)) is None and time.monotonic() < until:
        time.sleep(signals.POLL_S)
    return result


def _train_group(folder: str, name: str) -> dict[str, Any] | None:
    """Train one group of the sweep in `folder`. Return as `worker.run_group`, or None if another process has it."""
    sweep = read_plan(Path(folder))
    offer_devices(group.settings for group in sweep.groups.values())
    place, group = sweep.folder / name, sweep.groups[name]
    result = run_group(place, group, QuietConsole(), lambda: None)
    return {"unsaved": False} if result is None and is_finished(place, group) else result


def _problem(file: str, option: str, version: str) -> str:
    """Return why this node cannot train in the folder of `option`, or ""."""
    if version != __version__:
        return f"has jaxrl_fast {__version__}, where this process has {version}; install the same on every node"
    if not Path(file).is_file():
        return f"does not see {Path(file).parent}; set {option} to a folder that all nodes share"
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
