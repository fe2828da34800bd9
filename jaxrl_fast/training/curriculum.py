"""Track the scheduled options of a run's environments, and the values that callbacks choose for them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_fast.envs import schedules
from jaxrl_fast.envs.gymnax.scheduled import Options
from jaxrl_fast.loop import TrainState
from jaxrl_fast.parallel import arrays
from jaxrl_fast.types import Env, PyTree
from jaxrl_fast.utils.parsing import as_schedule
from jaxrl_fast.utils.random import key_of_seed

SAVED = "env_options"  # the name in the state that a checkpoint keeps of the host


class Curriculum:
    """The scheduled options of a run. A value that a callback has chosen replaces a schedule until another one does."""

    def __init__(self, env: Env, env_options: Mapping[str, Any], rollout_length: int, steps_per_update: int) -> None:
        is_used = any(map(as_schedule, env_options.values()))
        self.schedules = _schedules_of(env) if is_used else {}
        self.host, self.rollout_length, self.steps_per_update = env.host, rollout_length, steps_per_update
        self.chosen: dict[str, float] = {}
        self.pending: list[tuple[int, dict[str, float]]] = []  # chosen values, from an update on

    @property
    def next_change(self) -> int | None:
        """Return the update at which the next chosen value takes effect."""
        return min((at for at, _ in self.pending), default=None)

    def values(self, env_steps: int) -> dict[str, float]:
        """Return the value of each option in the next step of a run that has made this number of steps."""
        return schedules.values(self.schedules, env_steps, self.chosen)

    def metrics(self, env_steps: int) -> dict[str, float]:
        """Return the values for a record."""
        return {schedules.METRIC + name: value for name, value in self.values(env_steps).items()}

    def choose(self, values: Mapping[str, float], at: int) -> None:
        """Replace schedules by these values from update `at` on."""
        if values:
            self.pending.append((at, dict(values)))

    def apply(self, state: TrainState, finished: int) -> TrainState:
        """Return the state with the chosen values that are due after `finished` updates. No program may be running."""
        due = [values for at, values in self.pending if at <= finished]
        if not due:
            return state
        self.pending = [(at, values) for at, values in self.pending if at > finished]
        for values in due:
            self.chosen |= values
        if self.host:
            self.host.set_options(self.chosen, None)
            return state
        return state._replace(actors=jax.tree.map(self._changed, state.actors, is_leaf=_is_options))

    def _changed(self, x: Any) -> Any:
        if not _is_options(x):
            return x
        chosen = np.array([self.chosen.get(name, 0.0) for name, _ in x.schedules], np.float32)
        is_chosen = np.array([name in self.chosen for name, _ in x.schedules])
        put = lambda row, like: arrays.put(np.broadcast_to(row, like.shape), like.sharding)
        return dataclasses.replace(x, chosen=put(chosen, x.chosen), is_chosen=put(is_chosen, x.is_chosen))

    def restart_envs(self, finished: int) -> None:
        """Let host environments that are about to restart continue their schedules after `finished` updates."""
        if self.schedules and self.host:
            self.host.set_options(self.chosen, finished * self.rollout_length)

    def continue_envs(self) -> None:
        """Give the chosen values to host environments that continue from a checkpoint."""
        if self.schedules and self.host:
            self.host.set_options(self.chosen, None)

    def end(self) -> None:
        """Give the last values to host environments of the training, in which the evaluation at the end takes place."""
        if self.schedules and self.host:
            self.host.set_options({name: each.last for name, each in self.schedules.items()}, None)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values."""
        return {SAVED: {"chosen": self.chosen, "pending": self.pending}} if self.schedules else {}

    def restore(self, host_state: Mapping[str, Any]) -> None:
        """Restore what `saved` returned."""
        kept = host_state.get(SAVED, {"chosen": {}, "pending": []})
        self.chosen, self.pending = dict(kept["chosen"]), [(at, dict(values)) for at, values in kept["pending"]]


def _schedules_of(env: Env) -> dict[str, schedules.Schedule]:
    """Return the schedules that an environment follows."""
    if env.host:
        return dict(env.host.schedules)
    state: PyTree = jax.eval_shape(env.reset, key_of_seed(0))[0]
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_options) if _is_options(x)]
    return dict(found[0].schedules) if found else {}


def _is_options(x: Any) -> bool:
    return isinstance(x, Options)
