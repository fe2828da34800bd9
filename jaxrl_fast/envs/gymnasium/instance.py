"""Compare an environment that a user has made with a new one, which training and evaluation will use instead.

At most one new environment exists at a time: of a simulator with one license, not even a second one can be made.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import gymnasium
import numpy as np

from jaxrl_fast.utils.importing import name_of
from jaxrl_fast.utils.parsing import one_line
from jaxrl_fast.utils.warnings import warn

PLAY_S, MIN_STEPS, NUM_EPISODES = 0.2, 3, 2  # to find out which attributes an episode changes
RECORDED = "_saved_kwargs"  # gymnasium's record of how a wrapper was made
VALUES: tuple[Any, ...] = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic, gymnasium.Space)
PLAIN: tuple[Any, ...] = (*VALUES, list, tuple, Mapping)


def check_same(given: Any, make: Callable[[], Any]) -> None:
    """Raise ValueError if an attribute or a wrapper of `given` is not that of an environment that `make` returns.

    Only plain values are compared: numbers, text, arrays, spaces, and lists and mappings of them. Attributes that a
    reset, a step or closing changes are those of an episode, and are not compared. Nor are those that differ between
    two new environments. `given` is closed if no other one can be made before.
    """
    own = [_copied(vars(layer)) for layer in _layers(given)]
    fresh = _made(given, make)
    names = [" in ".join(name_of(type(layer)) for layer in _layers(env)) for env in (given, fresh)]
    if names[0] != names[1]:
        fresh.close()
        _refuse(given, f"is {names[0]}", names[1])
    new = [_copied(vars(layer)) for layer in _layers(fresh)]
    all_changed = _changed(fresh, new)
    with contextlib.closing(make()) as other:
        _note(all_changed, other, new)
    for old, now, changed in zip(own, new, all_changed, strict=True):
        for name in {**old, **now}.keys() - changed - {RECORDED}:
            value, other = old.get(name, _MISSING), now.get(name, _MISSING)
            if not _same(value, other):
                _refuse(given, f"has {name} {_shown(value)}", _shown(other))


def _made(given: Any, make: Callable[[], Any]) -> Any:
    """Return a new environment; close the given one if that is needed."""
    try:
        return make()
    except ValueError as error:
        given.close()
        fresh = make()  # raises an error that has another cause
        warn(f"env: the given {given.spec.id} was closed, because another one could not be made before ({error})")
        return fresh


def _copied(value: Any) -> Any:
    """Return a value with copies of arrays, lists and mappings, which an environment may change."""
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(part) for part in value]
    return value.copy() if isinstance(value, np.ndarray) else value


_MISSING = object()


def _changed(env: Any, first: list[dict[str, Any]]) -> list[set[str]]:
    """Play an environment for a moment, then close it. Return the attributes of each layer that were not as `first`."""
    found: list[set[str]] = [set() for _ in _layers(env)]
    until, num_steps, num_episodes = time.perf_counter() + PLAY_S, 0, 0
    env.action_space.seed(0)
    env.reset(seed=0)
    while num_steps < MIN_STEPS or num_episodes < NUM_EPISODES and time.perf_counter() < until:
        _note(found, env, first)
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        num_steps += 1
        _note(found, env, first)
        if terminated or truncated:
            env.reset()
            num_episodes += 1
    env.close()
    _note(found, env, first)
    return found


def _note(found: list[set[str]], env: Any, first: list[dict[str, Any]]) -> None:
    """Add the attributes of each layer that are not as `first`."""
    for names, own, before in zip(found, _layers(env), first, strict=True):
        names |= {name for name, value in vars(own).items() if not _same(value, before.get(name, _MISSING))}


def _layers(env: Any) -> Iterator[Any]:
    """Yield an environment and all that it wraps, the outermost first, without gymnasium's check of types."""
    while env is not None:
        if not isinstance(env, gymnasium.wrappers.PassiveEnvChecker):
            yield env
        env = vars(env).get("env")


def _same(one: Any, other: Any) -> bool:
    """Return whether two attributes are equal, as far as they are plain values; other objects count as equal."""
    if not isinstance(one, PLAIN) or not isinstance(other, PLAIN):
        return (
            one is not _MISSING and other is not _MISSING or not isinstance(one, PLAIN) and not isinstance(other, PLAIN)
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.shape(one) == np.shape(other) and np.array_equal(one, other)
    return bool(one == other or one != one and other != other)  # NaN


def _shown(value: Any) -> str:
    return "nothing" if value is _MISSING else one_line(repr(value))[:60]


def _refuse(env: Any, problem: str, new: str) -> NoReturn:
    remedy = "set it in a function that makes the environment: fit(env=make_env)"
    raise ValueError(f"env: the given {env.spec.id} {problem}, where a new one has {new}; {remedy}")
