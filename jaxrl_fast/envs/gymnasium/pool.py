"""Step gymnasium environments for a compiled program: in this process, in worker processes, or in Ray actors.

Trajectories do not depend on the number of workers, because each environment has its own seed.
"""

import contextlib
import itertools
import pickle
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from jaxrl_fast.envs.gymnasium import process, worker
from jaxrl_fast.envs.gymnasium.copying import Method, pack, unpack
from jaxrl_fast.envs.gymnasium.layout import Arrays, Layout, Recipe, SharedMemory, allocate, build, num_bytes
from jaxrl_fast.envs.gymnasium.process import Worker
from jaxrl_fast.envs.gymnasium.resetting import Episode
from jaxrl_fast.envs.gymnasium.stepping import Stepper
from jaxrl_fast.envs.host.pool import Row
from jaxrl_fast.types import PyTree
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.errors import EnvFault, WorkerTraceback, blame, why
from jaxrl_fast.utils.threads import OneThread

IN_USE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # environments of open local pools


def rows_of(layout: Layout, arrays: Arrays) -> PyTree:
    """Return raw observations [n, ...], with the action mask next to them where there is one."""
    obs = build(layout.tree, arrays.obs)
    return {"obs": obs, "action_mask": arrays.mask} if layout.mask_size else obs


def row_of(layout: Layout, arrays: Arrays) -> Row:
    """Return the row that is in the arrays."""
    return Row(rows_of(layout, arrays), arrays.reward, arrays.terminated, arrays.truncated)


