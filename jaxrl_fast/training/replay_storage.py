"""Choose the storage of a replay's observations: device memory, host memory, or disk."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_fast.config import paths
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.options.declare import replace
from jaxrl_fast.options.run import Options
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.replay.host import codec
from jaxrl_fast.runs import replay_dir
from jaxrl_fast.training import disk, memory
from jaxrl_fast.types import Agent, Env
from jaxrl_fast.utils import target
from jaxrl_fast.utils.memory import format_bytes, host_free_bytes
from jaxrl_fast.utils.warnings import warn

SHRINK = 8  # how many times smaller compressed observations are taken to be; Atari frames are 20 to 300 times smaller
STORES = "device", "host", "disk"


class Decision(NamedTuple):
    """The chosen storage."""

    settings: Settings  # with the store and the compression
    agent: Agent
    note: str = ""  # for the header; "" for the device


def on_device(agent_config: Any) -> Any:
    """Return an algorithm's options with the replay on the device, on which the placement of a run depends."""
    return agent_config if agent_config.replay is None else replace(agent_config, {"replay.storage": "device"})


def decide(
    settings: Settings,
    env: Env,
    agent: Agent,
    placement: Placement,
    make: Callable[[Any], Agent],
    resumed: bool,
) -> Decision:
    """Return the storage; "auto" chooses by free space. `agent` has its replay on the device.

    Raises ValueError if the requested storage is too small or cannot be used.
    """
    config, of_folder = settings.agent, bool(settings.options.replay_dir)
    asked, several = "device" if config.replay is None else config.replay.storage, placement.num_seeds > 1
    if of_folder and asked == "device":
        got = "got device" if config.replay else f"which {settings.algo} does not have"
        raise ValueError(f"replay_dir: requires replay.storage host or disk, {got}; leave it out")
    if config.replay is None:
        return Decision(settings, agent)
    if several and asked in ("host", "disk"):
        raise ValueError(
            f"replay.storage: must be device for several seeds in one program, got {asked}; "
            "python -m jaxrl_fast.sweep --workers 1 trains them one after another"
        )
    independent = settings.options.players.kind == "independent"
    if independent and asked in ("host", "disk"):
        raise ValueError(f"replay.storage: must be device for independent players, got {asked}; set players to shared")
    packed = _compression(config, env)
    needs = memory.estimate(env, agent, placement)
    needs = needs._replace(copies=1 if resumed else needs.copies)
    if (
        asked == "device"
        or asked == "auto"
        and (several or independent or needs.free is None or needs.total <= needs.free)
    ):
        return Decision(settings._replace(agent=on_device(config)), agent)
    options = {"replay.storage": "host", "replay.compression": "zstd" if packed else "none"}
    there = memory.estimate(env, make(replace(config, options)), placement)
    on_disk = _free_on_disk(settings.options)
    capacities = _capacities(needs, there, packed, config.replay.size, on_disk, 1 + bool(settings.options.eval_every))
    fits = [name for name, capacity in capacities.items() if capacity >= config.replay.size]
    chosen = asked if asked != "auto" else next(iter(fits), "")
    if chosen not in fits:
        where = "in any storage" if asked == "auto" else f"with replay.storage {asked}"
        largest = " or ".join(f"{_rounded(capacity)} ({name})" for name, capacity in capacities.items())
        raise ValueError(
            f"replay.size: a replay of {format_bytes(needs.replay)} does not fit {where}, "
            f"got {config.replay.size}; use at most {largest}"
        )
    config = replace(config, options | {"replay.storage": chosen})
    return Decision(settings._replace(agent=config), make(config), _note(config, needs, there, asked, on_disk))


def _free_on_disk(options: Options) -> int | None:
    """Return the bytes on the disk of the replay's files, free or taken by them already; None if they are unknown."""
    run = Path(options.resume or options.run_dir or paths.RUNS)
    links = replay_dir.links(run)
    free = disk.free_bytes(Path(options.replay_dir or (links[0].resolve() if links else run)))
    return free if free is None or not options.resume else free + replay_dir.size(run)


def _note(
    config: Any, needs: memory.MemoryEstimate, there: memory.MemoryEstimate, asked: str, free_on_disk: int | None
) -> str:
    """Return a note about the storage: its name, the bytes needed and free, and the reason of the choice."""
    on_disk = config.replay.storage == "disk"
    free = free_on_disk if on_disk else host_free_bytes()
    parts = [f"observations {'on disk' if on_disk else 'in the host memory'}"]
    parts.append(f"{format_bytes(needs.replay - there.replay)} as they are")
    parts += ["compressed by zstd"] * (config.replay.compression == "zstd")
    parts += [] if free is None else [f"{format_bytes(free)} free"]
    reason = f"; on the device the run would need {format_bytes(needs.total)} of {format_bytes(needs.free or 0)}"
    return " · ".join(parts) + reason * (asked == "auto")


def _compression(config: Any, env: Env) -> bool:
    """Return the compression of observations. Raise ValueError if the requested one is impossible."""
    if config.replay.compression == "none":
        return False
    of_bytes = all(x.dtype.itemsize == 1 for x in jax.tree.leaves(env.spec.obs))
    if config.replay.compression == "zstd" and not codec.is_installed():
        raise ValueError(f"replay.compression: {codec.PACKAGE} is not installed, got zstd; use none or {codec.EXTRA}")
    if config.replay.compression == "zstd" and not of_bytes:
        warn("replay.compression: observations are not bytes, got zstd; none is used")
    return of_bytes and codec.is_installed()


def _capacities(
    needs: memory.MemoryEstimate,
    there: memory.MemoryEstimate,
    packed: bool,
    replay_size: int,
    on_disk: int | None,
    copies_on_disk: int,
) -> dict[str, float]:
    """Return the largest replay_size that fits into each storage. `there`: an agent without observations.

    On a CPU, the device's memory is the host's. On disk, the best checkpoint may keep blocks that the newest has not.
    """
    copies, raw = needs.copies, (needs.replay - there.replay) / replay_size
    kept = raw / SHRINK if packed else raw
    in_memory = kept if packed else 2 * kept  # new blocks are copied while they are saved
    shared = target.platform() == "cpu"
    others = copies * there.replay / replay_size  # bytes on the device for each transition
    infinite = lambda free: math.inf if free is None else free
    rest = max(infinite(needs.free) - copies * (needs.parameters + needs.environments), 0)
    on_host = rest / (others + in_memory) if shared else min(rest / others, infinite(host_free_bytes()) / in_memory)
    return {
        "device": rest / (others + copies * raw),
        "host": on_host,
        "disk": min(rest / others, infinite(on_disk) / (copies_on_disk * kept)),
    }


def _rounded(capacity: float) -> str:
    """Return a number rounded down to three digits."""
    if capacity == math.inf:
        return "any"
    unit = 10 ** max(len(str(int(capacity))) - 3, 0)
    return str(int(capacity) // unit * unit)
