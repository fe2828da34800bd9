"""How processes meet and agree, here as threads of one process, and what ends them."""

import contextlib
import json
import queue
import re
import socket
import threading
import time
from dataclasses import replace

import pytest

from jaxrl_fast.parallel import distributed, line, team
from jaxrl_fast.parallel.address import Address
from tests.helpers.processes import free_port

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """Close all connections at the end."""
    found, begin = [], line.Line.__init__

    def note(self, connection):
        begin(self, connection)
        found.append(self)

    monkeypatch.setattr(line.Line, "__init__", note)
    yield
    for each in found:
        with contextlib.suppress(OSError):
            each.connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.05)
    for each in found:
        each.close()


@contextlib.contextmanager
def quick():
    """Shorten all waits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in {"HEARTBEAT_S": 0.02, "LATE_S": 0.2, "LOST_S": 0.6, "SETTLE_S": 0.05}.items():
            patch.setattr(team, name, seconds)
        yield patch


@pytest.fixture
def ended():
    """Collect the ends of processes, instead of ending this one."""
    found = queue.Queue()
    with quick() as patch:
        patch.setattr(team.Connected, "_exit", lambda self, message: (setattr(self, "closing", True), found.put(
            (self.index, message["status"], message["failed"])), self._tell_all(message)))  # fmt: skip
        yield found
        for each in STARTED:
            each.closing = True
        STARTED.clear()


STARTED = []  # teams that a test has not ended


def in_threads(functions):
    """Return the results or the exceptions of functions that run at the same time."""
    results = [None] * len(functions)

    def call(i):
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def met(count, told=lambda i: {}, addresses=None, seconds=5.0):
    """Return what `line.meet` gives each of `count` processes."""
    port = free_port()
    addresses = addresses or [Address("127.0.0.1", port, count, i) for i in range(count)]
    addresses = [replace(address, port=port) for address in addresses]
    return in_threads([lambda a=a: line.meet(a, told(a.index), seconds) for a in addresses])


def teams(count, timeout=60.0):
    found = [
        team.Connected(Address("127.0.0.1", 1, count, i), lines, [told["host"] for told in everyone], timeout)
        for i, (lines, everyone) in enumerate(met(count))
    ]
    STARTED.extend(found)
    return found


def test_all_know_what_each_has_told():
    for _, everyone in met(3, lambda i: {"cores": 10 * i}):
        assert [told["cores"] for told in everyone] == [0, 10, 20]
        assert [told["index"] for told in everyone] == [0, 1, 2]


def test_process_0_decides(ended):
    own = teams(3)
    calls = []
    functions = [lambda t=t: t.decide(lambda: calls.append(t.index) or {"a": [1.5, None]}) for t in own]
    assert in_threads(functions) == [{"a": [1.5, None]}] * 3
    assert calls == [0]


def test_floats_arrive_bit_by_bit(ended):
    own, x = teams(2), [0.1 + 0.2, float("inf"), 5e-324]
    assert in_threads([lambda t=t: t.decide(lambda: x) for t in own]) == [x, x]


def test_gather_keeps_order(ended):
    own = teams(3)
    assert in_threads([lambda t=t: t.gather(t.index * 10) for t in own]) == [[0, 10, 20]] * 3


def test_topics_do_not_mix(ended):
    """Each process's threads call in another order."""
    own = teams(2)
    first = [lambda t=t: (time.sleep(0.05 * t.index), t.gather(f"a{t.index}", "a"))[1] for t in own]
    second = [lambda t=t: (time.sleep(0.05 * (1 - t.index)), t.gather(f"b{t.index}", "b"))[1] for t in own]
    assert in_threads([*first, *second]) == [["a0", "a1"]] * 2 + [["b0", "b1"]] * 2


@pytest.mark.parametrize(
    ("count", "num", "shares"), [(1, 4, [[0, 1, 2, 3]]), (2, 4, [[0, 1], [2, 3]]), (2, 2, [[0], [1]])]
)
def test_share(count, num, shares, ended):
    own = teams(count) if count > 1 else [team.ALONE]
    assert [list(t.share(num)) for t in own] == shares


