"""Set attributes of a gymnasium environment, as `set_attr` does. Workers import this without JAX."""

from collections.abc import Mapping
from typing import Any

from jaxrl_fast.envs.schedules import Schedule, is_number, read, undeclared
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.parsing import nearest


def resolve(env_id: str, env: Any, texts: Mapping[str, str]) -> dict[str, Schedule]:
    """Return the schedules of attributes of the unwrapped environment. Raise ValueError for one that cannot change."""
    base, found = env.unwrapped, {}
    for name, text in texts.items():
        try:
            default = getattr(base, name)
        except AttributeError:
            numbers = [
                other for other, value in vars(base).items() if is_number(value) and not other.startswith("_np_")
            ]
            hint = nearest(name, numbers) or f"; its numbers are {', '.join(numbers) or 'none'}"
            raise ValueError(f"{env_id} has no attribute {name!r} that could follow {text}{hint}") from None
        if not is_number(default):
            got = f"{text} for a {type(default).__name__}"
            raise ValueError(f"{name}: must be a number in {env_id} to follow a schedule, got {got}")
        found[name] = read(name, text, undeclared(default))
        for value in map(found[name].typed, reversed(found[name].points)):
            try:
                set_all(env, {name: value})
            except Exception as error:  # a property may raise anything
                raise ValueError(f"{name}: cannot be set in {env_id} ({why(error)}), got {text}") from error
            check_kept(env_id, env, {name: value}, "setting it")
    return found


def set_all(env: Any, values: Mapping[str, float]) -> None:
    """Set attributes of the unwrapped environment."""
    for name, value in values.items():
        setattr(env.unwrapped, name, value)


def check_kept(env_id: str, env: Any, values: Mapping[str, float], cause: str) -> None:
    """Raise ValueError unless attributes still have the values that were set."""
    for name, value in values.items():
        if (now := getattr(env.unwrapped, name)) != value:
            raise ValueError(f"{name}: must keep the value {value:g} in {env_id}, got {now!r} after {cause}")
