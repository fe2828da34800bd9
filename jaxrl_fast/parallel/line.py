"""Connect the processes of a run by TCP, and exchange one JSON object a line."""

import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxrl_fast.parallel.address import Address

MEET_S = 300.0  # seconds in which all processes must have come
RETRY_S = 0.1
REFUSE_S = 10.0  # seconds in which the others must have come after a mistake, to be refused
FIRST_S = 10.0  # seconds in which a process must say who it is


class Line:
    """A connection to another process."""

    def __init__(self, connection: socket.socket):
        self.connection, self.lock = connection, threading.Lock()
        self.reader = connection.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises OSError if the other process has ended."""
        data = json.dumps(message).encode() + b"\n"
        with self.lock:
            self.connection.sendall(data)

    def receive(self) -> dict[str, Any]:
        """Wait for a message and return it. Raises EOFError or OSError if the other process has ended."""
        line = self.reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """End the connection."""
        self.reader.close()
        self.connection.close()


class Refused(ValueError):
    """A mistake that process 0 has printed."""


def meet(address: Address, told: Mapping[str, Any], seconds: float = MEET_S) -> tuple[dict[int, Line], list[Any]]:
    """Return this process's connections, by the index of the other process, and what each process has told.

    Process 0 has a connection to every other process, and these have one to process 0.

    Raises:
        ValueError: If process 0 cannot listen or be reached, if processes are missing or give another number of
            processes, or if two have one index.
    """
    own = {**told, "index": address.index, "count": address.count, "host": socket.gethostname()}
    end = time.monotonic() + seconds
    if address.index == 0:
        return _accept_all(address, own, end)
    line = Line(_connect(address, end))
    line.connection.settimeout(seconds + FIRST_S)  # process 0 waits for the others
    try:
        line.send(own)
        answer = line.receive()
        if not {"refused", "all"} & answer.keys():
            raise ValueError
    except (EOFError, OSError) as error:
        raise ValueError(f"distributed: process 0 at {_at(address)} has ended; start all processes again") from error
    except (ValueError, AttributeError) as error:
        problem = f"something else than process 0 answers, got {_at(address)}"
        raise ValueError(f"distributed: {problem}; use an address of its host and a free port") from error
    line.connection.settimeout(None)
    if "refused" in answer:
        line.close()
        raise Refused(answer["refused"])
    return {0: line}, answer["all"]


def _accept_all(address: Address, own: dict[str, Any], end: float) -> tuple[dict[int, Line], list[Any]]:
    """Wait for the other processes, and tell all of them what each has told, or what is wrong."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        server = socket.create_server((address.host, address.port), family=family, backlog=address.count)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        problem = f"process 0 cannot listen ({reason}), got {_at(address)}"
        raise ValueError(f"distributed: {problem}; use an address of its host and a free port") from error
    lines: dict[int, Line] = {}
    others: list[tuple[Line, dict[str, Any]]] = []
    wrong = ""
    with server:
        while len(others) < max(address.count, *(message["count"] for _, message in others), 1) - 1:
            server.settimeout(max(end - time.monotonic(), 0.001))
            try:
                line = Line(server.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(i) for i in range(1, address.count) if i not in lines)
                missed = f"{address.count} processes must be started, got none with index {missing}; start all of them"
                wrong = wrong or missed
                break
            message = _first_message(line)
            if message is None:
                line.close()
                continue
            others.append((line, message))
            if not wrong and (wrong := _wrong(message, address, lines)):
                end = min(end, time.monotonic() + REFUSE_S)
            lines[message["index"]] = line
        everyone = [own, *(message for _, message in sorted(others, key=lambda other: other[1]["index"]))]
        for line, _ in others:
            line.send({"refused": wrong} if wrong else {"all": everyone})
    if wrong:
        for line, _ in others:
            line.close()
        raise ValueError(f"distributed: {wrong}")
    return dict(sorted(lines.items())), everyone


def _first_message(line: Line) -> dict[str, Any] | None:
    """Return what a process tells first, or None if something else has connected."""
    line.connection.settimeout(FIRST_S)
    try:
        message = line.receive()
        line.connection.settimeout(None)
        return message if {"index", "count", "host"} <= message.keys() else None
    except (EOFError, OSError, ValueError, AttributeError):
        return None


def _wrong(message: Mapping[str, Any], address: Address, lines: Mapping[int, Line]) -> str:
    """Return why a process cannot join, or ""."""
    i, count = message["index"], message["count"]
    if count != address.count:
        return f"all must give the same number of processes, {address.count}, got {count} from process {i}; give one"
    return f"two processes have the index {i}; give each another" if i in lines or i == 0 else ""


def _connect(address: Address, end: float) -> socket.socket:
    """Connect to process 0, which may start later than this one."""
    while True:
        try:
            connection = socket.create_connection((address.host, address.port), timeout=10)
            connection.settimeout(None)
            return connection
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > end:
            raise ValueError(f"distributed: process 0 cannot be reached ({reason}), got {_at(address)}; start it there")
        time.sleep(RETRY_S)


def _at(address: Address) -> str:
    return f"{address.host}:{address.port}"
