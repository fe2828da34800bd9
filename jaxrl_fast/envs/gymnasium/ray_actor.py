"""Step a share of a pool's environments in a Ray actor, as `process` does in a worker process.

Ray starts the actors, on any node, and reports how they end. Rows and actions use a TCP connection between the pool and
each actor: Ray's own calls take about a millisecond each, and a step has one for every actor. The messages are those
of `worker`, with the arrays of rows in them, because two machines share no memory.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
from typing import Any

import numpy as np

from jaxrl_fast.envs.gymnasium import worker
from jaxrl_fast.envs.gymnasium.layout import Arrays, Layout, SharedMemory, arrays_in, num_bytes
from jaxrl_fast.envs.gymnasium.stepping import Stepper
from jaxrl_fast.utils import ray_cluster

TOKEN_BYTES = 32  # the first bytes of a connection: only the pool knows them
KEEPALIVE = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
}  # a machine without power counts as dead in 60 s
JOIN_S = 60.0  # for the pool to connect to an actor that has started


class Actor:
    """The environments of one actor. Ray runs its methods one after another, in the main thread of a new process."""

    def listen(self, token: bytes, path: list[str], variables: dict[str, str]) -> tuple[str, int]:
        """Return the address at which `serve` waits for the pool."""
        import ray

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when to stop
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        sys.path += [folder for folder in path if folder not in sys.path]
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.token, self.server = token, socket.create_server((host, 0), family=family)
        return host, int(self.server.getsockname()[1])

    def serve(self, setup: worker.Setup) -> None:
        """Make the environments, then step them until the pool closes the connection."""
        with self.server, contextlib.closing(self._accept()) as channel:
            worker.run(channel, lambda: SentRows(setup))

    def _accept(self) -> socket.socket:
        """Return the pool's connection; close those that do not know the token."""
        while True:
            self.server.settimeout(JOIN_S)
            channel, _ = self.server.accept()
            channel.settimeout(JOIN_S)
            with contextlib.suppress(OSError, EOFError):
                if secrets.compare_digest(worker.exactly(channel, TOKEN_BYTES), self.token):
                    _configure(channel)
                    return channel
            channel.close()


class SentRows:
    """A Stepper that gets actions, and returns rows, as bytes."""

    warning = ""  # those of the stepper are a part of each result

    def __init__(self, setup: worker.Setup) -> None:
        recipe = setup.recipe()
        self.memory = bytearray(num_bytes(recipe.layout, len(setup.seeds)))
        self.arrays = arrays_in(recipe.layout, len(setup.seeds), self.memory)
        self.stepper = Stepper(recipe, setup.seeds, self.arrays, setup.first)

    def step_with(self, action: bytes) -> tuple[Any, bytes]:
        """Take a step. Return a warning or "", and the rows."""
        own = self.arrays.action
        own[...] = np.frombuffer(action, own.dtype).reshape(own.shape)
        self.stepper.step()
        return self._answer("")

    def call(self, rows: bytes, name: str, *arguments: Any) -> tuple[Any, bytes]:
        """Call a method of the stepper on these rows. Return its result, and the rows afterwards."""
        self.memory[:] = rows
        return self._answer(getattr(self.stepper, name)(*arguments))

    def close(self) -> None:
        """Close the environments."""
        self.stepper.close()

    def _answer(self, result: Any) -> tuple[Any, bytes]:
        warning, self.stepper.warning = self.stepper.warning, ""
        return warning or result, bytes(self.memory)


