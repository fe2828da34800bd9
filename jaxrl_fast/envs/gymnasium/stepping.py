"""Step gymnasium environments one after another, and check their results. Workers import this, so it avoids JAX.

The step after a terminated or truncated one resets the environment and ignores its action (gymnasium's NEXT_STEP).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import numpy as np

from jaxrl_fast.envs.gymnasium import masks
from jaxrl_fast.envs.gymnasium.copying import EnvState, Method, dump, load
from jaxrl_fast.envs.gymnasium.layout import Arrays, Leaf, Recipe, few
from jaxrl_fast.utils.errors import EnvFault, EnvInterrupted, blame, why

STEP_RETURNS = "(obs, reward, terminated, truncated, info)"
REMEDY = "; wrap quarantine resets the environment instead"
SUM_REWARDS = "; add them up: gymnasium.wrappers.TransformReward(env, lambda rewards: rewards @ weights)"
MAX_REWARD = float(np.finfo(np.float32).max)


class Stepper:
    """n environments in this process. Their rows are written into arrays."""

    def __init__(self, recipe: Recipe, seeds: Sequence[int], arrays: Arrays, first: int = 0) -> None:
        """Make the environments. `first` is the index of the first one among all of a pool, for messages."""
        self.env_id, make, self.layout, self.quarantine = recipe
        self.arrays, self.first = arrays, first
        self.warning = ""  # a sentence about the first observation outside its space
        self.has_warned = False
        self.accepted = [leaf.accepted() for leaf in self.layout.leaves]
        leaf, *others = self.layout.leaves
        is_plain = not others and not leaf.path and not self.layout.mask_size
        self.only_leaf = leaf if is_plain else None  # of observations that are one array
        self.seeds: list[int | None] = list(seeds)  # for the next reset; None: no new seed
        self.ended = [False] * len(seeds)
        self.envs: list[Any] = []
        try:
            for i in range(len(seeds)):
                self._make(i, make)
            self.check_distinct()
        except BaseException:
            self.close()
            raise

    def _make(self, i: int, make: Callable[[], Any]) -> None:
        try:
            self.envs.append(make())
        except Exception as error:
            blame(error, f"{self.env_id}: environment {self.first + i} could not be made")
            raise

    def check_distinct(self, others: Collection[int] = ()) -> None:
        """Raise EnvFault if an environment is there twice, or its id is among those of `others`."""
        found = {id(env.unwrapped) for env in self.envs}
        if len(found) < len(self.envs) or not found.isdisjoint(others):
            raise EnvFault(f"{self.env_id}: must make a new environment in each call, got the same one twice")

    def reset(self) -> None:
        """Start an episode in every environment."""
        with np.errstate(over="ignore"):
            for i in range(len(self.envs)):
                self._begin(i)
            self.arrays.busy[:] = False
            self._check_numbers(np.zeros(len(self.envs), bool))

    def step(self) -> None:
        """Take a step in every environment with the actions in `arrays`, or reset it if its episode has ended."""
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite
            self._step()

    def _step(self) -> None:
        arrays, ended, one = self.arrays, self.ended, self.only_leaf
        actions, length, busy = arrays.action, arrays.length, arrays.busy
        is_array = actions.ndim > 1 or actions.dtype.kind == "f"
        rewards, terminations, truncations = ([0.0] * len(ended), [False] * len(ended), [False] * len(ended))
        rows, shape, dtype = arrays.obs[0], one and one.shape, one and one.dtype
        length += 1
        for i, (env, action) in enumerate(zip(self.envs, actions)):
            if ended[i]:
                self._begin(i)
                continue
            busy[i] = True
            try:
                outcome = env.step(np.array(action) if is_array else action)  # an environment may keep or change it
            except BaseException as error:
                self._failed("step", i, error)
            if not isinstance(outcome, tuple) or len(outcome) != 5:
                self._fault(i, f"step must return {STEP_RETURNS}", _got(outcome))
            obs, reward, terminated, truncated, info = outcome
            if terminated is not False:
                terminations[i] = ended[i] = self._flag(i, "terminated", terminated)
            if truncated is not False:
                truncations[i] = self._flag(i, "truncated", truncated)
                ended[i] |= truncations[i]
            if type(obs) is np.ndarray and obs.dtype is dtype and obs.shape == shape:
                rows[i] = obs
            else:
                self._write(i, obs, info, terminations[i])
            is_plain = type(reward) is float and -MAX_REWARD <= reward <= MAX_REWARD
            rewards[i] = reward if is_plain else self._number(i, reward)
        busy[:] = False
        arrays.reward[:], arrays.terminated[:], arrays.truncated[:] = rewards, terminations, truncations
        self._check_numbers(arrays.terminated)

    def reseed(self, seeds: Sequence[int]) -> None:
        """Give each environment a new seed for its next reset."""
        self.seeds = list(seeds)

    def get_states(self, method: Method) -> list[EnvState]:
        """Return the state of each environment."""
        states: list[EnvState] = []
        for i, (env, seed) in enumerate(zip(self.envs, self.seeds, strict=True)):
            try:
                states.append(EnvState(b"" if seed is not None else dump(env, method), seed))
            except Exception as error:
                blame(error, f"{self.env_id}: its state could not be saved in {self.where(i)}")
                raise
        return states

    def set_states(self, method: Method, states: Sequence[EnvState]) -> None:
        """Restore the result of `get_states`, after the arrays have been filled."""
        for i, (pickled, seed) in enumerate(states):
            self.seeds[i], before = seed, self.envs[i]
            if pickled:
                self.envs[i] = load(before, method, pickled)
            if before is not self.envs[i]:
                before.close()
        self.ended = (self.arrays.terminated | self.arrays.truncated).tolist()

    def render(self) -> np.ndarray:
        """Return the first environment's image, uint8 [H, W, 3]."""
        try:
            image = self.envs[0].render()
        except Exception as error:
            blame(error, f"{self.env_id}: render failed in {self.where(0)}")
            raise
        array = np.asarray(image)
        if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
            got = _got(image) if array.dtype == object else f"{array.dtype}{list(array.shape)}"
            self._fault(0, "render must return uint8 [H, W, 3] where render_mode is rgb_array", got)
        return array

    def close(self) -> None:
        """Close the environments. An error in one does not keep the others open."""
        envs, self.envs, failed = self.envs, [], None
        for i, env in enumerate(envs):
            try:
                env.close()
            except Exception as error:
                blame(error, f"{self.env_id}: close failed in environment {self.first + i}")
                failed = failed or error
        if failed is not None:
            raise failed

    def where(self, i: int) -> str:
        """Return "environment 3, episode 2, step 17, action 1"."""
        return self.arrays.where(i, self.first)

    def _begin(self, i: int) -> None:
        """Reset environment i."""
        arrays, seed = self.arrays, self.seeds[i]
        arrays.episode[i] += 1
        arrays.length[i] = 0
        arrays.busy[i] = True
        try:
            outcome = self.envs[i].reset() if seed is None else self.envs[i].reset(seed=seed)
        except BaseException as error:
            self._failed("reset", i, error)
        if not isinstance(outcome, tuple) or len(outcome) != 2:
            self._fault(i, "reset must return (obs, info)", _got(outcome))
        self._write(i, *outcome)
        self.seeds[i], self.ended[i] = None, False
        arrays.reward[i], arrays.terminated[i], arrays.truncated[i] = 0.0, False, False

    def _write(self, i: int, obs: Any, info: Any, terminated: bool = False) -> None:
        """Copy an observation and the action mask into the arrays. A terminal state needs no mask."""
        for leaf, array in zip(self.layout.leaves, self.arrays.obs):
            value = obs
            for key in leaf.path:
                try:
                    value = value[key]
                except (KeyError, IndexError, TypeError):
                    self._fault(i, f"{leaf.name} is missing", f"{_got(obs)}")
            if type(value) is not np.ndarray or value.shape != leaf.shape or value.dtype != leaf.dtype:
                value = self._converted(i, leaf, value)
            array[i] = value
        if self.layout.mask_size:
            mask = info.get("action_mask") if isinstance(info, dict) else None
            if mask is None and not terminated:
                self._fault(i, 'info["action_mask"] is missing', "none, but earlier steps had one")
            self.arrays.mask[i] = True if mask is None else self._mask(i, mask)

    def _converted(self, i: int, leaf: Leaf, value: Any) -> np.ndarray:
        """Return a part of an observation with the declared shape, in a dtype that the declared one can hold."""
        array = np.asarray(value)
        declared = f"{leaf.dtype}{list(leaf.shape)} as its space declares"
        if value is None or array.dtype == object:
            self._fault(i, f"{leaf.name} must be {declared}", _got(value))
        if leaf.dtype.kind == "f":
            fits = array.dtype.kind in "buif"
        else:
            fits = array.dtype.kind in "bui" and _holds(leaf.dtype, array)
        if array.shape != leaf.shape or not fits:
            self._fault(i, f"{leaf.name} must be {declared}", f"{array.dtype}{list(array.shape)}")
        return array

    def _mask(self, i: int, mask: Any) -> np.ndarray:
        array = masks.flat(mask)
        if array.shape != (self.layout.mask_size,) or array.dtype.kind not in "bui":
            expected = f"{self.layout.mask_size} booleans"
            self._fault(i, f'info["action_mask"] must be {expected}', f"{array.dtype}{list(array.shape)}")
        return array.astype(bool)

    def _number(self, i: int, reward: Any) -> float:
        """Return the reward as a float. Raise EnvFault if it is not one number, or not finite without quarantine."""
        if type(reward) is not float:
            value = np.asarray(reward) if reward is not None else None
            if value is None or value.size != 1 or value.dtype.kind not in "buif":
                several = value is not None and value.size > 1 and value.dtype.kind in "buif"
                self._fault(i, "reward must be one number", _got(reward), SUM_REWARDS if several else "")
            reward = float(value.reshape(()))
        if not abs(reward) <= MAX_REWARD and not self.quarantine:
            self._fault(i, "reward must be finite in float32", f"{reward}", REMEDY)
        return float(reward)

    def _flag(self, i: int, name: str, value: Any) -> bool:
        """Return an episode's end as a bool. Raise EnvFault if it is neither True nor False."""
        if value is True or value is False:
            return value
        array = np.asarray(value) if value is not None else None
        if array is None or array.size != 1 or array.dtype.kind not in "bui" or array.reshape(()) not in (0, 1):
            self._fault(i, f"{name} must be True or False", _got(value))
        return bool(array.reshape(()))

    def _check_numbers(self, terminated: np.ndarray) -> None:
        """Raise EnvFault for NaN and for indices outside their space; note other values outside.

        The value of a terminal state is 0 whatever its observation is, so numbers there need not be finite.
        With quarantine, an episode with numbers that are not finite is truncated.
        """
        if self.quarantine:
            self._truncate(~np.isfinite(self.arrays.reward))
        for k, (leaf, array) in enumerate(zip(self.layout.leaves, self.arrays.obs)):
            accepted = self.accepted[k]
            if accepted is None or ((accepted[0] <= array) & (array <= accepted[1])).all():
                continue
            if array.dtype.kind == "f":
                finite = np.isfinite(array)
                if not finite.all():
                    bad = ~finite.reshape(len(array), -1).all(1) & ~terminated
                    if self.quarantine:
                        self._truncate(bad)
                    elif bad.any():
                        i = int(np.argmax(bad))
                        self._fault(i, f"{leaf.name} must be finite", few(array[i]), REMEDY)
            if leaf.low is None or self.has_warned and not leaf.is_index:
                continue
            outside = (array < leaf.low) | (array > leaf.high)
            if not outside.any():
                continue
            i, *place = (int(k) for k in np.argwhere(outside)[0])
            bounds = [np.broadcast_to(bound, leaf.shape)[tuple(place)] for bound in (leaf.low, leaf.high)]
            which = f"{leaf.name}{place if place else ''}"
            declared, got = f"between {bounds[0]:g} and {bounds[1]:g}", f"{array[i][tuple(place)]:g}"
            if leaf.is_index:
                self._fault(i, f"{which} must be {declared}", got)
            self.has_warned = True
            self.accepted = [each.accepted(within_bounds=False) for each in self.layout.leaves]
            self.warning = (
                f"{self.env_id}: {which} is not {declared} as its space declares, got {got} in {self.where(i)}"
            )

    def _truncate(self, bad: np.ndarray) -> None:
        """Truncate the episodes of some environments [n]."""
        for i in np.flatnonzero(bad):
            self.arrays.truncated[i] = self.ended[i] = True

    def _failed(self, name: str, i: int, error: BaseException) -> NoReturn:
        """Raise the error of an environment again, with a note of its place."""
        if isinstance(error, KeyboardInterrupt):  # of the user
            raise error
        if isinstance(error, SystemExit):
            raise EnvFault(
                f"{self.env_id}: {name} must not end the program, got {error!r} in {self.where(i)}"
            ) from error
        place = f"{self.env_id}: {name} failed in {self.where(i)}"
        if not isinstance(error, Exception):
            interrupted = EnvInterrupted(why(error))
            blame(interrupted, place)
            raise interrupted from error
        blame(error, place)
        raise error

    def _fault(self, i: int, problem: str, got: str, remedy: str = "") -> NoReturn:
        raise EnvFault(f"{self.env_id}: {problem}, got {got} in {self.where(i)}{remedy}")


def _holds(dtype: np.dtype, array: np.ndarray) -> bool:
    """Return whether whole numbers fit into a dtype."""
    if dtype.kind == "b":
        return bool(((array == 0) | (array == 1)).all())
    limits = np.iinfo(dtype)
    return bool(((array >= limits.min) & (array <= limits.max)).all())


def _got(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) and value.shape else ""
    return f"{type(value).__name__}{shape}" if shape else f"{value!r}"[:80]