class LocalPool:
    """n environments in one thread, as `host_pool.HostPool`: a compiled program calls from threads that change."""

    def __init__(
        self,
        recipe: Recipe,
        seeds: Sequence[int],
        copy_method: Callable[[], Method] = lambda: "pickle",
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.layout, self.arrays = recipe.layout, allocate(recipe.layout, len(seeds))
        self.copy_method, self.warn, self.pending = copy_method, warn, False
        self.thread = OneThread("environments")
        try:
            self.stepper = self.thread.call(Stepper, recipe, seeds, self.arrays)
            self.stepper.check_distinct(set(IN_USE))
        except BaseException:
            self.thread.close()
            raise
        IN_USE.update({id(env.unwrapped): env.unwrapped for env in self.stepper.envs})

    def reset(self) -> PyTree:
        """Start n episodes."""
        self.pending = False
        self.thread.call(self.stepper.reset)
        self._warn()
        return rows_of(self.layout, self.arrays)

    def send(self, action: np.ndarray) -> None:
        """Keep the actions of the next step."""
        self.arrays.action[...] = action.reshape(self.arrays.action.shape)
        self.start()

    def recv(self) -> Row:
        """Take the step."""
        self.finish()
        return self.row()

    def start(self) -> None:
        """Mark the actions in `arrays` as pending; `finish` takes the step."""
        self.pending = True

    def finish(self) -> None:
        """Take the step, unless it has been taken."""
        if self.pending:
            self.pending = False
            self.thread.call(self.stepper.step)
            self._warn()

    def row(self) -> Row:
        """Return the arrays of the last row."""
        return row_of(self.layout, self.arrays)

    def reseed(self, seeds: Sequence[int]) -> None:
        """Give each environment a new seed."""
        self.stepper.reseed(seeds)

    def set_episodes(self, episodes: Sequence[Episode], each: int) -> None:
        """Begin the next episodes as these say, `each` of an environment."""
        self.thread.call(self.stepper.set_episodes, episodes, each)

    def set_options(self, chosen: Mapping[str, float], num_steps: int | None) -> None:
        """Take a pending step, then set what the schedules of options follow."""
        self.finish()
        self.stepper.set_options(chosen, num_steps)

    def get_state(self) -> dict[str, np.ndarray]:
        """Take a pending step, and return the state of all environments."""
        self.finish()
        return pack(self.arrays, self.thread.call(self.stepper.get_states, self.copy_method()))

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a state."""
        self.pending = False
        self.thread.call(self.stepper.set_states, self.copy_method(), unpack(self.arrays, state))

    def render(self) -> np.ndarray:
        """Return the first environment's image."""
        return self.thread.call(self.stepper.render)

    def close(self) -> None:
        """Close the environments."""
        for env in self.stepper.envs:
            IN_USE.pop(id(env.unwrapped), None)
        with contextlib.closing(self.thread):
            self.thread.call(self.stepper.close)

    def _warn(self) -> None:
        if self.stepper.warning:
            self.warn(self.stepper.warning)
            self.stepper.warning = ""


class WorkerPool:
    """n environments in several processes or Ray actors, as `host_pool.HostPool`."""

    def __init__(
        self,
        recipe: Recipe,
        seeds: Sequence[int],
        copy_method: Callable[[], Method] = lambda: "pickle",
        warn: Callable[[str], None] = warnings.warn,
        *,
        num_workers: int,
        timeout_s: float,
        start: Callable[[SharedMemory, Layout, worker.Setup], Any] = Worker,
    ) -> None:
        """Start the workers with `start`, as `process.Worker` is one, and wait until their environments are made.

        Raises:
            ValueError: If the recipe cannot be sent to another process.
        """
        import cloudpickle

        self.env_id, layout = recipe.env_id, recipe.layout
        try:
            pickled = cloudpickle.dumps(recipe)
        except Exception as error:  # pickling may raise anything
            problem = f"{self.env_id} cannot be sent to another process ({why(error)})"
            raise ValueError(f"host.workers: {problem}, got {num_workers}; use 0") from error
        self.layout, self.timeout_s = layout, timeout_s or None
        self.copy_method, self.warn = copy_method, warn
        self.num_pending = 0  # workers whose step has not been waited for
        self.memory = SharedMemory(num_bytes(layout, len(seeds)))
        self.arrays = self.memory.arrays(layout, len(seeds))
        bounds = np.linspace(0, len(seeds), num_workers + 1).astype(int).tolist()
        self.workers: list[Any] = []
        try:
            for first, last in itertools.pairwise(bounds):
                setup = worker.Setup(pickled, list(seeds[first:last]), len(seeds), first)
                self.workers.append(start(self.memory, layout, setup))
            self._wait(None)  # making an environment may take long
        except BaseException:
            self.close()
            raise

    def reset(self) -> PyTree:
        """Discard a pending step, and start n episodes."""
        self.finish()
        for one in self.workers:
            one.call("reset")
        self._wait(self.timeout_s)
        return rows_of(self.layout, self.arrays)

    def send(self, action: np.ndarray) -> None:
        """Start a step."""
        self.arrays.action[...] = action.reshape(self.arrays.action.shape)
        self.start()

    def recv(self) -> Row:
        """Wait for the step."""
        self.finish()
        return self.row()

    def start(self) -> None:
        """Start a step with the actions in `arrays`."""
        for one in self.workers:
            one.step()
        self.num_pending = len(self.workers)

    def finish(self) -> None:
        """Wait for a pending step, if there is one."""
        if self.num_pending:
            self.num_pending = 0
            self._wait(self.timeout_s)

    def waits_for(self) -> list[Any]:
        """Return the sockets that become readable when a pending step is done; [] if there is none."""
        return [one.channel for one in self.workers] if self.num_pending else []

    def row(self) -> Row:
        """Return the arrays of the last row."""
        return row_of(self.layout, self.arrays)

    def reseed(self, seeds: Sequence[int]) -> None:
        """Discard a pending step, and give each environment a new seed."""
        self.finish()
        for one in self.workers:
            one.call("reseed", list(seeds[one.first : one.last]))
        self._wait(self.timeout_s)

    def set_episodes(self, episodes: Sequence[Episode], each: int) -> None:
        """Begin the next episodes as these say, `each` of an environment."""
        for one in self.workers:
            one.call("set_episodes", episodes, each)
        self._wait(self.timeout_s)

    def set_options(self, chosen: Mapping[str, float], num_steps: int | None) -> None:
        """Wait for a pending step, then set what the schedules of options follow."""
        self.finish()
        for one in self.workers:
            one.call("set_options", dict(chosen), num_steps)
        self._wait(self.timeout_s)

    def get_state(self) -> dict[str, np.ndarray]:
        """Wait for a pending step, and return the state of all environments."""
        self.finish()
        for one in self.workers:
            one.call("get_states", self.copy_method())
        return pack(self.arrays, [state for of_worker in self._answers() for state in of_worker])

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a state."""
        self.finish()
        states = unpack(self.arrays, state)
        for one in self.workers:
            one.call("set_states", self.copy_method(), states[one.first : one.last])
        self._answers()

    def render(self) -> np.ndarray:
        """Return the first environment's image."""
        self.finish()
        self.workers[0].call("render")
        image: np.ndarray = self._answer(self.workers[0], self.timeout_s)
        return image

    def close(self) -> None:
        """Let the workers close their environments, and end them."""
        for one in self.workers:
            one.hang_up()
        until = time.monotonic() + process.CLOSE_S  # they close at the same time
        for one in self.workers:
            one.end(until - time.monotonic())
        self.workers = []
        self.memory.close()

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for an answer of every worker. Warn of an observation outside its space."""
        for one in self.workers:
            warning = self._answer(one, timeout_s)
            if warning:
                self.warn(warning)

    def _answers(self) -> list[Any]:
        """Return the answers of all workers. If some failed, raise the first exception after reading all answers.

        A run continues without a state that cannot be saved or restored.
        """
        found, failed = [], None
        for one in self.workers:
            try:
                found.append(self._answer(one, self.timeout_s))
            except EnvFault:  # the process has ended, and so will the run
                raise
            except Exception as error:  # environments may raise anything
                failed = failed or error
        if failed is not None:
            raise failed
        return found

    def _answer(self, one: Any, timeout_s: float | None) -> Any:
        """Return a worker's answer. Raise the exception of its environment, if any."""
        try:
            kind, value = one.receive(timeout_s)
        except TimeoutError:
            one.kill()
            problem = f"no answer of a {one.kind} within {timeout_s:g} s{one.place(self.arrays)}"
            raise EnvFault(f"{self.env_id}: {problem}; raise host.timeout if a step takes longer") from None
        if kind == worker.FAILED:
            _raise(*value)
        if kind == b"":
            raise EnvFault(f"{self.env_id}: the {one.name} ended{one.status()}{one.place(self.arrays)}")
        return value


def _raise(pickled: bytes | None, text: str, shown: str, place: str | None) -> NoReturn:
    """Raise the exception of a worker: of the same type if possible, with the traceback as text."""
    error: BaseException = RuntimeError(text) if pickled is None else pickle.loads(pickled)
    if place is not None:
        blame(error, place)
    raise error from WorkerTraceback(shown)
