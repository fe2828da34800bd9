"""Step gymnasium environments one after another. Worker processes import this, so it avoids JAX.

The step after a terminated or truncated one resets the environment and ignores its action (gymnasium's NEXT_STEP).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from jaxrl_fast.envs import nested
from jaxrl_fast.envs.gymnasium import attributes, values
from jaxrl_fast.envs.gymnasium.copying import EnvState, Method, dump, load
from jaxrl_fast.envs.gymnasium.layout import Arrays, Recipe
from jaxrl_fast.envs.gymnasium.resetting import Episode, hint
from jaxrl_fast.envs.gymnasium.values import MAX_REWARD, Ranges, WrongValue
from jaxrl_fast.envs.schedules import values as values_of
from jaxrl_fast.utils.errors import EnvFault, EnvInterrupted, blame, why

STEP_RETURNS = "(obs, reward, terminated, truncated, info)"


class Stepper:
    """n environments in this process. Their rows are written into arrays."""

    def __init__(self, recipe: Recipe, seeds: Sequence[int], arrays: Arrays, first: int = 0) -> None:
        """Make the environments. `first` is the index of the first one among all of a pool, for messages."""
        self.env_id, make, self.layout, self.quarantine, self.schedules, self.num_total = recipe
        self.num_steps = 0  # of each environment, if options follow schedules
        self.chosen: Mapping[str, float] = {}  # values that replace their schedules
        self.options: Mapping[str, float] = {}  # the values that the environments have
        self.arrays, self.first = arrays, first
        self.warning = ""  # a sentence about the first observation outside its space
        self.ranges = Ranges(self.layout, self.quarantine)
        leaf, *others = self.layout.leaves
        is_plain = not others and not leaf.path and not self.layout.mask_size
        self.only_leaf = leaf if is_plain else None  # of observations that are one array
        self.seeds: list[int | None] = list(seeds)  # for the next reset; None: no new seed
        self.episodes: list[list[Episode]] = [[] for _ in seeds]  # that come first in each environment
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
            only_one = "; if only one can exist at a time, use num_envs 1" if self.first + i else ""
            blame(error, f"{self.env_id}: environment {self.first + i} could not be made{only_one}")
            raise

    def check_distinct(self, others: Collection[int] = ()) -> None:
        """Raise EnvFault if an environment is there twice, or its id is among those of `others`."""
        found = {id(env.unwrapped) for env in self.envs}
        if len(found) < len(self.envs) or not found.isdisjoint(others):
            raise EnvFault(f"{self.env_id}: must make a new environment in each call, got the same one twice")

    def reset(self) -> None:
        """Start an episode in every environment."""
        self._set_options()
        with np.errstate(over="ignore"):
            for i in range(len(self.envs)):
                self._begin(i)
            self.arrays.busy[:] = False
            self._check_numbers(np.zeros(len(self.envs), bool))

    def step(self) -> None:
        """Take a step in every environment with the actions in `arrays`, or reset it if its episode has ended."""
        if self.schedules:
            self._set_options()
            self.num_steps += 1
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite
            self._step()

    def _step(self) -> None:
        arrays, ended, one = self.arrays, self.ended, self.only_leaf
        actions, length, busy = arrays.action, arrays.length, arrays.busy
        tree = self.layout.action_tree
        is_array = tree is None and (actions.ndim > 1 or actions.dtype.kind == "f")
        rewards, terminations, truncations = ([0.0] * len(ended), [False] * len(ended), [False] * len(ended))
        rows, shape, dtype = arrays.obs[0], one and one.shape, one and one.dtype
        length += 1
        for i, (env, action) in enumerate(zip(self.envs, actions)):
            if ended[i]:
                self._begin(i)
                continue
            busy[i] = True
            if tree is not None:
                action = nested.split(tree, action)
            try:
                outcome = env.step(np.array(action) if is_array else action)  # an environment may keep or change it
            except BaseException as error:
                self._failed("step", i, error)
            try:
                if not isinstance(outcome, tuple) or len(outcome) != 5:
                    raise WrongValue(f"step must return {STEP_RETURNS}", values.got(outcome))
                obs, reward, terminated, truncated, info = outcome
                if terminated is not False:
                    terminations[i] = ended[i] = values.flag("terminated", terminated)
                if truncated is not False:
                    truncations[i] = values.flag("truncated", truncated)
                    ended[i] |= truncations[i]
                if type(obs) is np.ndarray and obs.dtype is dtype and obs.shape == shape:
                    rows[i] = obs
                else:
                    self._write(i, obs, info, terminations[i])
                is_plain = type(reward) is float and -MAX_REWARD <= reward <= MAX_REWARD
                rewards[i] = reward if is_plain else values.number(reward, self.quarantine)
            except WrongValue as wrong:
                self._fault(i, wrong)
        busy[:] = False
        arrays.reward[:], arrays.terminated[:], arrays.truncated[:] = rewards, terminations, truncations
        self._check_numbers(arrays.terminated)

    def reseed(self, seeds: Sequence[int]) -> None:
        """Give each environment a new seed for its next reset."""
        self.seeds = list(seeds)

    def set_episodes(self, episodes: Sequence[Episode], each: int) -> None:
        """Begin the next episodes as these say: `each` of an environment, one environment of the pool after another."""
        for i in range(len(self.envs)):
            self.episodes[i] = list(episodes[(self.first + i) * each :][:each])

    def set_options(self, chosen: Mapping[str, float], num_steps: int | None) -> None:
        """Set values that replace schedules, and the steps that each environment has made, unless None."""
        self.chosen = chosen
        self.num_steps = self.num_steps if num_steps is None else num_steps

    def _set_options(self) -> None:
        """Give the environments the values of the next step."""
        found = values_of(self.schedules, self.num_steps * self.num_total, self.chosen)
        if found == self.options:
            return
        for i, env in enumerate(self.envs):
            try:
                attributes.set_all(env, found)
            except Exception as error:  # a property may raise anything
                self._failed("setting an option", i, error)
        self.options = found

    def get_states(self, method: Method) -> list[EnvState]:
        """Return the state of each environment."""
        states: list[EnvState] = []
        for i, (env, seed) in enumerate(zip(self.envs, self.seeds, strict=True)):
            try:
                states.append(EnvState(b"" if seed is not None else dump(env, method), seed, self.num_steps))
            except Exception as error:
                blame(error, f"{self.env_id}: its state could not be saved in {self.where(i)}")
                raise
        return states

    def set_states(self, method: Method, states: Sequence[EnvState]) -> None:
        """Restore the result of `get_states`, after the arrays have been filled."""
        self.options = {}  # other environments may have others
        for i, (pickled, seed, self.num_steps) in enumerate(states):
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
        try:
            return values.image(image)
        except WrongValue as wrong:
            self._fault(0, wrong)

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
        arrays, episode = self.arrays, Episode(self.seeds[i])
        if self.episodes[i]:
            episode = self.episodes[i].pop(0)
        arrays.episode[i] += 1
        arrays.length[i] = 0
        arrays.busy[i] = True
        try:
            outcome = episode.begin(self.envs[i])
            attributes.set_all(self.envs[i], self.options)  # a reset may have overwritten them
        except BaseException as error:
            self._failed("reset", i, error)
        try:
            if not isinstance(outcome, tuple) or len(outcome) != 2:
                raise WrongValue("reset must return (obs, info)", values.got(outcome))
            self._write(i, *outcome)
        except WrongValue as wrong:
            self._fault(i, wrong)
        self.seeds[i], self.ended[i] = None, False
        arrays.reward[i], arrays.terminated[i], arrays.truncated[i] = 0.0, False, False

    def _write(self, i: int, obs: Any, info: Any, terminated: bool = False) -> None:
        """Copy an observation and the action mask into the arrays. A terminal state needs no mask."""
        for leaf, array in zip(self.layout.leaves, self.arrays.obs):
            array[i] = values.part(leaf, obs)
        if self.layout.mask_size:
            self.arrays.mask[i] = values.action_mask(info, self.layout.mask_size, terminated)

    def _check_numbers(self, terminated: np.ndarray) -> None:
        """Raise EnvFault for numbers that are not allowed. With quarantine, truncate the episodes that have them."""
        before = self.ranges.outside
        try:
            bad = self.ranges.check(self.arrays, terminated)
        except WrongValue as wrong:
            self._fault(wrong.row, wrong)
        if self.quarantine:
            for i in np.flatnonzero(bad):
                self.arrays.truncated[i] = self.ended[i] = True
        if (outside := self.ranges.outside) is not before and outside is not None:
            self.warning = self._text(outside.row, outside)

    def _failed(self, name: str, i: int, error: BaseException) -> NoReturn:
        """Raise the error of an environment again, with a note of its place."""
        if isinstance(error, KeyboardInterrupt):  # of the user
            raise error
        if isinstance(error, SystemExit):
            raise EnvFault(
                f"{self.env_id}: {name} must not end the program, got {error!r} in {self.where(i)}"
            ) from error
        place = f"{self.env_id}: {name} failed in {self.where(i)}{hint(error) if name == 'reset' else ''}"
        if not isinstance(error, Exception):
            interrupted = EnvInterrupted(why(error))
            blame(interrupted, place)
            raise interrupted from error
        blame(error, place)
        raise error

    def _fault(self, i: int, wrong: WrongValue) -> NoReturn:
        raise EnvFault(self._text(i, wrong)) from None

    def _text(self, i: int, wrong: WrongValue) -> str:
        return f"{self.env_id}: {wrong.problem}, got {wrong.got} in {self.where(i)}{wrong.remedy}"
