"""Copy the state of a gymnasium environment, so that a resumed run continues its episodes.

If an environment has `get_state` and `set_state`, these copy its state, and the plain values of its wrappers are kept
next to it. All other environments are pickled. `choose_method` tests whether a copy takes the same steps. JAX is not
imported.
"""

import copy
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from jaxrl_fast.envs.gymnasium import masks
from jaxrl_fast.envs.gymnasium.layout import Arrays
from jaxrl_fast.utils.errors import why

Method = Literal["own", "pickle"]
MAX_BYTES = 2**24  # of one environment; a larger one would make each checkpoint slow
TRIAL_STEPS, MIN_STEPS, TRIAL_S = 20, 3, 0.2  # a trial has 3 to 20 steps between two resets, for about this long
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic, np.random.Generator)


class EnvState(NamedTuple):
    """The state of one environment between two steps."""

    pickled: bytes  # b"": it has not begun an episode since it got the seed
    seed: int | None  # of its next reset; None: no new one
    num_steps: int = 0  # so far, which schedules of its options follow


def pack(arrays: Arrays, states: Sequence[EnvState]) -> dict[str, np.ndarray]:
    """Return the state of a pool as arrays by name."""
    found = {f"env/{i}": np.frombuffer(state.pickled, np.uint8) for i, state in enumerate(states)}
    found |= {f"row/{i}": x.copy() for i, x in enumerate((*arrays.obs, *arrays[1:]))}
    found["seeds"] = np.array([-1 if state.seed is None else state.seed for state in states])
    if any(state.num_steps for state in states):
        found["steps"] = np.array([state.num_steps for state in states])
    return {name: x for name, x in found.items() if x.size}


def unpack(arrays: Arrays, packed: Mapping[str, np.ndarray]) -> list[EnvState]:
    """Return the states that `pack` has packed, and fill the arrays."""
    for i, x in enumerate((*arrays.obs, *arrays[1:])):
        x[...] = packed.get(f"row/{i}", x)
    pickled = [packed[f"env/{i}"].tobytes() if f"env/{i}" in packed else b"" for i in range(len(arrays.reward))]
    seeds = [None if seed < 0 else seed for seed in packed["seeds"].tolist()]
    steps = packed["steps"].tolist() if "steps" in packed else [0] * len(seeds)
    return [EnvState(*state) for state in zip(pickled, seeds, steps, strict=True)]


def dump(env: Any, method: Method) -> bytes:
    """Return the state of an environment and of its wrappers. Exceptions of the environment pass through."""
    import cloudpickle  # for classes of a notebook or a script

    if method == "pickle":
        return cloudpickle.dumps(env)
    base = env.unwrapped
    return cloudpickle.dumps((base.get_state(), base._np_random, [_plain_values(layer) for layer in _wrappers(env)]))


def load(env: Any, method: Method, state: bytes) -> Any:
    """Return an environment in this state: the given one, or a copy that replaces it. Unpickling may execute code."""
    if method == "pickle":
        return pickle.loads(state)
    own, generator, layers = pickle.loads(state)
    env.reset()  # creates attributes that `set_state` expects
    base = env.unwrapped
    base.set_state(own)
    base._np_random = generator
    for layer, values in zip(_wrappers(env), layers, strict=True):
        vars(layer).update(values)
    return env


def choose_method(make: Callable[[], Any]) -> tuple[Method, str]:
    """Return the method of copying an environment, and how its copies differ ("" if they do not).

    A new environment is copied in the middle of an episode. Both must then return equal steps, also after a reset. They
    step in turn, so that shared state, such as a module's random numbers, makes them differ. If `get_state` leaves out
    an attribute, which a later step may read, pickling is tried first. No copy is tried if no further one can be made.
    """
    try:
        return _choose_method(make)
    except Exception as error:  # environments may raise anything
        return "pickle", f"another one could not be made to try a copy ({why(error)})"


def _choose_method(make: Callable[[], Any]) -> tuple[Method, str]:
    env = make()
    has_own_state = _has_own_state(env)
    reason = _difference(env, make, "own", whole=True) if has_own_state else _difference(env, make, "pickle")
    if has_own_state and reason:
        if not _difference(make(), make, "pickle"):
            return "pickle", ""
        reason = _difference(make(), make, "own")
    return "own" if has_own_state else "pickle", reason


def _difference(env: Any, make: Callable[[], Any], method: Method, whole: bool = False) -> str:
    """Return how a copy of a new environment differs from it, or "". `whole`: also in an attribute. Close both."""
    envs = [env]
    try:
        return _try(envs, make, method, whole)
    except Exception as error:  # environments may raise anything
        return f"copying it failed with {why(error)}"
    finally:
        for each in envs:
            _close(each)


def _try(envs: list[Any], make: Callable[[], Any], method: Method, whole: bool) -> str:
    """Append a copy of the only environment, and step both. Return the difference, or ""."""
    (env,) = envs
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    obs, info = env.reset(seed=0)
    for t in range(TRIAL_STEPS):  # up to the middle of an episode, unless each is one step long
        obs, _, terminated, truncated, info = env.step(masks.sample(space, masks.of(obs, info)))
        if terminated or truncated:
            obs, info = env.reset()
        elif t + 1 >= MIN_STEPS:
            break
    state = dump(env, method)
    if len(state) > MAX_BYTES:
        return f"its state has {len(state)} bytes, more than {MAX_BYTES}"
    envs.append(load(make() if method == "own" else None, method, state))
    if whole and (names := _different_attributes(*(one.unwrapped for one in envs))):
        return f"get_state leaves out {', '.join(names)}"
    for _ in range(2):
        until = time.perf_counter() + TRIAL_S
        for t in range(TRIAL_STEPS):
            action = masks.sample(space, masks.of(obs, info))
            (*results, info), (*others, _) = (one.step(copy.deepcopy(action)) for one in envs)
            if not _equal(results, others):
                return f"a copy of it returned another step than it did, {t + 1} steps later"
            obs = results[0]
            if results[2] or results[3] or t >= MIN_STEPS and time.perf_counter() > until:
                break
        (obs, info), (other, _) = (one.reset() for one in envs)
        if not _equal(obs, other):
            return "a copy of it began another episode than it did"
    return ""


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(data_equivalence(one, other, exact=True))


def _different_attributes(one: Any, other: Any) -> list[str]:
    """Return the names of plain attributes that differ, except the seed, which only a reset reads."""
    values, others = ({name: pickle.dumps(x) for name, x in _plain_values(each).items()} for each in (one, other))
    differing = {name for name in values.keys() | others.keys() if values.get(name) != others.get(name)}
    return sorted(differing - {"_np_random_seed"})


def _has_own_state(env: Any) -> bool:
    return all(callable(getattr(env.unwrapped, name, None)) for name in ("get_state", "set_state"))


def _wrappers(env: Any) -> list[Any]:
    """Return the wrappers around an environment, the outermost first."""
    found = []
    while isinstance(env, gymnasium.Wrapper):
        found.append(env)
        env = env.env
    return found


def _plain_values(layer: Any) -> dict[str, Any]:
    """Return the attributes of a wrapper that are numbers, text, arrays, generators, or collections of them."""
    return {name: value for name, value in vars(layer).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set, deque):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return isinstance(value, PLAIN)


def _close(env: Any) -> None:
    try:
        env.close()
    except Exception:  # environments may raise anything: a copy may have closed a shared resource
        return
