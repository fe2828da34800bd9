"""Start a worker process and exchange messages with it. The process runs the module `worker`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_fast.envs.gymnasium import worker
from jaxrl_fast.envs.gymnasium.layout import Arrays, Layout, SharedMemory

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jaxrl_fast.envs.gymnasium.worker import main; main()"
)
CLOSE_S = worker.CLOSE_S


class Worker:
    """One worker process, as its parent sees it."""

    kind = "worker process"

    def __init__(self, memory: SharedMemory, layout: Layout, setup: worker.Setup) -> None:
        """Start a new Python for its share of the environments. A fork would be unsafe, since JAX has threads."""
        del layout
        self.first, self.last = setup.first, setup.first + len(setup.seeds)
        self.channel, theirs = socket.socketpair()
        descriptors = theirs.fileno(), memory.descriptor
        command = [sys.executable, "-c", START, json.dumps(sys.path), *map(str, descriptors)]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closed when this process ends
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C reaches the parent only
                env=_environment(os.environ),
            )
        self._send(setup)

    @property
    def name(self) -> str:
        """Return "worker process 4711"."""
        return f"{self.kind} {self.process.pid}"

    def place(self, arrays: Arrays) -> str:
        """Return " in environment 3, episode 2, step 17, action 1" for a worker inside an environment."""
        busy = np.flatnonzero(arrays.busy[self.first : self.last])
        return f" in {arrays.where(self.first + int(busy[-1]))}" if len(busy) else ""

    def step(self) -> None:
        """Ask for a step of the worker's environments."""
        with contextlib.suppress(ConnectionError):  # the worker has ended; `receive` reports it
            self.channel.sendall(worker.STEP)

    def call(self, name: str, *arguments: Any) -> None:
        """Ask for a call of a method of the worker's environments."""
        self._send((name, *arguments))

    def _send(self, value: Any) -> None:
        with contextlib.suppress(ConnectionError):
            worker.send(self.channel, worker.CALL, value)

    def receive(self, timeout_s: float | None) -> tuple[bytes, Any]:
        """Return an answer; b"" if the worker has ended. Raises TimeoutError."""
        self.channel.settimeout(timeout_s)
        try:
            return worker.receive(self.channel)
        except (ConnectionError, EOFError):
            return b"", None

    def status(self) -> str:
        """Return how the process has ended: " by signal 11 (SIGSEGV)"."""
        try:
            code = self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return ""
        if code >= 0:
            return f" with exit status {code}"
        return f" by signal {-code} ({signal.Signals(-code).name})"

    def hang_up(self) -> None:
        """Tell the process to close its environments and end."""
        self.channel.close()

    def kill(self) -> None:
        """Kill the process, and those that its environments have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, timeout_s: float) -> None:
        """Wait for the end of the process, or kill it."""
        try:
            self.process.wait(max(timeout_s, 0))
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
        if self.process.returncode:
            self.kill()  # what the environments of a worker that has failed leave running
        if self.process.stdin is not None:
            self.process.stdin.close()


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment variables: one thread, and JAX on the CPU, unless the user has set them."""
    return worker.VARIABLES | dict(variables)