def test_signal_of_another_process_reaches_process_0(ended):
    own, found = teams(3), queue.Queue()
    own[2].pass_signal(15)  # before process 0 listens
    own[0].listen(found.put, lambda: "")
    own[1].pass_signal(12)
    assert sorted([found.get(timeout=5), found.get(timeout=5)]) == [12, 15]
    own[0].pass_signal(2)  # its own
    time.sleep(0.1)
    assert found.empty()


def test_end_without_message_ends_all_and_names_it(ended, capsys):
    own = teams(3)
    own[0].listen(lambda number: None, lambda: "resume it")
    own[2].closing = True
    own[2].peers[0].connection.shutdown(socket.SHUT_RDWR)
    found = sorted(ended.get(timeout=5) for _ in range(2))
    assert [(index, status) for index, status, _ in found] == [(0, 1), (1, 1)]
    name = f"process 2 of 3 ({socket.gethostname()})"
    assert capsys.readouterr().err == f"error: {name} has ended without a message; resume it\n"


def test_failure_ends_all_with_its_status(ended, capsys):
    own = teams(3)
    own[1].fail("num_envs: is wrong", 2)
    found = sorted(ended.get(timeout=5) for _ in range(2))
    assert [(index, status) for index, status, _ in found] == [(0, 2), (2, 2)]
    assert capsys.readouterr().err == f"error: process 1 of 3 ({socket.gethostname()}): num_envs: is wrong\n"


def test_mistake_that_all_make_is_printed_by_process_0_only(ended, capsys):
    own = teams(2)
    own[1].fail("num_envs: is wrong", 2)
    own[0].fail("num_envs: is wrong", 2)  # its main thread prints it
    time.sleep(0.3)
    assert ended.empty() and capsys.readouterr().err == ""


def test_process_without_signs_of_life_is_lost(ended, capsys):
    own = teams(2)
    own[1].closing = True  # its thread sends nothing any more
    assert ended.get(timeout=5)[:2] == (0, 1)
    assert "process 1 of 2" in (err := capsys.readouterr().err) and "has not answered for 1 s" in err


def test_chunk_that_takes_too_long_ends_all(ended, capsys):
    own = teams(2, timeout=0.1)
    own[0].watch(True)
    assert sorted(ended.get(timeout=5)[0] for _ in range(2)) == [0, 1]
    assert capsys.readouterr().err == "error: no chunk has ended for 0.1 s (distributed.timeout)\n"


def test_late_process_is_named(ended, capsys):
    own = teams(2, timeout=0.3)
    own[1].closing = True
    own[0].watch(True)
    ended.get(timeout=5)
    assert "(distributed.timeout): process 1 of 2" in (err := capsys.readouterr().err) and "does not answer" in err


def test_watch_ends_when_nothing_is_awaited(ended):
    own = teams(2, timeout=0.1)
    own[0].watch(True)
    own[0].watch(False)
    time.sleep(0.4)
    assert ended.empty()


def test_end_of_all_is_no_failure(ended):
    own = teams(3)
    in_threads([t.leave for t in own])
    for t in own[1:]:
        t.peers[0].connection.close()
    time.sleep(0.2)
    assert ended.empty()


@pytest.mark.parametrize("i", [0, 1])
def test_process_that_has_left_may_end_before_the_other_one_notices(i, ended):
    own = teams(2)
    one, other = own[i], own[1 - i]
    one.closing = True
    one.peers[1 - i].send({"topic": team.END, "value": None})
    one.peers[1 - i].connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)
    assert ended.empty() and other.inbox[i, team.END].get(timeout=1) is None


def test_signal_that_interrupts_a_message_does_not_wait_for_it(ended):
    own, found = teams(2), queue.Queue()
    own[0].listen(found.put, lambda: "")
    with own[1].peers[0].lock:  # held by the thread that runs the handler
        handler = threading.Thread(target=own[1].pass_signal, args=(15,), daemon=True)
        handler.start()
        handler.join(2)
        assert not handler.is_alive() and found.empty()
    assert found.get(timeout=5) == 15


def test_missing_processes_are_named():
    address = Address("127.0.0.1", 0, 4, 0)
    results = met(4, addresses=[address, replace(address, index=2)], seconds=0.5)
    assert "4 processes must be started, got none with index 1, 3; start all of them" in str(results[0])
    assert isinstance(results[1], line.Refused)


