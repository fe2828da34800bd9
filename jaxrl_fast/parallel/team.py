"""Let the processes of one run agree: process 0 decides and tells the others, and the end of one ends all.

Messages are lines of JSON on one TCP connection between process 0 and each other process, apart from JAX's own
connections. There is no authentication, as in JAX: the ports belong in a trusted network. A run of one process has the
team ALONE, in which every function returns at once.

All processes call `decide` and `gather` in the same order. Threads that call at the same time have different topics.
"""

import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxrl_fast.parallel.address import Address
from jaxrl_fast.parallel.line import Line
from jaxrl_fast.utils.errors import user_line
from jaxrl_fast.utils.warnings import print_stderr

Value = TypeVar("Value")

HEARTBEAT_S = 2.0  # seconds between signs of life
LATE_S = 8.0  # seconds without one after which a process is named as the cause of a delay
LOST_S = 45.0  # seconds without one after which it counts as lost
SETTLE_S = 2.0  # seconds in which the cause of an error arrives from another process
TIMEOUT_S = 600.0  # seconds of the longest chunk
FAILED = 1  # exit status
MAIN, END = "main", "end"  # topics


class Team:
    """The processes of a run; this one is alone."""

    index, count = 0, 1

    @property
    def leads(self) -> bool:
        """Return whether this is process 0, which decides, prints and logs."""
        return self.index == 0

    def decide(self, function: Callable[[], Value], topic: str = MAIN) -> Value:
        """Return what `function` returns in process 0, which alone calls it. Others receive it as JSON."""
        return function()

    def gather(self, value: Value, topic: str = MAIN) -> list[Value]:
        """Return the value of each process, in the order of their indices."""
        return [value]

    def share(self, num_parts: int) -> range:
        """Return the indices of this process's parts, of `num_parts` that all processes hold equally many of."""
        each = num_parts // self.count
        return range(self.index * each, (self.index + 1) * each)

    def listen(self, stop: Callable[[int], None], hint: Callable[[], str]) -> None:
        """Call `stop` with the signals that other processes receive. `hint` ends the message if one is lost."""

    def pass_signal(self, number: int) -> None:
        """Tell process 0 that this process was told to stop."""

    def watch(self, waits: bool) -> None:
        """End the run if this process waits and `watch` is not called again in time."""

    def settle(self) -> None:
        """Wait after an error: its cause may be the end of another process, which ends this one too."""

    def fail(self, line: str, status: int = FAILED) -> None:
        """Tell the other processes why this one ends, so that all end."""

    def leave(self) -> None:
        """End the work together: return once all processes are here."""


ALONE = Team()
CURRENT = [ALONE]


def current() -> Team:
    """Return the team of this process."""
    return CURRENT[-1]