class Worker:
    """One actor, as its pool sees it."""

    kind = "Ray actor"

    def __init__(self, memory: SharedMemory, layout: Layout, setup: worker.Setup) -> None:
        """Start an actor for its share of the environments, on the next node in turn."""
        import ray

        num_envs = len(setup.seeds)
        self.first, self.last = setup.first, setup.first + num_envs
        self.rows = memory.arrays(layout, setup.num_envs).rows(self.first, self.last)
        self.buffer = bytearray(num_bytes(layout, num_envs))
        self.sent = arrays_in(layout, num_envs, self.buffer)
        self.token, self.in_step = secrets.token_bytes(TOKEN_BYTES), False
        self.channel: socket.socket | None = None  # until the actor has started
        made: Any = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD")(Actor)
        self.actor = made.remote()
        self.address = self.actor.listen.remote(self.token, sys.path, worker.VARIABLES)
        self.end_of_actor = self.actor.serve.remote(setup)

    @property
    def name(self) -> str:
        """Return "Ray actor 70e5174a5146"."""
        return f"{self.kind} {self.actor._actor_id.hex()[: ray_cluster.FEW_DIGITS]}"

    def place(self, arrays: Arrays) -> str:
        """Return where the actor is. If it steps several environments, it does not tell which one is at work."""
        if not self.in_step:
            return ""
        if self.last - self.first > 1:
            return f" in a step of environments {self.first} to {self.last - 1}"
        own = arrays.rows(self.first, self.last)
        ended = own.terminated | own.truncated
        now = own._replace(length=np.where(ended, 0, own.length + 1), episode=own.episode + ended)
        return f" in {now.where(0, self.first)}"

    def step(self) -> None:
        """Ask for a step of the actor's environments."""
        self.in_step = True
        self._send("step_with", self.rows.action.tobytes())

    def call(self, name: str, *arguments: Any) -> None:
        """Ask for a call of a method of the actor's environments."""
        self.in_step = False
        for own, sent in zip(_all(self.sent), _all(self.rows)):
            own[...] = sent
        self._send("call", bytes(self.buffer), name, *arguments)

    def receive(self, timeout_s: float | None) -> tuple[bytes, Any]:
        """Return an answer, after copying its rows; b"" if the actor has ended. Raises TimeoutError."""
        try:
            channel = self._connect()
            channel.settimeout(timeout_s)
            kind, value = worker.receive(channel)
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # not of the connection: the answer is late
                raise
            return b"", None
        if kind != worker.RESULT or value is None:  # value None: the environments are made
            return kind, value
        self.in_step = False
        result, self.buffer[:] = value
        for own, sent in zip(_all(self.rows), _all(self.sent)):
            own[...] = sent
        return kind, result

    def status(self) -> str:
        """Return how the actor has ended: " (its node is unavailable)"."""
        import ray

        try:
            ray.get([self.address, self.end_of_actor], timeout=worker.CLOSE_S)
        except ray.exceptions.GetTimeoutError:
            return " its connection"
        except Exception as error:  # also what an environment's module has raised while it was imported
            return f" ({ray_cluster.reason_of(error)})"
        return ""

    def hang_up(self) -> None:
        """Tell the actor to close its environments and end."""
        if self.channel is None:
            self.kill()
        else:
            self.channel.close()

    def kill(self) -> None:
        """Kill the actor's process."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.actor)

    def end(self, timeout_s: float) -> None:
        """Wait for the end of the actor's environments, and end its process."""
        import ray

        if ray.is_initialized():  # else Ray has ended it
            ray.wait([self.end_of_actor], timeout=max(timeout_s, 0))
            self.kill()

    def _send(self, *value: Any) -> None:
        if self.channel is not None:
            with contextlib.suppress(OSError):  # the actor has ended; `receive` reports it
                worker.send(self.channel, worker.CALL, value)

    def _connect(self) -> socket.socket:
        """Return the connection to the actor. Raise ConnectionError if the actor has ended before it listened."""
        import ray

        if self.channel is None:
            try:
                self.channel = socket.create_connection(ray.get(self.address), JOIN_S)
                _configure(self.channel)
                self.channel.sendall(self.token)
            except (OSError, ray.exceptions.RayError) as error:
                raise ConnectionError from error
        return self.channel


def _configure(channel: socket.socket) -> None:
    """Send small messages at once, and notice that the other machine has gone."""
    channel.settimeout(None)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            channel.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _all(arrays: Arrays) -> tuple[Any, ...]:
    return (*arrays.obs, *arrays[1:])
