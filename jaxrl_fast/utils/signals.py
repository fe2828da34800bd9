"""Handle stop signals: the first one ends training after the current chunk."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxrl_fast.utils.warnings import print_stderr

Result = TypeVar("Result")

POLL_S = 1.0  # between checks of other processes
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # submitit sends SIGUSR2 before the time limit


def stop_with_parent(parent: int) -> None:
    """Send SIGUSR1 to this process when its parent process has ended.

    A parent that receives another stop signal passes it on to this process. SIGUSR1 differs from it because a repeated
    signal means to quit at once, before the training is saved (`stop_signals`).
    """

    def watch() -> None:
        """Wait until the parent has ended."""
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def interruptible(function: Callable[..., Result], *args: Any) -> Result:
    """Return `function(*args)`, for a function that blocks outside Python, such as a compilation.

    Python runs signal handlers in the main thread only, and not while that is inside such a call. So a thread makes the
    call, and the main thread waits for it. If a handler raises, the call continues in its thread, until Python exits.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*args)
    future: Future[Result] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # raised again by the main thread
            future.set_exception(error)

    thread = threading.Thread(target=call, name="interruptible", daemon=True)
    thread.start()
    try:
        return future.result()
    except BaseException:
        if thread.is_alive():
            atexit.register(_exit_at_once, thread)
        raise


def _exit_at_once(thread: threading.Thread) -> None:
    """End the process at once if this thread is still in a call.

    Python would release the devices under the call, which aborts the process ("exception not rethrown").
    """
    if not thread.is_alive():
        return
    uncaught = getattr(sys, "last_type", None)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    if uncaught is None:  # the script has handled the interrupt
        os._exit(128 + signal.SIGINT)
    if issubclass(uncaught, KeyboardInterrupt):  # as Python ends such a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


@contextlib.contextmanager
def raised_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt and SIGTERM raise SystemExit, so that unfinished files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number, _):
        """Exit with the status that a shell reports for this signal."""
        raise SystemExit(128 + number)

    handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: leave}
    previous: dict[int, Any] = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        _restore(previous)


@contextlib.contextmanager
def stop_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Call `stop` at the first signal; the second one has its usual effect.

    Under `nohup`, SIGHUP stays ignored. Otherwise the shell and the kernel each send it when the terminal closes, so a
    second SIGHUP has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[int, Any] = {n: signal.getsignal(n) for name in SIGNALS if (n := getattr(signal, name, None))}
    hangup = getattr(signal, "SIGHUP", -1)
    if previous.get(hangup) is signal.SIG_IGN:
        del previous[hangup]

    def note(number, _):
        """Stop, and restore the previous handler for the next signal."""
        signal.signal(number, signal.SIG_IGN if number == hangup else previous[number] or signal.SIG_DFL)
        stop(number)
        print_stderr("stopping after this chunk; send the signal again to quit at once")

    for number in previous:
        signal.signal(number, note)
    try:
        yield
    finally:
        _restore(previous)


def _restore(handlers: dict[int, Any]) -> None:
    """Restore these signal handlers; None stands for one that was not set from Python."""
    for number, handler in handlers.items():
        signal.signal(number, handler or signal.SIG_DFL)
