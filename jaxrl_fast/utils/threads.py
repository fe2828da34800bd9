"""Make calls in one thread, for objects that belong to the thread in which they were made."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

from jaxrl_fast.utils.errors import text_of

Result = TypeVar("Result")


class OneThread:
    """A thread that makes calls one after another, and waits in between. It has an event loop for asyncio.

    Connections of sqlite3, OpenGL contexts and `threading.local` belong to one thread.
    """

    def __init__(self, name: str) -> None:
        self.requests: SimpleQueue[Any] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return `function(*args)`, called in this thread. Exceptions are raised in the caller's."""
        if threading.current_thread() is self.thread:
            return function(*args)
        reply: SimpleQueue[Any] = SimpleQueue()
        self.requests.put((reply, function, args))
        result, error = reply.get()
        if error is None:
            return result  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error  # the traceback would refer to itself

    def close(self) -> None:
        """End the thread after the calls that it has been asked for."""
        self.requests.put(None)

    def _serve(self) -> None:
        import asyncio

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        with contextlib.closing(loop):
            while (request := self.requests.get()) is not None:
                reply, function, args = request
                answer: tuple[Any, BaseException | None]
                try:
                    answer = function(*args), None
                except BaseException as error:  # raised again by the caller
                    answer = None, error
                reply.put(answer)
                del request, reply, function, args, answer  # while waiting, nothing is kept alive


@contextlib.contextmanager
def one_thread(name: str) -> Iterator[OneThread]:
    """Open a thread for the context."""
    with contextlib.closing(OneThread(name)) as thread:
        yield thread


def needs_main_thread(error: BaseException) -> bool:
    """Return whether a call has failed because it must be made in the main thread, such as `signal.signal`."""
    return "only works in main thread" in text_of(error)
