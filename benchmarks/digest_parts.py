"""Define environments and a network for `digests.py`, in a module that worker processes and options can import."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from gymnasium import spaces


class Walk(gymnasium.Env):
    """A noisy walk on a line, terminated beyond 2 and truncated after `limit` steps.

    With `masked`, the mask forbids steps away from 0 once |x| exceeds 1.
    """

    def __init__(self, limit: int = 20, masked: bool = False):
        self.observation_space, self.action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(2)
        self.limit, self.masked = limit, masked

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.uniform(-1, 1), 0
        return self.observe()

    def step(self, action):
        self.x += (0.3 if action == 1 else -0.3) + self.np_random.normal(scale=0.05)
        self.t += 1
        obs, info = self.observe()
        return obs, 1 - abs(self.x), bool(abs(self.x) > 2), self.t >= self.limit, info

    def observe(self):
        mask = np.array([self.x > -1, self.x < 1], np.int8)
        return np.array([self.x, self.t / self.limit], np.float32), {"action_mask": mask} if self.masked else {}


class Dot(gymnasium.Env):
    """A dot of random color in frames [24, 24, 3]. It moves left or right, and is paid for the right half."""

    def __init__(self):
        self.observation_space, self.action_space = spaces.Box(0, 255, (24, 24, 3), np.uint8), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t, self.color = int(self.np_random.integers(24)), 0, self.np_random.integers(64, 256, 3)
        return self.observe(), {}

    def step(self, action):
        self.x, self.t = int(np.clip(self.x + (1 if action == 1 else -1), 0, 23)), self.t + 1
        return self.observe(), float(self.x >= 12), False, self.t >= 24, {}

    def observe(self):
        frame = np.zeros((24, 24, 3), np.uint8)
        frame[10:14, max(self.x - 2, 0) : self.x + 2] = self.color
        return frame


class Mixed(gymnasium.Env):
    """An environment with a dictionary of observations and two choices in each action, in episodes of 12 steps."""

    def __init__(self):
        parts = {"camera": spaces.Box(0, 255, (16, 16, 1), np.uint8), "place": spaces.Discrete(3)}
        self.observation_space = spaces.Dict(parts | {"speed": spaces.Box(-1, 1, (2,), np.float32)})
        self.action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        reward, self.t = float(action[1] == self.place), self.t + 1
        return self.observe(), reward, self.t >= 12, False, {}

    def observe(self):
        self.place = int(self.np_random.integers(3))
        camera = self.np_random.integers(0, 256, (16, 16, 1), np.uint8)
        return {"camera": camera, "place": self.place, "speed": self.np_random.uniform(-1, 1, 2).astype(np.float32)}


class Wide(linen.Module):
    """One layer with sines."""

    width: int = 8

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(linen.Dense(self.width)(x))
