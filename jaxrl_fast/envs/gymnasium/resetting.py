"""Pass options to `reset`, in this process or in a worker. Worker processes import this, so it avoids JAX."""

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium

PREFIX = "reset."  # of options of an environment that its `reset` gets
HINT = f"; --env-option {PREFIX}KEY=VALUE passes options to reset"


class Episode(NamedTuple):
    """The begin of an episode: the arguments of `reset`."""

    seed: int | None = None
    options: Mapping[str, Any] | None = None

    def begin(self, env: Any) -> Any:
        """Reset an environment with the arguments that are given."""
        given: dict[str, Any] = {} if self.seed is None else {"seed": self.seed}
        return env.reset(**given | ({} if self.options is None else {"options": dict(self.options)}))


def take(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options without those of `reset`, and those of `reset` by their own names."""
    own = {name.removeprefix(PREFIX): value for name, value in options.items() if name.startswith(PREFIX)}
    return {name: value for name, value in options.items() if not name.startswith(PREFIX)}, own


def with_options(env_id: str, construct: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function that makes environments whose `reset` gets these options."""
    return functools.partial(_make, env_id, construct, dict(options)) if options else construct


def takes_options(reset: Callable[..., Any]) -> bool:
    """Return whether this method takes `options`."""
    parameters = inspect.signature(reset).parameters
    return "options" in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def hint(error: BaseException) -> str:
    """Return how to pass options, if an exception of `reset` is about them; else ""."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return HINT if "option" in f"{error} {frame.line}" else ""


def _make(env_id: str, construct: Callable[..., Any], options: Mapping[str, Any], **arguments: Any) -> Any:
    env = construct(**arguments)
    if not isinstance(env, gymnasium.Env):
        return env  # rejected later
    if not takes_options(env.unwrapped.reset):
        raise ValueError(f"{PREFIX}{min(options)}: reset of {env_id} takes no options; leave it out")
    return ResetOptions(env, options)


class ResetOptions(gymnasium.Wrapper):
    """Passes options to every `reset`. Those of a single call replace them."""

    def __init__(self, env: Any, options: Mapping[str, Any]) -> None:
        super().__init__(env)
        self.options = dict(options)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        outcome: tuple[Any, dict[str, Any]] = self.env.reset(seed=seed, options=self.options | (options or {}))
        return outcome
