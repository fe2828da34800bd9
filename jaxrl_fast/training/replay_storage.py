"""Choose the storage of a replay's observations: device memory, host memory, or disk."""

import bisect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_fast.config import paths
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.options.declare import replace
from jaxrl_fast.options.run import Options
from jaxrl_fast.parallel import team
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.replay.host import codec
from jaxrl_fast.runs import replay_dir
from jaxrl_fast.training import bonus_data, disk, memory
from jaxrl_fast.types import Agent, Env
from jaxrl_fast.utils import files, target
from jaxrl_fast.utils.importing import install
from jaxrl_fast.utils.memory import format_bytes, host_free_bytes
from jaxrl_fast.utils.warnings import warn

SHRINK = 8  # how many times smaller compressed observations are taken to be; Atari frames are 20 to 300 times smaller
MAX_SIZE = 2**30  # transitions


class Decision(NamedTuple):
    """The chosen storage."""

    settings: Settings  # with the store and the compression
    agent: Agent
    note: str = ""  # for the header; "" for the device
    num_file_bytes: int = 0  # the most bytes of its files


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

    Of several processes, the one with the least space decides, and all must call this.

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
    data = bonus_data.of_program(config)
    needs = memory.estimate(env, agent, placement, data)
    needs = needs._replace(copies=1 if resumed else needs.copies)
    of_all = team.current().gather
    if (
        asked == "device"
        or asked == "auto"
        and (several or independent or all(of_all(needs.free is None or needs.total <= needs.free)))
    ):
        return Decision(settings._replace(agent=on_device(config)), agent)
    options = {"replay.storage": "host", "replay.compression": "zstd" if packed else "none"}
    there = memory.estimate(env, make(replace(config, options)), placement, data)
    space = _Space(settings.options, needs, there, config.replay.size, packed)
    capacities = {name: min(of_all(capacity)) for name, capacity in space.capacities().items()}
    fits = [name for name, capacity in capacities.items() if capacity >= config.replay.size]
    chosen = asked if asked != "auto" else next(iter(fits), "")
    if chosen not in fits:
        where = "in any storage" if asked == "auto" else f"with replay.storage {asked}"
        largest = " or ".join(f"{_rounded(capacity)} ({name})" for name, capacity in capacities.items())
        raise ValueError(
            f"replay.size: a replay of {format_bytes(needs.replay)}{space.of_files(config.replay.size)} does not fit "
            f"{where}, got {config.replay.size}; use at most {largest}"
        )
    config = replace(config, options | {"replay.storage": chosen})
    size = int(space.files(chosen == "disk").num_bytes(config.replay.size))
    return Decision(settings._replace(agent=config), make(config), _note(config, space, asked, size), size)


def _free_on_disk(options: Options) -> int | None:
    """Return the bytes on the disk of the replay's files, free or taken by the run; None if they are unknown."""
    run = Path(options.resume or options.run_dir or paths.RUNS)
    links = replay_dir.links(run)
    free = disk.free_bytes(Path(options.replay_dir or (links[0].resolve() if links else run)))
    if free is None or not options.resume:
        return free
    saved = 0 if options.replay_dir or links else files.size(run / paths.CHECKPOINTS)
    return free + replay_dir.size(run) + saved


def _note(config: Any, space: "_Space", asked: str, num_file_bytes: int) -> str:
    """Return a note about the storage: its name, the bytes needed and free, and the reason of the choice."""
    on_disk = config.replay.storage == "disk"
    free, needs = space.free_on_disk if on_disk else host_free_bytes(), space.needs
    parts = [f"observations {'on disk' if on_disk else 'in the host memory'}"]
    parts.append(f"{format_bytes(needs.replay - space.there.replay)} as they are")
    parts += ["compressed by zstd"] * (config.replay.compression == "zstd")
    parts += [] if free is None else [f"{format_bytes(free)} free"]
    parts.append(f"files of all checkpoints at most {format_bytes(num_file_bytes)}")
    reason = f"; on the device the run would need {format_bytes(needs.total)} of {format_bytes(needs.free or 0)}"
    return " · ".join(parts) + reason * (asked == "auto")


