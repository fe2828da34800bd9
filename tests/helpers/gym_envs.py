"""Environments with gymnasium's interface for tests of the gymnasium backend."""

import os
import sys
import time
from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """A noisy walk on a line, terminated at `size` and truncated after `limit` steps.

    `fault` names an entry of FAULTS that replaces step `fault_at` of an episode, or of FAULTY_RESETS.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, size=2.0, limit=12, fault="", fault_at=3, sleep=0.0, render_mode=None):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2, start=5)
        self.size, self.limit, self.fault, self.fault_at, self.sleep = size, limit, fault, fault_at, sleep
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.uniform(-1, 1), 0
        return FAULTY_RESETS.get(self.fault, lambda obs: (obs, {}))(self.observe())

    def step(self, action):
        assert action in (5, 6)
        time.sleep(self.sleep)
        self.x += (0.3 if action == 6 else -0.3) + self.np_random.normal(scale=0.05)
        self.t += 1
        outcome = self.observe(), 1 - abs(self.x), bool(abs(self.x) > self.size), self.t >= self.limit, {}
        if self.fault in FAULTS and self.t == self.fault_at:
            return FAULTS[self.fault](*outcome)
        return outcome

    def observe(self):
        return np.array([self.x, self.t], np.float32)

    def render(self):
        image = np.zeros((48, 64, 3), np.uint8)
        image[:, int(np.clip(32 + 8 * self.x, 0, 63))] = 255
        return image


class Uneven(Walk):
    """A walk whose steps take random times of mean `sleep` s, and `slow` s in the environment of seed `slow_seed`."""

    def __init__(self, sleep=0.0, slow=0.0, slow_seed=-1, **options):
        super().__init__(size=0.8, limit=7, **options)
        self.duration, self.slow, self.slow_seed, self.seed = sleep, slow, slow_seed, -1

    def reset(self, *, seed=None, options=None):
        self.seed = self.seed if seed is None else seed
        return super().reset(seed=seed, options=options)

    def step(self, action):
        time.sleep(self.slow if self.seed == self.slow_seed else np.random.default_rng().exponential(self.duration))
        return super().step(action)


class Slide(Walk):
    """A walk with continuous actions."""

    def __init__(self, **options):
        super().__init__(**options)
        self.action_space = spaces.Box(-2, 2, (1,), np.float32)

    def step(self, action):
        return super().step(6 if action[0] > 0 else 5)


class OddError(Exception):
    """An exception that cannot be unpickled: its constructor takes two arguments and passes on one."""

    def __init__(self, code, reason):
        super().__init__(f"{code} {reason}")


def raise_odd(*outcome):
    raise OddError(7, "a wheel came off")


FAULTS = {
    "raise": lambda *outcome: 1 // 0,
    "odd": raise_odd,
    "leave": lambda *outcome: sys.exit(4),
    "die": lambda *outcome: os._exit(3),
    "abort": lambda *outcome: os.abort(),
    "hang": lambda *outcome: time.sleep(10**6),
    "nothing": lambda *outcome: None,
    "four": lambda *outcome: outcome[:4],
    "shape": lambda obs, *rest: (obs[:1], *rest),
    "dtype": lambda obs, *rest: (obs.astype(complex), *rest),
    "none": lambda obs, *rest: (None, *rest),
    "text": lambda obs, *rest: ("left", *rest),
    "nan": lambda obs, *rest: (obs * np.nan, *rest),
    "reward none": lambda obs, reward, *rest: (obs, None, *rest),
    "reward nan": lambda obs, reward, *rest: (obs, np.nan, *rest),
    "reward huge": lambda obs, reward, *rest: (obs, 1e39, *rest),
    "reward two": lambda obs, reward, *rest: (obs, np.ones(2), *rest),
    "reward text": lambda obs, reward, *rest: (obs, "1.0", *rest),
    "flag": lambda obs, reward, terminated, truncated, info: (obs, reward, None, truncated, info),
    "flag two": lambda obs, reward, terminated, truncated, info: (obs, reward, terminated, 2, info),
}
FAULTY_RESETS = {
    "reset raise": lambda obs: [][0],
    "reset bare": lambda obs: obs,
    "reset shape": lambda obs: (obs[None], {}),
}


class Mixed(gymnasium.Env):
    """An environment with random, nested observations of every kind of space. Episodes have 4 to 8 steps."""

    def __init__(self):
        self.action_space = spaces.MultiDiscrete([2, 3, 4])
        inner = spaces.Tuple((spaces.Discrete(4, start=-2), spaces.Box(-5, 5, (2, 2), np.int16)))
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (3, 20, 20), np.uint8),
                "joints": spaces.Box(-1, 1, (3,), np.float64),
                "bits": spaces.MultiBinary(4),
                "choices": spaces.MultiDiscrete([2, 3], start=[1, -1]),
                "inner": inner,
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.left = int(self.np_random.integers(4, 9))
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.left -= 1
        return self.observation_space.sample(), np.float64(action.sum()), self.left == 0, False, {}


class Guarded(gymnasium.Env):
    """In each of 20 steps, one of four actions is forbidden and has reward -1000. The others have rewards 0 to 3.

    The mask is in `info`, or in the observation if `in_obs` is set.
    """

    def __init__(self, in_obs=False):
        self.in_obs, self.action_space = in_obs, spaces.Discrete(4)
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        if in_obs:
            parts = {"observation": self.observation_space, "action_mask": spaces.Box(0, 1, (4,), np.int8)}
            self.observation_space = spaces.Dict(parts)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def observe(self):
        self.forbidden = int(self.np_random.integers(4))
        mask = np.ones(4, np.int8)
        mask[self.forbidden] = 0
        obs = self.np_random.random(4).astype(np.float32)
        if self.in_obs:
            return {"observation": obs, "action_mask": mask}, {}
        return obs, {"action_mask": mask}

    def step(self, action):
        reward = -1000.0 if action == self.forbidden else float(action)
        self.t += 1
        obs, info = self.observe()
        return obs, reward, False, self.t == 20, info


def make_walk(limit: int = 12) -> gymnasium.Env:
    """Return a Walk. The annotation names the returned type."""
    return Walk(limit=limit)


def make_unannotated(limit=12):
    return Walk(limit=limit)


gymnasium.register("tests/Walk-v3", entry_point=Walk, max_episode_steps=9, kwargs={"limit": 50})


class Leveled(gymnasium.Env):
    """Reward action 0 with 0.5, and action 1 with the level, in episodes of 6 steps. The observation has noise."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.level = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), self.level if action == 1 else 0.5, False, self.t == 6, {}

    def observe(self):
        return np.array([self.np_random.uniform(), self.level], np.float32)


class UnsavableLeveled(Leveled):
    """The same, whose state cannot be saved."""

    def __reduce__(self):
        raise TypeError("it cannot be copied")
