"""Compare an environment that a user has made with a new one, which training and evaluation will use instead."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import gymnasium
import numpy as np

from jaxrl_fast.utils.importing import name_of
from jaxrl_fast.utils.parsing import one_line

PLAY_S, MIN_STEPS, NUM_EPISODES = 0.2, 3, 2  # to find out which attributes an episode changes
RECORDED = "_saved_kwargs"  # gymnasium's record of how a wrapper was made
VALUES: tuple[Any, ...] = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic, gymnasium.Space)
PLAIN: tuple[Any, ...] = (*VALUES, list, tuple, Mapping)


def check_same(given: Any, make: Callable[[], Any]) -> None:
    """Raise ValueError if an attribute or a wrapper of `given` is not that of an environment that `make` returns.

    Only plain values are compared: numbers, text, arrays, spaces, and lists and mappings of them. Attributes that a
    reset, a step or closing changes are those of an episode, and are not compared.
    """
    with contextlib.closing(make()) as fresh:
        names = [" in ".join(name_of(type(layer)) for layer in _layers(env)) for env in (given, fresh)]
        if names[0] != names[1]:
            _refuse(given, f"is {names[0]}", names[1])
        for own, new, changed in zip(_layers(given), _layers(fresh), _changed(make(), fresh), strict=True):
            for name in {**vars(own), **vars(new)}.keys() - changed - {RECORDED}:
                value, other = vars(own).get(name, _MISSING), vars(new).get(name, _MISSING)
                if not _same(value, other):
                    _refuse(given, f"has {name} {_shown(value)}", _shown(other))


_MISSING = object()


def _changed(env: Any, fresh: Any) -> list[set[str]]:
    """Play an environment for a moment, then close it. Return the attributes of each layer that have differed."""
    found: list[set[str]] = [set() for _ in _layers(env)]

    def note() -> None:
        for names, own, new in zip(found, _layers(env), _layers(fresh), strict=True):
            names |= {name for name, value in vars(own).items() if not _same(value, vars(new).get(name, _MISSING))}

    until, num_steps, num_episodes = time.perf_counter() + PLAY_S, 0, 0
    env.action_space.seed(0)
    env.reset(seed=0)
    while num_steps < MIN_STEPS or num_episodes < NUM_EPISODES and time.perf_counter() < until:
        note()
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        num_steps += 1
        note()
        if terminated or truncated:
            env.reset()
            num_episodes += 1
    env.close()
    note()
    return found


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
