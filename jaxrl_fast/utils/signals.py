"""Stop signals: the first one ends a training after its chunk."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_fast.utils.warnings import print_stderr

WATCH_S = 1.0  # between looks at other processes
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # the last is what submitit sends before the end


def stop_without(parent: int) -> None:
    """From now on this process is told to stop when the one that started it, however it ended, is no more.

    By SIGUSR1, for a parent that was told to stop has passed on what it was told: the same signal once more would be
    the word to quit at once (`stop_signals`), before what was trained is saved.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextlib.contextmanager
def stop_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """The first signal lets the chunk finish; the second does what it would have done.

    Under `nohup` the end of the terminal stays ignored. Where it is not, it is told twice at once, by the shell and by
    the kernel, so the second time is no second word.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {n: signal.getsignal(n) for name in SIGNALS if (n := getattr(signal, name, None))}
    hangup = getattr(signal, "SIGHUP", -1)
    if before.get(hangup) is signal.SIG_IGN:
        del before[hangup]

    def note(number, _):
        signal.signal(number, signal.SIG_IGN if number == hangup else before[number] or signal.SIG_DFL)
        stop(number)
        print_stderr("stopping after this chunk; once more to quit at once")

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: another language's, which Python cannot put back
