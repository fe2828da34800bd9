"""Check the values that an environment returns. Worker processes import this, so it avoids JAX."""

from typing import Any

import numpy as np

from jaxrl_fast.envs.gymnasium import masks
from jaxrl_fast.envs.gymnasium.layout import Arrays, Layout, Leaf, few

SUM_REWARDS = "; add them up: gymnasium.wrappers.TransformReward(env, lambda rewards: rewards @ weights)"
REMEDY = "; wrap quarantine resets the environment instead"
MAX_REWARD = float(np.finfo(np.float32).max)


class WrongValue(Exception):
    """An environment has returned a value that it must not return."""

    def __init__(self, problem: str, got: str, remedy: str = "", row: int = 0) -> None:
        super().__init__(problem)
        self.problem, self.got, self.remedy = problem, got, remedy
        self.row = row  # of the environment, where several are checked together


def part(leaf: Leaf, obs: Any) -> Any:
    """Return a part of an observation, as an array that fits into the row's array."""
    value = obs
    for key in leaf.path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise WrongValue(f"{leaf.name} is missing", got(obs)) from None
    if type(value) is np.ndarray and value.shape == leaf.shape and value.dtype == leaf.dtype:
        return value
    return _converted(leaf, value)


def _converted(leaf: Leaf, value: Any) -> np.ndarray:
    """Return a part of an observation with the declared shape, in a dtype that the declared one can hold."""
    array = np.asarray(value)
    declared = f"{leaf.dtype}{list(leaf.shape)} as its space declares"
    if value is None or array.dtype == object:
        raise WrongValue(f"{leaf.name} must be {declared}", got(value))
    if leaf.dtype.kind == "f":
        fits = array.dtype.kind in "buif"
    else:
        fits = array.dtype.kind in "bui" and _holds(leaf.dtype, array)
    if array.shape != leaf.shape or not fits:
        raise WrongValue(f"{leaf.name} must be {declared}", f"{array.dtype}{list(array.shape)}")
    return array


def _holds(dtype: np.dtype, array: np.ndarray) -> bool:
    """Return whether whole numbers fit into a dtype."""
    if dtype.kind == "b":
        return bool(((array == 0) | (array == 1)).all())
    limits = np.iinfo(dtype)
    return bool(((array >= limits.min) & (array <= limits.max)).all())


def action_mask(info: Any, size: int, terminated: bool) -> Any:
    """Return the action mask in `info`, bool [size]. A terminal state needs none: True."""
    mask = info.get("action_mask") if isinstance(info, dict) else None
    if mask is None:
        if not terminated:
            raise WrongValue('info["action_mask"] is missing', "none, but earlier steps had one")
        return True
    array = masks.flat(mask)
    if array.shape != (size,) or array.dtype.kind not in "bui":
        raise WrongValue(f'info["action_mask"] must be {size} booleans', f"{array.dtype}{list(array.shape)}")
    return array.astype(bool)


def number(reward: Any, may_be_infinite: bool) -> float:
    """Return the reward as a float: one number, and finite unless it `may_be_infinite`."""
    if type(reward) is not float:
        value = np.asarray(reward) if reward is not None else None
        if value is None or value.size != 1 or value.dtype.kind not in "buif":
            several = value is not None and value.size > 1 and value.dtype.kind in "buif"
            raise WrongValue("reward must be one number", got(reward), SUM_REWARDS if several else "")
        reward = float(value.reshape(()))
    if not abs(reward) <= MAX_REWARD and not may_be_infinite:
        raise WrongValue("reward must be finite in float32", f"{reward}", REMEDY)
    return float(reward)


def flag(name: str, value: Any) -> bool:
    """Return an episode's end as a bool."""
    if value is True or value is False:
        return value
    array = np.asarray(value) if value is not None else None
    if array is None or array.size != 1 or array.dtype.kind not in "bui" or array.reshape(()) not in (0, 1):
        raise WrongValue(f"{name} must be True or False", got(value))
    return bool(array.reshape(()))


def image(value: Any) -> np.ndarray:
    """Return a rendered image, uint8 [H, W, 3]."""
    array = np.asarray(value)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        shown = got(value) if array.dtype == object else f"{array.dtype}{list(array.shape)}"
        raise WrongValue("render must return uint8 [H, W, 3] where render_mode is rgb_array", shown)
    return array


def got(value: Any) -> str:
    """Return a value for a message."""
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) and value.shape else ""
    return f"{type(value).__name__}{shape}" if shape else f"{value!r}"[:80]


class Ranges:
    """The check of all numbers in a row: finite, and within their space.

    The value of a terminal state is 0 whatever its observation is, so numbers there need not be finite.
    """

    def __init__(self, layout: Layout, quarantine: bool) -> None:
        self.leaves, self.quarantine = layout.leaves, quarantine
        self.accepted = [leaf.accepted() for leaf in self.leaves]
        self.outside: WrongValue | None = None  # the first number outside its space

    def check(self, arrays: Arrays, terminated: np.ndarray) -> np.ndarray:
        """Return the rows whose episode ends in quarantine, bool [n]; note the first number outside its space.

        Raise WrongValue for NaN without quarantine, and for an index outside its space.
        """
        bad = ~np.isfinite(arrays.reward) if self.quarantine else np.zeros(len(terminated), bool)
        for k, (leaf, array) in enumerate(zip(self.leaves, arrays.obs)):
            accepted = self.accepted[k]
            if accepted is None or ((accepted[0] <= array) & (array <= accepted[1])).all():
                continue
            if array.dtype.kind == "f":
                bad |= self._not_finite(leaf, array, terminated)
            if leaf.low is not None and (leaf.is_index or self.outside is None):
                self._find_outside(leaf, array)
        return bad

    def _not_finite(self, leaf: Leaf, array: np.ndarray, terminated: np.ndarray) -> np.ndarray:
        finite = np.isfinite(array)
        bad: np.ndarray = ~finite.reshape(len(array), -1).all(1) & ~terminated
        if bad.any() and not self.quarantine:
            i = int(np.argmax(bad))
            raise WrongValue(f"{leaf.name} must be finite", few(array[i]), REMEDY, i)
        return bad

    def _find_outside(self, leaf: Leaf, array: np.ndarray) -> None:
        outside = (array < leaf.low) | (array > leaf.high)
        if not outside.any():
            return
        i, *place = (int(k) for k in np.argwhere(outside)[0])
        low, high = (np.broadcast_to(bound, leaf.shape)[tuple(place)] for bound in (leaf.low, leaf.high))
        which, declared = f"{leaf.name}{place if place else ''}", f"between {low:g} and {high:g}"
        shown = f"{array[i][tuple(place)]:g}"
        if leaf.is_index:
            raise WrongValue(f"{which} must be {declared}", shown, row=i)
        self.outside = WrongValue(f"{which} is not {declared} as its space declares", shown, row=i)
        self.accepted = [each.accepted(within_bounds=False) for each in self.leaves]
