"""Start a run in several processes, on one host or many: they meet, compare what they have, and start JAX together.

Each process runs the same command, with `--distributed` and, without a launcher, its address. `jax.distributed` makes
one set of devices of all. A run is the same program on each of them, on its shards of the environments.
"""

import atexit
import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_fast.parallel import address, line, team
from jaxrl_fast.parallel.address import Address
from jaxrl_fast.utils import devices, warnings
from jaxrl_fast.utils.errors import why

PACKAGE = Path(__file__).parents[1]


def join(text: str, timeout: float, versions: Mapping[str, str]) -> None:
    """Meet the other processes; they are the current team from now on.

    Args:
        text: Where, as `address.read` takes it.
        timeout: Seconds that a chunk of updates may take; then the run ends.
        versions: Versions of packages, which must be the same everywhere.

    Raises:
        ValueError: If processes are missing, cannot be reached, or have other versions or other code.
    """
    own = address.read(text)
    told = {"cores": devices.num_cores(), "versions": {**versions, "the code of jaxrl_fast": _digest(PACKAGE)}}
    lines, everyone = line.meet(own, told)
    if own.count > 1:
        team.CURRENT.append(team.Connected(own, lines, [each["host"] for each in everyone], timeout))
        ADDRESSES.append((own, everyone))
    if own.index:
        warnings.silence("process 0 prints them")
    check_same([each["versions"] for each in everyone], [each["host"] for each in everyone])


ADDRESSES: list[tuple[Address, Sequence[Mapping[str, Any]]]] = []  # of this process, and what all have told


def start(options: Mapping[str, Any], num_devices: int | str = "auto") -> None:
    """Start JAX in all processes of the team, once they have the same options.

    Raises:
        ValueError: If options differ, JAX cannot start, or `num_devices` is not a multiple of the processes.
    """
    if not ADDRESSES:
        return
    import jax

    own, everyone = ADDRESSES[-1]
    hosts = [each["host"] for each in everyone]
    check_same(team.current().gather(dict(options)), hosts)
    if num_devices == "auto":
        least = min(max(int(told["cores"]) // hosts.count(told["host"]), 1) for told in everyone)
        each = int(os.environ.get("JAX_NUM_CPU_DEVICES") or least)
        check_same(team.current().gather({"JAX_NUM_CPU_DEVICES": each}), hosts)
    else:
        each, rest = divmod(int(num_devices), own.count)
        if rest or not each:
            problem = f"must be a multiple of the {own.count} processes"
            raise ValueError(f"devices: {problem}, got {num_devices}; use {max(each, 1) * own.count}")
    devices.fix_cpu_devices(each)
    where = f"[{own.host}]" if ":" in own.host else own.host
    coordinator = f"{where}:{own.port + 1}"
    one_each = own.local_index is not None and hosts.count(hosts[own.index]) > 1
    try:
        jax.distributed.initialize(
            coordinator,
            own.count,
            own.index,
            local_device_ids=own.local_index if one_each else None,
            cluster_detection_method="deactivate",
            coordinator_bind_address=coordinator,
        )
    except RuntimeError as error:
        if devices.is_initialized():
            raise ValueError("distributed: JAX has started already; join before JAX is used") from error
        reason = str(error).splitlines()[0]
        remedy = "use a port whose successor is free too"
        raise ValueError(f"distributed: JAX cannot start ({reason}), got {coordinator}; {remedy}") from error
    from jaxrl_fast.kernels import build

    compilers = {"C compiler": build.compiler(), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    check_same(team.current().gather(compilers), hosts)


@contextlib.contextmanager
def joined(text: str = "", timeout: float = team.TIMEOUT_S, devices: int | str = "auto") -> Iterator[team.Team]:
    """Train in several processes from Python: `with joined("10.0.0.1:29500,4,0"): fit(...)` in each of them.

    Args:
        text: HOST:PORT,COUNT,INDEX, or "" with a launcher such as Slurm.
        timeout: Seconds that a chunk of updates may take; then all processes end.
        devices: CPU devices of all processes together; auto: one for each core.

    Raises:
        ValueError: As `join` and `start`.
    """
    join(text, timeout, {})
    start({}, devices)
    try:
        yield team.current()
    except BaseException as error:
        team.current().fail(why(error))
        atexit.register(os._exit, team.FAILED)  # before JAX's own end, which waits for the other processes
        raise
    team.current().leave()


def check_same(each: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """Raise ValueError if a process has another value than process 0."""
    for i, own in enumerate(each):
        for name in {**each[0], **own}:
            was, now = (_shown(values, name) for values in (each[0], own))
            if was != now:
                where = f"process {i} ({hosts[i]}) has {name} {now}, but process 0 has {was}"
                raise ValueError(f"distributed: all processes must be started alike, got: {where}; use the same")


def _shown(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "missing"


def _digest(folder: Path) -> str:
    """Return a short checksum of the package's files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
