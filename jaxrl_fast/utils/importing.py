"""Modules of the user's own, by name: with environments or an algorithm in them. Standard library only."""

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any


def module(name: str, said: str) -> ModuleType:
    """A module by its name, found from the current directory too. `said` begins the sentence where that fails."""
    _add_cwd_to_path()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the user's module does while it is imported
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        dotted = name.removesuffix(".py").replace("/", ".")
        hint = f"; did you mean {dotted}?" if name.endswith(".py") and not dotted.startswith(".") else ""
        raise ValueError(f"{said}: importing {name!r} failed with {what}{hint}") from error


def module_exists(name: str) -> bool:
    """Whether there is a module of this name. Nothing is imported but the packages that it is in."""
    _add_cwd_to_path()
    try:
        spec = importlib.util.find_spec(name)
    except (Exception, SystemExit):  # there is no such package, or it does not import
        return "." in name and module_exists(name.rpartition(".")[0])
    return spec is not None and spec.origin is not None  # not any folder that lies about


def name_of(env: Any) -> str:
    """An environment's id: what was asked for, or for an object its place, "my_package.my_module:MyEnv"."""
    if isinstance(env, str):
        return env
    named = env[0] if isinstance(env, tuple) else env
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}:{named.__qualname__}"


def _add_cwd_to_path() -> None:
    """Puts the current directory among those that Python looks in, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
