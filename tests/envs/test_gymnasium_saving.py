"""Gymnasium environments in checkpoints: detection of faithful copies, and resume within an episode."""

import itertools
import os
import random
import re
from functools import partial

import gymnasium
import jax
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import envs
from jaxrl_fast.envs.gymnasium import copying, description, source
from jaxrl_fast.envs.gymnasium.layout import Recipe
from jaxrl_fast.envs.gymnasium.making import make_one
from jaxrl_fast.envs.gymnasium.pool import LocalPool, WorkerPool
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers
from jaxrl_fast.utils.errors import EnvFault
from tests.helpers import slow
from tests.helpers.gym_envs import Guarded, Walk
from tests.helpers.runs import bits, records, stop_after
from tests.helpers.trees import same_bits

MODULE = "tests.envs.test_gymnasium_saving"


class Own(Walk):
    """An environment that cannot be pickled but has get_state and set_state."""

    def __init__(self, **options):
        super().__init__(**options)
        self.squares = (self.x**2 for _ in itertools.count())

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward - next(self.squares), *rest

    def get_state(self):
        return {"x": self.x, "t": self.t}

    def set_state(self, state):
        self.x, self.t = state["x"], state["t"]


class Strict(Walk):
    """An environment that terminates after five steps, and cannot be stepped after that."""

    def step(self, action):
        assert self.t < 5
        obs, reward, *_ = super().step(action)
        return obs, reward, self.t == 5, False, {}


class Forgetful(Own):
    """An environment whose get_state returns only a part of its state."""

    def get_state(self):
        return {"x": self.x, "t": 0}


class Omitting(Walk):
    """An environment that can be pickled, whose get_state leaves out what only later steps read."""

    def get_state(self):
        return self.x

    def set_state(self, state):
        self.x = state


class Counting(Own):
    """An environment that cannot be pickled, with an attribute that its steps do not read."""

    num_steps = 0

    def step(self, action):
        self.num_steps += 1
        return super().step(action)


class Jammed(Own):
    """An environment whose state cannot be saved after two steps, and can never be restored."""

    def get_state(self):
        return 1 / 0 if self.t > 2 else super().get_state()

    def set_state(self, state):
        raise KeyError("x")


class Rebuilt(Walk, gymnasium.utils.EzPickle):
    """Its unpickled copy is a newly constructed environment, as with every subclass of EzPickle."""

    def __init__(self):
        super().__init__()
        gymnasium.utils.EzPickle.__init__(self)


class Chance(Walk):
    """Draws from the global generator of `random`, which all environments share."""

    def observe(self):
        return super().observe() + np.float32(random.random())


class Large(Walk):
    """Its state exceeds the size limit of checkpoints."""

    def __init__(self):
        super().__init__()
        self.memory = np.zeros(copying.MAX_BYTES, np.uint8)


@pytest.mark.parametrize(
    ("construct", "method", "reason"),
    [
        (Walk, "pickle", ""),
        (Guarded, "pickle", ""),  # an action mask in `info`
        (partial(gymnasium.make, "CartPole-v1"), "pickle", ""),
        (Own, "own", ""),
        (Omitting, "pickle", ""),
        (Strict, "pickle", ""),
        (Counting, "own", ""),
        (Forgetful, "own", "a copy of it returned another step than it did, 1 steps later"),
        (Rebuilt, "pickle", "copying it failed with AttributeError: 'Rebuilt' object has no attribute 'x'"),
        (Chance, "pickle", "a copy of it returned another step than it did, 1 steps later"),
        (Large, "pickle", "its state has 1677.* bytes, more than 16777216"),
    ],
)
def test_choose_method_accepts_only_copies_that_step_identically(construct, method, reason):
    found, why = copying.choose_method(partial(make_one, construct, {}, 7, False, 2))
    assert found == method and bool(why) == bool(reason) and re.match(reason, why), why


@pytest.mark.slow
@pytest.mark.parametrize("make_pool", [LocalPool, partial(WorkerPool, num_workers=2, timeout_s=0)])
def test_pool_goes_on_when_state_cannot_be_saved_or_restored(make_pool):
    """It returns the rows of a pool that was not asked for its state."""
    made = source.from_object(Jammed, {}, "")
    recipe = Recipe("Jammed", made.maker(render=False), description.describe(made).layout)
    pool, other = make_pool(recipe, [1, 2], lambda: "own"), LocalPool(recipe, [1, 2])
    try:
        np.testing.assert_array_equal(pool.reset(), other.reset())
        saved = pool.get_state()
        for t in range(5):
            pool.send(np.full(2, 5))
            other.send(np.full(2, 5))
            if t == 3:
                with pytest.raises(ZeroDivisionError):
                    pool.get_state()
            assert same_bits(pool.recv(), other.recv())
        with pytest.raises(KeyError, match="x"):
            pool.set_state(saved)
        for one in (pool, other):
            one.reseed([3, 4])
        np.testing.assert_array_equal(pool.reset(), other.reset())
    finally:
        pool.close()
        other.close()


