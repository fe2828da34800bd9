"""Read from an option and from a launcher's environment where the processes of a run meet, and which one this is."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FORM = "HOST:PORT,COUNT,INDEX"
FIRST_PORT, NUM_PORTS = 61440, 2047  # where a launcher gives no port: a pair of ports follows from the job's number
LOOPBACK = "127.0.0.1"
Environ = Mapping[str, str]


@dataclass(frozen=True)
class Address:
    """One of the processes of a run, and where it meets the others."""

    host: str  # of process 0
    port: int  # on which process 0 listens; JAX's coordinator takes the next one
    count: int  # processes
    index: int  # of this process
    local_index: int | None = None  # among those on the same host, where the launcher says it

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


@dataclass(frozen=True)
class Found:
    """What a launcher's variables say; None is unknown."""

    host: str | None = None
    port: int | None = None
    count: int | None = None
    index: int | None = None
    local_index: int | None = None


def read(text: str, environ: Environ = os.environ) -> Address:
    """Return the address from the option's text, "" or the first of HOST:PORT, COUNT and INDEX, and a launcher's rest.

    Raises ValueError if the text has another form, or if a part is in neither.
    """
    launcher, found = of_launcher(environ)
    host, port, count, index = found.host, found.port, found.count, found.index
    given = [] if text in ("", "auto") else text.split(",")
    if given:
        host, port = _host_and_port(given[0], text)
    if len(given) > 1:
        count = _number(given[1], text, 1)
    if len(given) > 2:
        index = _number(given[2], text, 0)
    if len(given) > 3:
        raise ValueError(f"distributed: must be {FORM}, got {text}; give three parts")
    if launcher and given and index is not None and count is not None:
        for what, own, other in (("processes", count, found.count), ("index", index, found.index)):
            if other is not None and own != other:
                raise ValueError(f"distributed: {launcher} says {what} {other}, got {own} ({text}); leave it out")
    missing = [name for name, x in (("HOST:PORT", host), ("COUNT", count), ("INDEX", index)) if x is None]
    if missing or host is None or port is None or count is None or index is None:
        where = f"{launcher} does not say {' and '.join(missing)}" if launcher else "no launcher was found"
        remedy = f"give {FORM}" + ("" if launcher else ", or start the processes with srun or mpirun")
        raise ValueError(f"distributed: {where}, got {text or 'nothing'}; {remedy}")
    if index >= count:
        raise ValueError(f"distributed: the index must be below the number of processes, {count}, got {index}")
    return Address(host, port, count, index, found.local_index)


def of_launcher(environ: Environ) -> tuple[str, Found]:
    """Return the name of the launcher that has started this process, "" for none, and what it says."""
    for name, (variable, look) in LAUNCHERS.items():
        if environ.get(variable, "").isdecimal():
            return name, look(environ)
    return "", Found()


def _slurm(environ: Environ) -> Found:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    count = _int(environ, "SLURM_STEP_NUM_TASKS") or _int(environ, "SLURM_NTASKS")
    index, local_index = _int(environ, "SLURM_PROCID"), _int(environ, "SLURM_LOCALID")
    return Found(first_host(nodes) or None, _port(environ.get("SLURM_JOB_ID", "")), count, index, local_index)


def _open_mpi(environ: Environ) -> Found:
    count, local_count = _int(environ, "OMPI_COMM_WORLD_SIZE"), _int(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri", "")
    host = LOOPBACK if count is not None and count == local_count else None
    return Found(
        host,
        _port(job),
        count,
        _int(environ, "OMPI_COMM_WORLD_RANK"),
        _int(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
    )


def _pmi(environ: Environ) -> Found:
    return Found(count=_int(environ, "PMI_SIZE"), index=_int(environ, "PMI_RANK"))


def _skypilot(environ: Environ) -> Found:
    hosts = environ.get("SKYPILOT_NODE_IPS", "").split()
    host = hosts[0] if hosts else None
    return Found(host, FIRST_PORT, _int(environ, "SKYPILOT_NUM_NODES"), _int(environ, "SKYPILOT_NODE_RANK"))


def _torchrun(environ: Environ) -> Found:
    host, port = environ.get("MASTER_ADDR"), _int(environ, "MASTER_PORT")
    return Found(host, port, _int(environ, "WORLD_SIZE"), _int(environ, "RANK"), _int(environ, "LOCAL_RANK"))


def _kubernetes(environ: Environ) -> Found:
    return Found(index=_int(environ, "JOB_COMPLETION_INDEX"))


LAUNCHERS: dict[str, tuple[str, Callable[[Environ], Found]]] = {  # the variable with the index, and a reader
    "Open MPI": ("OMPI_COMM_WORLD_RANK", _open_mpi),
    "PMI": ("PMI_RANK", _pmi),
    "Slurm": ("SLURM_PROCID", _slurm),
    "SkyPilot": ("SKYPILOT_NODE_RANK", _skypilot),
    "torchrun": ("RANK", _torchrun),
    "Kubernetes": ("JOB_COMPLETION_INDEX", _kubernetes),
}


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: "gpu07" of "gpu[07-09,12],cpu1"."""
    found = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def _port(job: str) -> int:
    """Return a port for a job's name or number, so that jobs on the same host meet at different ones."""
    number = int(job) if job.isdecimal() else sum(ord(letter) * (i + 1) for i, letter in enumerate(job))
    return FIRST_PORT + 2 * (number % NUM_PORTS)


def _int(environ: Environ, name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _host_and_port(text: str, whole: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 1 <= int(port) < 2**16 - 1):
        raise ValueError(f"distributed: must be {FORM}, got {whole}; for example {LOOPBACK}:29500,4,0")
    return host.strip("[]"), int(port)


def _number(text: str, whole: str, least: int) -> int:
    if not (text.isdecimal() and int(text) >= least):
        raise ValueError(f"distributed: must be {FORM}, got {whole}; give whole numbers of at least {least}")
    return int(text)
