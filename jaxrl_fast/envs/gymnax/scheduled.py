"""Change parameters of N environments on the device while they are trained, as their schedules say.

All environments step together, so that the number of steps so far decides the values. It is a part of their state.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_fast.envs.gymnax.single import Single
from jaxrl_fast.envs.schedules import Schedule, as_default, is_number, read
from jaxrl_fast.envs.wrappers import ranges as drawn
from jaxrl_fast.types import Array
from jaxrl_fast.utils.parsing import as_schedule

MAX_STEPS = 2**31 - 1  # of an environment, that are counted
Values = dict[str, Array]  # of parameters by name, int32 or f32: [], or [N] of environments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """The scheduled parameters of N environments."""

    num_steps: Array  # int32 []: of each environment so far, at most MAX_STEPS
    chosen: Array  # f32 [K]: values that replace the schedules, where
    is_chosen: Array  # bool [K] is True
    schedules: tuple[tuple[str, Schedule], ...] = dataclasses.field(metadata={"static": True})  # K by name
    num_envs: int = dataclasses.field(metadata={"static": True})  # over which environment steps are summed


def take(env_id: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Schedule]:
    """Return the schedules among the options of an environment with these parameters. Raise ValueError for a wrong one.

    Unknown parameters are left to others.
    """
    found = {}
    for name, value in options.items():
        if not as_schedule(value) or name not in defaults or isinstance(defaults[name], str):
            continue
        if not is_number(defaults[name]):
            raise ValueError(f"{name}: must be one value for {env_id}, got {value}; only numbers follow a schedule")
        found[name] = read(name, value, as_default(defaults[name]))
    return found


def last_values(schedules: Mapping[str, Schedule]) -> Values:
    """Return the last value of each parameter, []."""
    return {name: jnp.asarray(each.last, _dtype(each)) for name, each in schedules.items()}


def ranges(schedules: Mapping[str, Schedule]) -> dict[str, drawn.Range]:
    """Return the ranges of all values, to trace an environment whose parameters are not constants."""
    return {
        name: drawn.Range(min(each.points), max(each.points), (), each.is_whole) for name, each in schedules.items()
    }


def init(schedules: tuple[tuple[str, Schedule], ...], num_envs: int) -> Options | None:
    """Return the parameters before the first step; None without schedules."""
    if not schedules:
        return None
    none = jnp.zeros(len(schedules), jnp.float32)
    return Options(jnp.int32(0), none, none > 0, schedules, num_envs)


def values(options: Options | None) -> Values:
    """Return the current value of each parameter, []."""
    if options is None:
        return {}
    found = {}
    for i, (name, each) in enumerate(options.schedules):
        value = jnp.where(options.is_chosen[i], options.chosen[i], _at(each, options.num_envs, options.num_steps))
        found[name] = (jnp.round(value) if each.is_whole else value).astype(_dtype(each))
    return found


def advance(options: Options | None) -> Options | None:
    """Return the parameters after a step."""
    if options is None:
        return None
    return dataclasses.replace(options, num_steps=jnp.minimum(options.num_steps, MAX_STEPS - 1) + 1)


def with_values(single: Single, found: Values) -> Single:
    """Return the environment with these parameters."""
    return single._replace(params=drawn.replace(single.params, found)) if found else single


def _at(each: Schedule, num_envs: int, num_steps: Array) -> Array:
    """Return a schedule's value after this number of steps of each environment, f32 []."""
    points = jnp.asarray(each.points, jnp.float32)
    if not each.num_steps or len(points) == 1:
        return points[0]
    knots, steps = jnp.asarray(each.knots(num_envs), jnp.float32), num_steps.astype(jnp.float32)
    return jnp.where(steps >= knots[-1], points[-1], jnp.interp(steps, knots, points))


def _dtype(each: Schedule) -> Any:
    return jnp.int32 if each.is_whole else jnp.float32
