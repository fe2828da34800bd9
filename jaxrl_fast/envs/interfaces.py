"""Recognize environments of other interfaces, to say in one line how they can be used."""

import inspect
import sys
from typing import Any

from jaxrl_fast.utils.importing import name_of

VECTOR = ", which steps several; use the class of one, num_envs makes several"
# By the package of a base class: what follows the name of an environment in a message.
OTHERS = {
    "pettingzoo": " of PettingZoo; write one for one of its agents, or in JAX a class with `players`",
    "gym": " of old gym; derive it from gymnasium.Env, or wrap it with the package shimmy",
    "dm_env": " of dm_env; wrap it with the package shimmy",
    "stable_baselines3": VECTOR,
}


def check(env_id: str, given: Any) -> None:
    """Raise ValueError for an object, or a class, that has the interface of another library."""
    cls = given if inspect.isclass(given) else type(given)
    if hasattr(cls, "step_env"):
        return
    bases = [(base.__module__.partition(".")[0], base.__name__) for base in cls.__mro__]
    found = [OTHERS[package] for package, _ in bases if package in OTHERS]
    if ("gymnasium", "VectorEnv") in bases:
        found = [VECTOR]
    elif not found and _has_methods_of_gymnasium(cls):
        found = [", which has only its methods; derive the class from gymnasium.Env"]
    if found:
        raise ValueError(f"env: must be a gymnasium.Env, got {env_id or name_of(given)}{found[0]}")


def check_function(env_id: str, given: Any) -> None:
    """Raise ValueError for a function whose annotation does not say that it returns a `gymnasium.Env`.

    Its name may come from a preset, which must not call any function.
    """
    if inspect.isfunction(given):
        found = given.__annotations__.get("return", "none")
        got = found if isinstance(found, str) else name_of(found)
        remedy = f"write def {given.__name__}(...) -> gymnasium.Env, or in Python fit(env={given.__name__})"
        raise ValueError(f"env: {env_id} must be annotated to return a gymnasium.Env, got {got}; {remedy}")


def is_of_old_gym(name: str) -> bool:
    """Return whether old gym, if it is imported, knows an id."""
    registry: Any = getattr(getattr(sys.modules.get("gym"), "envs", None), "registry", {})
    return name in getattr(registry, "env_specs", registry)


def _has_methods_of_gymnasium(cls: type) -> bool:
    """Return whether a class has `reset`, and a `step` of one action; gymnax's takes a key, a state and an action."""
    step, reset = (inspect.getattr_static(cls, name, None) for name in ("step", "reset"))
    if not inspect.isfunction(step) or not inspect.isfunction(reset):
        return False
    required = [p for p in inspect.signature(step).parameters.values() if p.default is p.empty]
    return len(required) == 2
