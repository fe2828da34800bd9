"""Construct environments from classes and factories, with options that their signatures declare."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_fast.utils import importing
from jaxrl_fast.utils.errors import place, raised_here, why
from jaxrl_fast.utils.parsing import as_annotated

CHANGES = ("gray", "resize")  # of frames; Python environments change theirs on the host
FRAME_OPTIONS = (*CHANGES, "frame_stack")  # of any environment whose observation has one image (`image`)
OFFERED = (*FRAME_OPTIONS, "frame_skip")  # options of environments that do not have them themselves
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_factory(source: Any) -> bool:
    """Return whether a call of this object makes an environment."""
    return inspect.isclass(source) or callable(source) and not hasattr(source, "step_env")


def arguments(source: Any) -> dict[str, Any]:
    """Return names and defaults of the arguments of a class or a factory."""
    if not is_factory(source):
        return {}
    try:
        parameters = inspect.signature(source).parameters
    except ValueError as error:  # a built-in type, such as dict
        got = importing.describe(source)
        raise ValueError(f"env: must be an environment or a function that makes one, got {got}") from error
    return {p.name: as_annotated(p.default, p.annotation) for p in parameters.values() if p.kind in NAMED}


def call(env_id: str, construct: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Return the object that a class or a factory makes from arguments. Raise a one-line ValueError if it fails."""
    try:
        return construct(**given)
    except Exception as error:  # constructors may raise anything
        if raised_here(error):
            raise
        values = ", ".join(f"{name}={value!r}" for name, value in given.items())
        missing = isinstance(error, TypeError) and " missing " in str(error)
        hint = "; give it as an option of the environment" if missing else ""
        raise ValueError(
            f"{env_id} cannot be made{values and ' with '}{values}: {why(error)}{place(error)}{hint}"
        ) from error
