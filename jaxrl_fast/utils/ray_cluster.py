"""Connect to a Ray cluster, or start a local one. Ray is imported only here, when it is used."""

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

from jaxrl_fast.utils.errors import text_of
from jaxrl_fast.utils.importing import install

ADDRESS = "RAY_ADDRESS"  # the environment variable that names a cluster: "10.0.0.1:6379"
CONNECT_S = 10.0  # Ray itself waits for minutes for a cluster that does not answer
FEW_DIGITS = 12  # of a Ray id, for messages


def connect(option: str, given: str) -> Any:
    """Return the module `ray`, connected to the cluster of `RAY_ADDRESS`, else to this machine's, else to a new one.

    A cluster that is started here ends with this process.

    Args:
        option: The option that needs Ray, for messages.
        given: Its value.

    Raises:
        ValueError: In one line, if Ray is missing, or the cluster does not answer.
    """
    if util.find_spec("ray") is None:
        raise ValueError(f"{option}: ray is not installed, got {given}; {install('ray')}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here sends nothing to others
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return ray
    address = _address(option, given)
    try:
        with _same_handlers(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)  # a program follows
            ray.init(address, include_dashboard=False, logging_level=logging.ERROR)
    except Exception as error:  # of many kinds: no memory, no port, another version, a token
        reason = " ".join(text_of(error).split())[:200]
        remedy = f"check {ADDRESS}, and RAY_AUTH_MODE=token if the cluster demands one"
        raise ValueError(f"{option}: Ray could not be started or reached ({reason}), got {given}; {remedy}") from error
    return ray


def _address(option: str, given: str) -> str | None:
    """Return where Ray looks for a cluster: None for `RAY_ADDRESS`, or for one of this machine; "local" for a new one.

    Raises ValueError if `RAY_ADDRESS` names a cluster that does not answer.
    """
    address = os.environ.get(ADDRESS, "")
    if address in ("", "auto", "local"):  # a head node that was killed leaves its address behind
        left = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        found = left.read_text().strip() if left.is_file() else ""
        return "local" if not address and found and _why_silent(found) else None
    remedy = f"set {ADDRESS} to the head node's HOST:PORT, or unset it to use this machine"
    if "://" in address or not re.fullmatch(r".+:\d+", address):
        problem = f"{ADDRESS} must be HOST:PORT, of a cluster that has this machine as a node"
        raise ValueError(f"{option}: {problem}, got {address}; {remedy}")
    if reason := _why_silent(address):
        raise ValueError(f"{option}: no Ray cluster answers at {address} ({reason}), got {given}; {remedy}")
    return None


def _why_silent(address: str) -> str:
    """Return why nothing answers at HOST:PORT, or ""."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        return getattr(error, "strerror", None) or text_of(error)
    return ""


@contextlib.contextmanager
def _same_handlers() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces: a training saves itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def reason_of(error: BaseException) -> str:
    """Return in one line why a Ray actor or task has ended."""
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    found = next(
        (line for line in lines if "exit detail: " in line or "dead because" in line), lines[0] if lines else ""
    )
    found = found.rpartition("exit detail: ")[2].partition(" Some common causes")[0]
    if "connection error code" in found:  # Ray knows of the connection only
        return "its process has crashed, exited or been killed"
    return found.partition(". ")[0].rstrip(".")[:200] or type(error).__name__