class Connected(Team):
    """A team of several processes."""

    def __init__(self, address: Address, peers: Mapping[int, Line], hosts: Sequence[str], timeout: float):
        """Begin to listen: process 0 to all others, these to process 0. `hosts` has the name of each one's host."""
        self.index, self.count, self.peers, self.hosts = address.index, address.count, peers, hosts
        self.timeout = timeout  # seconds of the longest chunk
        self.inbox: defaultdict[tuple[int, str], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self.ending = threading.Lock()  # held by the thread that ends the process
        self.closing = False
        self.stop: Callable[[int], None] | None = None
        self.early: list[int] = []  # signals of other processes
        self.own_signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # for process 0
        self.at_end: set[int] = set()  # processes that wait in `leave`, or let this one leave
        self.hint: Callable[[], str] = lambda: ""
        self.heard = dict.fromkeys(peers, time.monotonic())
        self.stuck: dict[int, str] = {}  # where processes are that have waited too long
        self.deadline = math.inf
        self.listeners = [threading.Thread(target=self._listen, args=(i,), daemon=True) for i in peers]
        for thread in self.listeners:
            thread.start()
        threading.Thread(target=self._keep_alive, name="processes", daemon=True).start()

    def decide(self, function: Callable[[], Value], topic: str = MAIN) -> Value:
        """Return what `function` returns in process 0."""
        if not self.leads:
            told: Value = self.inbox[0, topic].get()
            return told
        value = function()
        self._tell_all({"topic": topic, "value": value})
        return value

    def gather(self, value: Value, topic: str = MAIN) -> list[Value]:
        """Return the value of each process."""
        if not self.leads:
            self._tell(0, {"topic": topic, "value": value})
            return self.decide(list, topic)
        return self.decide(lambda: [value, *(self.inbox[i, topic].get() for i in self.peers)], topic)

    def listen(self, stop: Callable[[int], None], hint: Callable[[], str]) -> None:
        """Call `stop` with the signals that other processes receive."""
        self.stop, self.hint = stop, hint
        for number in self.early:
            stop(number)

    def pass_signal(self, number: int) -> None:
        """Tell process 0 about a signal. A handler may call this while the thread that it interrupts sends."""
        if not self.leads:
            self.own_signals.put(number)

    def watch(self, waits: bool) -> None:
        """End the run if this process waits and this is not called again in time."""
        self.deadline = time.monotonic() + self.timeout if waits else math.inf

    def settle(self) -> None:
        """Wait for the message of another process that has ended."""
        time.sleep(SETTLE_S)

    def fail(self, line: str, status: int = FAILED) -> None:
        """Tell the others; process 0 prints the line of another process."""
        with self.ending:
            self.closing = True
            self._tell_all({"failed": line, "status": status})

    def leave(self) -> None:
        """Return once all processes are here, and in process 0 once the others have ended."""
        if self.closing:  # it has failed, and the others know
            return
        self.gather(None, END)
        self.closing = True
        for thread in self.listeners if self.leads else ():
            thread.join(SETTLE_S)

    def _tell(self, i: int, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `_listen` reports
            self.peers[i].send(message)

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for i in self.peers:
            self._tell(i, message)

    def _listen(self, i: int) -> None:
        """Receive the messages of a process until it ends, which ends this process too."""
        try:
            while True:
                message = self.peers[i].receive()
                self.heard[i] = time.monotonic()
                if "failed" in message:
                    return self._follow(i, message["failed"], message["status"])
                if "signal" in message:
                    self.early.append(message["signal"])
                    if self.stop:
                        self.stop(message["signal"])
                elif "stuck" in message:
                    self.stuck[i] = message["stuck"]
                elif "topic" in message:
                    if message["topic"] == END:
                        self.at_end.add(i)
                    self.inbox[i, message["topic"]].put(message["value"])
        except (EOFError, OSError):
            if i not in self.at_end:
                self._end(f"{self._name(i)} has ended without a message")

    def _keep_alive(self) -> None:
        """Send signs of life. End the run if those of a process fail to come, or if a chunk takes too long."""
        while not self.closing:
            self._tell_all({})
            with contextlib.suppress(queue.Empty):
                self._tell(0, {"signal": self.own_signals.get(timeout=HEARTBEAT_S)})
            now = time.monotonic()
            for i, heard in self.heard.items():
                if now - heard > LOST_S:
                    self._end(f"{self._name(i)} has not answered for {LOST_S:.0f} s")
            if now > self.deadline:
                self._report_delay()

    def _report_delay(self) -> None:
        """End the run because no chunk has ended, and name the process that is the cause, if it is known."""
        if where := user_line(sys._current_frames().values()):
            self._tell_all({"stuck": where})
            self.stuck[self.index] = where
        time.sleep(SETTLE_S * (1 if self.leads else 4))  # process 0 ends all
        now = time.monotonic()
        late = {i: "does not answer" for i, heard in self.heard.items() if now - heard > LATE_S}
        causes = late | {i: f"is in {where}" for i, where in self.stuck.items()}
        named = ", ".join(f"{self._name(i)} {how}" for i, how in causes.items())
        self._end(f"no chunk has ended for {self.timeout:g} s (distributed.timeout)" + (f": {named}" if named else ""))

    def _name(self, i: int) -> str:
        return f"process {i} of {self.count} ({self.hosts[i]})"

    def _end(self, line: str) -> None:
        """Print why the run ends, tell the others, and exit. Do nothing if it ends already."""
        with self.ending:
            if not self.closing:
                line = "; ".join(filter(None, (line, self.hint())))
                print_stderr(f"error: {line}")
                self._exit({"failed": line, "status": FAILED})

    def _follow(self, i: int, line: str, status: int) -> None:
        """End as another process does. Process 0 prints the line; but not for a mistake that it has made as well."""
        if self.leads:
            time.sleep(SETTLE_S)
        with self.ending:
            if not self.closing:
                if self.leads:
                    print_stderr(f"error: {self._name(i)}: {line}")
                self._exit({"failed": line, "status": status})

    def _exit(self, message: Mapping[str, Any]) -> None:
        """Tell the others and end at once: JAX's own end would wait for them."""
        self.closing = True
        self._tell_all(message)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(message["status"])
