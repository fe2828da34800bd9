"""Environments that work in one thread only, without worker processes."""

import asyncio
import signal
import sqlite3
import threading

import gymnasium
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers
from jaxrl_fast.utils.threads import OneThread, one_thread
from tests.helpers.host_envs import random_actions, run

pytestmark = pytest.mark.unit


class Bound(gymnasium.Env):
    """An environment that uses something of its thread in every call."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.use()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        self.use()
        return np.zeros(1, np.float32), 1.0, False, self.t >= 4, {}

    def render(self):
        self.use()
        return np.zeros((4, 4, 3), np.uint8)

    def close(self):
        self.use()


class Database(Bound):
    def __init__(self):
        self.database = sqlite3.connect(":memory:")

    def use(self):
        self.database.execute("select 1")


class Local(Bound):
    def __init__(self, render_mode=None):
        self.own = threading.local()
        self.own.count = 0

    def use(self):
        self.own.count += 1


class Loop(Bound):
    def __init__(self):
        self.loop = asyncio.get_event_loop()

    def use(self):
        assert asyncio.get_event_loop() is self.loop
        self.loop.run_until_complete(asyncio.sleep(0))


class Alarmed(Bound):
    """Python sets signal handlers in the main thread only."""

    def use(self):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))


@pytest.mark.parametrize("bridge", ["auto", "callback"])
@pytest.mark.parametrize("make", [Database, Local, Loop])
def test_all_calls_of_a_pool_are_made_in_one_thread(make, bridge):
    env = envs.make(make, 2, HostEnvConfig(workers=Workers(0), bridge=bridge))
    _, steps = run(env, random_actions(env.spec, 10))
    env.host.reseed(1)
    state = env.host.save()
    env.host.close()
    assert steps.last[:, 0].tolist() == [t % 5 == 3 for t in range(10)]
    assert isinstance(state, str), "neither a connection nor a thread's values can be copied"


def test_image_is_drawn_in_the_thread_of_the_environment():
    make = lambda render_mode=None: Local()
    Local.metadata = {"render_modes": ["rgb_array"]}
    env = envs.make(make, 1, HostEnvConfig(workers=Workers(0), render=True))
    env.host.open()
    assert env.host.render().shape == (4, 4, 3)
    env.host.close()


@pytest.mark.parametrize(("workers", "is_told"), [("auto", False), (0, True), (1, False)])
def test_environment_that_needs_a_main_thread_gets_a_worker_process(workers, is_told):
    env = envs.make(f"{__name__}:Alarmed", 2, HostEnvConfig(workers=Workers(workers)))
    assert env.host.num_workers == 1
    _, steps = run(env, random_actions(env.spec, 5))
    env.host.close()
    assert steps.last[:, 0].tolist() == [False, False, False, True, False]
    told = [line for line in env.view.warnings if line.startswith("host.workers: ")]
    assert len(told) == is_told and all("signal only works in main thread" in line for line in told)


def test_call_returns_result_and_raises_exception_in_the_caller():
    with one_thread("own") as thread:
        assert thread.call(threading.current_thread) is thread.thread
        assert thread.call(thread.call, max, 3, 5) == 5
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 // 0)
        assert thread.call(max, 1, 2) == 2
    thread.thread.join(10)
    assert not thread.thread.is_alive()


def test_calls_of_several_threads_do_not_overlap():
    thread, inside, overlaps = OneThread("own"), [], []

    def work():
        overlaps.append(len(inside))
        inside.append(1)
        threading.Event().wait(0.01)
        inside.pop()

    callers = [threading.Thread(target=thread.call, args=(work,)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    thread.close()
    assert overlaps == [0] * 4
