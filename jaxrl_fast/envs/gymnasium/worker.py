"""Step a share of a pool's environments in a separate process: `main` is what `process.Worker` starts.

The parent and this process share the arrays of rows. A socket carries one byte for each step, and pickled calls and
results for everything else. JAX is not imported, unless the environment imports it.
"""

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

STEP, CALL, DONE, RESULT, FAILED = b"s", b"c", b".", b"r", b"!"
LENGTH = struct.Struct("!Q")
CLOSE_S = 5  # for environments to close; then their processes are killed
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # in each worker
VARIABLES = ONE_THREAD | {"JAX_PLATFORMS": "cpu"}  # environment variables, unless the user has set them


class Setup(NamedTuple):
    """A worker's share of the environments of a pool."""

    pickled: bytes  # the `layout.Recipe`
    seeds: list[int]
    num_envs: int  # of the pool
    first: int  # the index of the worker's first environment in the pool

    def recipe(self) -> Any:
        """Return the recipe of the environments. Unpickling executes code of the user."""
        import cloudpickle

        return cloudpickle.loads(self.pickled)


def send(channel: socket.socket, kind: bytes, value: Any) -> None:
    """Send a message with a pickled value."""
    content = pickle.dumps(value)
    channel.sendall(kind + LENGTH.pack(len(content)) + content)


def receive(channel: socket.socket) -> tuple[bytes, Any]:
    """Return the kind of the next message and its value; b"" when the other end is closed."""
    kind = channel.recv(1)
    if kind in (b"", STEP, DONE):
        return kind, None
    (length,) = LENGTH.unpack(exactly(channel, LENGTH.size))
    return kind, pickle.loads(exactly(channel, length))


def exactly(channel: socket.socket, length: int) -> bytes:
    """Return the next bytes, `length` of them. Raise EOFError if the other end is closed before."""
    found = bytearray()
    while len(found) < length:
        part = channel.recv(min(length - len(found), 2**20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def main() -> None:
    """Make the environments that the first message describes, then step them until the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    _end_with_parent()
    channel = socket.socket(fileno=int(sys.argv[2]))
    run(channel, lambda: _open(channel, int(sys.argv[3])))
    sys.stdout.flush()
    os._exit(0)  # threads that an environment has started may not keep the process


def run(channel: socket.socket, make: Callable[[], Any]) -> None:
    """Make a Stepper and answer messages until the channel is closed. Send what fails."""
    stepper = None
    try:
        stepper = make()
        send(channel, RESULT, None)
        _serve(channel, stepper)
    except (EOFError, ConnectionError):  # the parent has ended
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(channel, FAILED, describe(error))
    finally:
        if stepper is not None:
            with contextlib.suppress(Exception):
                stepper.close()


def _end_with_parent() -> None:
    """Kill this process some time after its parent has ended, even inside a step that never returns.

    Standard input is a pipe from the parent. An environment that reads it finds nothing.
    """
    pipe, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)

    def watch() -> None:
        """Wait until the parent has closed the pipe."""
        while os.read(pipe, 1):
            pass
        time.sleep(CLOSE_S)
        os.killpg(0, signal.SIGKILL)  # also the processes that environments have started

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _open(channel: socket.socket, descriptor: int) -> Any:
    """Return a Stepper for this worker's share of the environments."""
    setup: Setup = receive(channel)[1]
    from jaxrl_fast.envs.gymnasium.layout import SharedMemory, num_bytes
    from jaxrl_fast.envs.gymnasium.stepping import Stepper

    recipe, (first, last) = setup.recipe(), (setup.first, setup.first + len(setup.seeds))
    arrays = SharedMemory(num_bytes(recipe.layout, setup.num_envs), descriptor).arrays(recipe.layout, setup.num_envs)
    return Stepper(recipe, setup.seeds, arrays.rows(first, last), first)


def _serve(channel: socket.socket, stepper: Any) -> None:
    """Answer messages until the socket is closed or a step fails. Other failed calls leave the worker running."""
    while True:
        kind, call = receive(channel)
        if kind == b"":
            return
        if kind == STEP:
            stepper.step()
            if not stepper.warning:
                channel.sendall(DONE)
                continue
            result, stepper.warning = stepper.warning, ""
        else:
            name, *arguments = call
            try:
                result = getattr(stepper, name)(*arguments)
            except Exception as error:  # environments may raise anything
                send(channel, FAILED, describe(error))
                continue
        send(channel, RESULT, result)


def describe(error: BaseException) -> tuple[bytes | None, str, str, str | None]:
    """Return an exception for another process: pickled if possible, its text, its traceback, and its place."""
    from jaxrl_fast.utils.errors import blamed, user_traceback

    place, text = blamed(error), "".join(traceback.format_exception_only(error)[:1]).strip()
    shown = user_traceback(error)
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # some exceptions pickle, and cannot be loaded
    except Exception:  # pickling may raise anything
        pickled = None
    return pickled, text, shown, place