def test_two_processes_with_one_index():
    address = Address("127.0.0.1", 0, 3, 0)
    results = met(3, addresses=[address, replace(address, index=1), replace(address, index=1)])
    assert "two processes have the index 1; give each another" in str(results[0])


def test_other_number_of_processes():
    address = Address("127.0.0.1", 0, 2, 0)
    others = [replace(address, index=1, count=3), replace(address, index=2, count=3)]
    results = met(2, addresses=[address, *others])
    assert re.search(r"all must give the same number of processes, 2, got 3 from process [12]", str(results[0]))
    assert all(isinstance(result, line.Refused) for result in results[1:])


def test_process_that_does_not_come_after_a_mistake_is_not_awaited(monkeypatch):
    monkeypatch.setattr(line, "REFUSE_S", 0.1)
    address, start = Address("127.0.0.1", 0, 2, 0), time.monotonic()
    results = met(2, addresses=[address, replace(address, index=1, count=3)], seconds=60)
    assert "the same number of processes" in str(results[0]) and time.monotonic() - start < 10
    assert isinstance(results[1], line.Refused)


def test_stranger_does_not_disturb():
    """Something else connects to the port, says nothing or nonsense, and leaves."""
    port = free_port()
    own = Address("127.0.0.1", port, 2, 0)

    def stranger():
        time.sleep(0.1)
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'{"index": 1}\n'):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(words)
        return line.meet(replace(own, index=1), {"a": 1}, 5)

    first, second = in_threads([lambda: line.meet(own, {"a": 0}, 5), stranger])
    assert [told["a"] for told in first[1]] == [told["a"] for told in second[1]] == [0, 1]


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n", b"{}\n", b"5\n"])
def test_something_else_that_answers_is_named(words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1], 2, 1)

        def answer():
            with server.accept()[0] as connection:
                connection.recv(10_000)
                connection.sendall(words)

        found = in_threads([lambda: line.meet(address, {}, 5), answer])[0]
    assert isinstance(found, ValueError) and not isinstance(found, json.JSONDecodeError)
    assert f"something else than process 0 answers, got 127.0.0.1:{address.port}; use" in str(found)


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"process 0 cannot listen .*, got 127.0.0.1:{port}; use an address"):
            line.meet(Address("127.0.0.1", port, 2, 0), {}, 1)


def test_address_of_another_host():
    with pytest.raises(ValueError, match=r"cannot listen .*, got 192.0.2.1:29500; use an address of its host"):
        line.meet(Address("192.0.2.1", 29500, 2, 0), {}, 1)


def test_process_0_that_does_not_come():
    port = free_port()
    with pytest.raises(ValueError, match=f"process 0 cannot be reached .*, got 127.0.0.1:{port}; start it there"):
        line.meet(Address("127.0.0.1", port, 2, 1), {}, 0.2)


def test_only_the_given_address_listens():
    """The loopback is not reached from another address of this host."""
    other = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    port = free_port()
    waiting = threading.Thread(target=lambda: in_threads([lambda: line.meet(Address("127.0.0.1", port, 2, 0), {}, 1)]))
    waiting.start()
    time.sleep(0.2)
    for address in other:
        if not address.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((address, port), timeout=0.5)
    waiting.join()


def test_difference_is_named():
    each = [{"seed": 1, "jax": "0.10"}, {"seed": 1, "jax": "0.10"}, {"seed": 2, "jax": "0.10"}]
    message = "process 2 (c) has seed 2, but process 0 has 1; use the same"
    with pytest.raises(ValueError, match="started alike") as found:
        distributed.check_same(each, ["a", "b", "c"])
    assert message in str(found.value)
    distributed.check_same(each[:2], ["a", "b"])
    with pytest.raises(ValueError, match="has seed missing"):
        distributed.check_same([{"seed": 1}, {}], ["a", "b"])


def test_messages_are_lines_of_json():
    one, other = socket.socketpair()
    line.Line(one).send({"topic": "x", "value": [1]})
    assert json.loads(other.recv(100)) == {"topic": "x", "value": [1]}
    other.close()
