"""Import user modules that define environments or algorithms. Standard library only."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_fast.utils.errors import place
from jaxrl_fast.utils.files import current_folder
from jaxrl_fast.utils.parsing import nearest

FLAX_FIELDS = ("parent", "name")  # fields of every flax module, in addition to its arguments


def module(name: str, prefix: str) -> ModuleType:
    """Import a module, also from the current directory. Raise ValueError, starting with `prefix`, if that fails."""
    _add_cwd_to_path()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user module may raise anything
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        dotted = name.removesuffix(".py").replace("/", ".")
        hint = f"; did you mean {dotted}?" if name.endswith(".py") and not dotted.startswith(".") else ""
        raise ValueError(f"{prefix}: importing {name!r} failed with {what}{place(error)}{hint}") from error


def attribute(path: str, prefix: str) -> Any:
    """Return the object of a name such as "my_package.my_module:MyClass". Raise ValueError if there is none."""
    module_name, _, names = path.partition(":")
    found = source = module(module_name, prefix)
    for name in names.split("."):
        if not hasattr(found, name) and module_name == "__main__":
            raise ValueError(
                f"{prefix}: was defined in a script's __main__; pass it from Python, or move it to a module"
            )
        if not hasattr(found, name):
            raise ValueError(f"{prefix}: module {module_name!r} has no {names!r}{nearest(names, vars(source))}")
        found = getattr(found, name)
    return found


def module_exists(name: str) -> bool:
    """Return whether a module exists, without importing it; its parent packages are imported."""
    _add_cwd_to_path()
    try:
        spec = importlib.util.find_spec(name)
    except (Exception, SystemExit):  # the parent package does not exist or cannot be imported
        return "." in name and module_exists(name.rpartition(".")[0])
    return spec is not None and spec.origin is not None  # a namespace package may be any folder


def name_of(env: Any) -> str:
    """Return an environment's id: the given string, or for an object "my_package.my_module:MyEnv"."""
    if isinstance(env, str):
        return env
    named = env[0] if isinstance(env, tuple) else env
    is_named = hasattr(named, "__qualname__") and hasattr(named, "__module__")  # a generator has no module
    named = named if is_named else type(named)
    return f"{named.__module__}:{named.__qualname__}"


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra, in place if this is a checkout."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return f'pip install "jaxrl_fast[{extra}]"'
    return f'pip install -e "{"." if root == current_folder() else root}[{extra}]"'


def describe(value: Any) -> str:
    """Return a value as messages show it: its repr, but classes, functions and other objects by their names."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {describe(part)}' for key, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))}{',' * (len(value) == 1)})"
    text = repr(value)
    return name_of(value) if text.startswith("<") else text


def _add_cwd_to_path() -> None:
    """Add the current directory to sys.path, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
