"""Make N environments from a class, a factory or an instance with gymnax's interface, and from its options."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_fast.envs.construct import OFFERED, arguments, call, is_factory
from jaxrl_fast.envs.gymnax import scheduled
from jaxrl_fast.envs.gymnax.batch import batch
from jaxrl_fast.envs.gymnax.single import Single
from jaxrl_fast.envs.gymnax.tracing import action_of, traced
from jaxrl_fast.envs.schedules import Schedule
from jaxrl_fast.envs.wrappers import frame_skip
from jaxrl_fast.envs.wrappers import ranges as drawn
from jaxrl_fast.types import Env
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.arguments import coerce, refuse_option
from jaxrl_fast.utils.errors import place, why
from jaxrl_fast.utils.parsing import as_annotated

REQUIRED_ATTRIBUTES = ("default_params", "reset_env", "step_env", "is_truncated", "action_space")
UNSUPPORTED = {"MNISTBandit-bsuite": "it downloads its images from the internet when it is made"}


def adapt(
    source: Any,
    num_envs: int,
    options: Mapping[str, Any],
    env_id: str = "",
    construct: Callable[..., Any] | None = None,
) -> Env:
    """Return N environments from a class, a factory, an instance, or a pair of an instance and its parameters.

    `construct`, if given, is called instead of the class. An object given by its name alone may come from a preset or
    config.yaml, which must not call arbitrary functions: it is called only if it is a class with gymnax's interface.
    """
    if env_id and not construct and is_factory(source):
        _check_class(env_id, source)
    env_id = env_id or importing.name_of(source)
    known, given = arguments(source), _given(env_id, source, options)
    env = call(env_id, construct or source, given) if is_factory(source) else source
    env, params = env if isinstance(env, tuple) else (env, None)
    _check_interface(env_id, env)
    params = _default_params(env_id, env) if params is None else params
    rest = {name: value for name, value in options.items() if name not in given}
    rest, num_skip = frame_skip.take(env_id, rest, _fields(params))
    env = frame_skip.FrameSkip(env, num_skip) if num_skip > 1 else env
    schedules = scheduled.take(env_id, rest, _fields(params))
    ranges = drawn.ranges(env_id, rest, _fields(params))
    changing = {name: rest[name] for name in (*schedules, *ranges)}
    params = _with_options(env_id, params, {name: x for name, x in rest.items() if name not in changing}, known)
    params = drawn.replace(params, scheduled.last_values(schedules))
    single = traced(env_id, env, params, num_envs)
    frame_skip.check(env_id, single.spec.has_action_mask, num_skip)
    if schedules:
        _drawing(single, changing, ranges | scheduled.ranges(schedules))  # raises ValueError for shapes and branches
        _check_actions(single, changing, schedules)
    single = _drawing(single, changing, ranges) if ranges else single
    return batch(single._replace(schedules=tuple(schedules.items())), num_envs)


def _check_actions(single: Single, given: Mapping[str, str], schedules: Mapping[str, Schedule]) -> None:
    """Raise ValueError for a schedule of a parameter that decides the bounds of actions, which agents know."""
    for name, each in schedules.items():
        of_points = (drawn.replace(single.params, {name: each.typed(x)}) for x in each.points)
        bounds = [action_of(single.spec.id, single.env.action_space(params))[1] for params in of_points]
        if not all(map(np.array_equal, jax.tree.leaves(bounds), jax.tree.leaves(single.bounds) * len(bounds))):
            problem = f"decides the bounds of actions of {single.spec.id}, which cannot change"
            raise ValueError(f"{name}: {problem}, got {given[name]}; use one value")


def _drawing(single: Single, given: Mapping[str, str], ranges: Mapping[str, drawn.Range]) -> Single:
    """Return the environment with parameters drawn at each reset."""
    spec, env = single.spec, drawn.Drawn(single.env, ranges)
    try:
        return traced(spec.id, env, single.params, spec.num_envs)
    except ValueError as error:  # with fixed parameters, tracing has worked
        written = ", ".join(f"{name}={value}" for name, value in given.items())
        remedy = "a parameter that decides a shape or a branch in Python must be one value"
        raise ValueError(f"{spec.id} cannot be made with {written}: {why(error)}; {remedy}") from error


def made(source: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return the environment that a factory makes from the options that are its arguments."""
    env_id = importing.name_of(source)
    return call(env_id, source, _given(env_id, source, options))


def _given(env_id: str, source: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are arguments of a class or a factory, with the types of their defaults."""
    known = arguments(source)
    return {name: coerce(env_id, name, options[name], known[name]) for name in options if name in known}


def _check_interface(env_id: str, env: Any) -> None:
    required = (
        REQUIRED_ATTRIBUTES[1:] if inspect.isclass(env) else REQUIRED_ATTRIBUTES
    )  # an instance may come with its parameters
    missing = [name for name in required if inspect.getattr_static(env, name, inspect) is inspect]
    if missing == ["is_truncated"]:
        raise ValueError(
            f"{env_id} lacks is_truncated(state, params) of gymnax's interface; add it in a subclass to return whether "
            "the time limit is reached (False without one)"
        )
    if missing:
        raise ValueError(
            f"{env_id} lacks {', '.join(missing)} of gymnax's interface; wrapping `reset` and `step` is not enough"
        )


def _check_class(env_id: str, source: Any) -> None:
    if not inspect.isclass(source):
        raise ValueError(
            f"env: {env_id} must be a class or an instance with gymnax's interface, got a {type(source).__name__}; "
            "pass a factory from Python: fit(env=make_env)"
        )
    _check_interface(env_id, source)


def _default_params(env_id: str, env: Any) -> Any:
    try:
        return env.default_params
    except Exception as error:  # environments may raise anything
        raise ValueError(f"{env_id}: its default_params failed with {why(error)}{place(error)}") from error


def _with_options(env_id: str, params: Any, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Return the environment's parameters with the user's values."""
    fields = _fields(params)
    known = (*fields, *arguments)
    for name in options:
        if name not in fields:
            refuse_option(env_id, name, known, OFFERED)
    values = {name: coerce(env_id, name, value, fields[name]) for name, value in options.items()}
    if not 1 <= values.get("max_steps_in_episode", 1) < 2**31:
        given = options["max_steps_in_episode"]
        raise ValueError(f"max_steps_in_episode: must be at least 1 and less than 2^31 for {env_id}, got {given!r}")
    return drawn.replace(params, values)


def _fields(params: Any) -> dict[str, Any]:
    """Return the parameters by name."""
    declared = getattr(type(params), "__annotations__", {})
    named = [field.name for field in dataclasses.fields(params)] if dataclasses.is_dataclass(params) else ()
    names = getattr(params, "_fields", named)
    return {name: as_annotated(getattr(params, name), declared.get(name, "int")) for name in names}