def _compression(config: Any, env: Env) -> bool:
    """Return the compression of observations. Raise ValueError if the requested one is impossible."""
    if config.replay.compression == "none":
        return False
    of_bytes = all(x.dtype.itemsize == 1 for x in jax.tree.leaves(env.spec.obs))
    if config.replay.compression == "zstd" and not codec.is_installed():
        remedy = f"use none or {install('replay')}"
        raise ValueError(f"replay.compression: {codec.PACKAGE} is not installed, got zstd; {remedy}")
    if config.replay.compression == "zstd" and not of_bytes:
        warn("replay.compression: observations are not bytes, got zstd; none is used")
    return of_bytes and codec.is_installed()


class _Space:
    """The bytes that a replay needs and that are free, in memory and on disk."""

    def __init__(
        self, options: Options, needs: memory.MemoryEstimate, there: memory.MemoryEstimate, size: int, packed: bool
    ):
        """Take what a run needs with a replay of `size` on the device, and `there` without its observations."""
        self.options, self.needs, self.there, self.packed = options, needs, there, packed
        self.raw, self.others = (needs.replay - there.replay) / size, there.replay / size  # bytes of each transition
        self.kept = self.raw / SHRINK if packed else self.raw
        self.free_on_disk = _free_on_disk(options)

    def files(self, on_disk: bool) -> disk.ReplayFiles:
        """Return the files of the replay in the storage host or disk."""
        return disk.ReplayFiles(self.options, on_disk, self.raw, self.kept)

    def capacities(self) -> dict[str, float]:
        """Return the largest replay that fits into each storage. On a CPU, the device's memory is the host's."""
        needs, copies, others = self.needs, self.needs.copies, self.needs.copies * self.others
        in_memory = self.kept if self.packed else 2 * self.kept  # new blocks are copied while they are saved
        shared = target.platform() == "cpu"
        infinite = lambda free: math.inf if free is None else free
        rest = max(infinite(needs.free) - copies * (needs.parameters + needs.environments) - needs.data, 0)
        on_host = rest / (others + in_memory) if shared else min(rest / others, infinite(host_free_bytes()) / in_memory)
        return {
            "device": rest / (others + copies * self.raw),
            "host": min(on_host, self._files_fit(on_disk=False)),
            "disk": min(rest / others, self._files_fit(on_disk=True)),
        }

    def of_files(self, size: int) -> str:
        """Return words about the files of a replay of this size and what decides it; "" if they fit on the disk."""
        if min(self._files_fit(on_disk=False), self._files_fit(on_disk=True)) >= size:
            return ""
        num_bytes, options = format_bytes(int(self.files(on_disk=True).num_bytes(size))), self.options
        which = f"keep_checkpoints {options.keep_checkpoints} and save_every {options.save_every}"
        return f", {num_bytes} on disk with {which},"

    def _files_fit(self, on_disk: bool) -> float:
        """Return the size of the largest replay whose files fit on the disk, with the rest of all checkpoints."""
        files, needs = self.files(on_disk), self.needs
        num_checkpoints = 0 if self.options.replay_dir else self.options.keep_checkpoints + 2
        rest = lambda size: num_checkpoints * (needs.parameters + needs.environments + self.others * size)
        is_full = lambda size: files.num_bytes(size) + rest(size) > self.free_on_disk
        if self.free_on_disk is None or not is_full(MAX_SIZE):
            return math.inf
        return bisect.bisect_left(range(1, MAX_SIZE), True, key=is_full)


def _rounded(capacity: float) -> str:
    """Return a number rounded down to three digits."""
    if capacity == math.inf:
        return "any"
    unit = 10 ** max(len(str(int(capacity))) - 3, 0)
    return str(int(capacity) // unit * unit)