def source_recipe(env):
    """Return the recipe of an environment class."""
    made = source.from_object(env, {}, "")
    return Recipe(env.__name__, made.maker(render=False), description.describe(made).layout)


@pytest.mark.parametrize("workers", [0, 2])
def test_pool_continues_from_saved_host_state(workers):
    """Copy the state before the first episode and, later, with a step pending. Rows agree, also across episode ends.

    Both pools have the same number of workers.
    """
    configs = [HostEnvConfig((seed, 0, 0), workers=Workers(workers)) for seed in (5, 6)]
    one, other = made = [envs.make(Walk, 3, config, limit=5) for config in configs]
    pools = [env.step.args[0].pools[0] for env in made]
    same = partial(jax.tree.map, np.testing.assert_array_equal)
    try:
        other.host.load(one.host.save())
        same(*(pool.reset() for pool in pools))
        for t in range(24):
            for pool in pools if t % 8 else pools[:1]:
                pool.send(np.array([5, 6, 5 + t // 2 % 2]))
            if t % 8 == 0:
                other.host.load(one.host.save())
            rows = [pool.recv() for pool in pools]
            same(*rows)
    finally:
        one.host.close()
        other.host.close()


class Quitting(Walk):
    """An environment whose process ends at action 6, if it is one of the test's workers."""

    def step(self, action):
        return os._exit(3) if action == 6 and "QUITTING" in os.environ else super().step(action)


def test_workers_step_their_own_environments(monkeypatch):
    """Two workers have environments 0, and 1 and 2. The rows are those of a pool in this process."""
    recipe = source_recipe(Quitting)
    with monkeypatch.context() as patch:
        patch.setenv("QUITTING", "yes")
        pool = WorkerPool(recipe, [1, 2, 3], num_workers=2, timeout_s=0)
    alone = LocalPool(recipe, [1, 2, 3])
    try:
        np.testing.assert_array_equal(pool.reset(), alone.reset())
        for _ in range(3):
            for one in (pool, alone):
                one.send(np.full(3, 5))
            assert same_bits(pool.recv(), alone.recv())
        for one in (pool, alone):
            one.reseed([9, 7, 8])
        np.testing.assert_array_equal(pool.reset(), alone.reset())
        alone.send(np.full(3, 5))
        alone.recv()
        pool.set_state(alone.get_state())
        for one in (pool, alone):
            one.send(np.full(3, 5))
        assert same_bits(pool.recv(), alone.recv())
        pool.send(np.array([5, 5, 6]))
        with pytest.raises(EnvFault, match="ended with exit status 3 in environment 2, episode 2, step 3, action 6"):
            pool.recv()
    finally:
        pool.close()
        alone.close()


SHORT: dict = dict(algo="ppo", num_envs=4, total_steps=320, eval_every=96, eval_episodes=4, save_every=0)
SHORT |= dict(loggers=(), log_level="quiet", log_every=32)
SHORT |= dict(rollout_length=8, hidden_sizes=(4,), num_minibatches=1, num_epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "system", "again"),
    [("Walk", dict(workers=0), {}), slow("Own", dict(workers=1, async_pools=2), dict(workers=0))],
)
def test_resume_within_episodes_matches_uninterrupted_run(env, system, again, tmp_path, monkeypatch):
    """Compare records, evaluations and the last checkpoint, except pickled environments, whose bytes may differ."""
    fit = partial(jaxrl_fast.fit, **SHORT, env=f"{MODULE}:{env}", env_options={"limit": 9}, **system)
    whole = fit(run_dir=str(tmp_path / "whole"))
    stop_after(monkeypatch, 128)
    stopped = fit(run_dir=str(tmp_path / "parts")).summary
    assert stopped["status"] == "stopped" and stopped["env_steps"] < 320
    parts = jaxrl_fast.fit(resume=str(tmp_path / "parts"), log_level="quiet", **again)
    assert records(whole.folder) == records(parts.folder)
    assert whole.summary["evaluations"] == parts.summary["evaluations"]
    one, other = ({name: x for name, x in bits(run.folder).items() if "/env/" not in name} for run in (whole, parts))
    assert one == other and "train_envs/0/seeds" in one
