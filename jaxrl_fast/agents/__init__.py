"""Algorithms by name: "ppo", or "my_package.my_module" for one of one's own.

Each is a module with `Config`, a frozen dataclass of its options (`configs` says what is asked of it), and
`make(config, spec, num_updates) -> Agent`. Those of CONFIGS are imported only when one is made.
"""

import dataclasses
import importlib
import sys
import typing
from types import ModuleType

from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.utils import importing


def load(name: str) -> ModuleType:
    """The module of an algorithm. ValueError of one sentence where it is none of CONFIGS, and no module is one."""
    if name in CONFIGS:
        return importlib.import_module(f"{__name__}.{name}")
    module = importing.module(name, f"algorithm {name!r}")
    missing = [part for part in ("Config", "make") if not hasattr(module, part)]
    if missing:
        raise ValueError(f"algorithm {name!r}: the module of that name has no {' and no '.join(missing)}")
    _check_options(name, module.Config)
    return module


def options(name: str) -> type:
    """The dataclass of an algorithm's options. ValueError as `load`."""
    return CONFIGS.get(name) or load(name).Config


def exists(name: str) -> bool:
    """Whether an algorithm or a module has this name, whatever is in it."""
    if name in CONFIGS or not all(map(str.isidentifier, name.split("."))):
        return name in CONFIGS
    return name.partition(".")[0] not in sys.stdlib_module_names and importing.module_exists(name)


def _check_options(name: str, config: type) -> None:
    if not dataclasses.is_dataclass(config):
        raise ValueError(f"algorithm {name!r}: its Config is no dataclass")
    unset = [f.name for f in dataclasses.fields(config) if f.default is f.default_factory is dataclasses.MISSING]
    if unset:
        raise ValueError(f"algorithm {name!r}: of its Config {' and '.join(unset)} has no default")
    unknown = set(getattr(config, "traced", ())) - {f.name for f in dataclasses.fields(config)}
    if unknown:
        raise ValueError(
            f"algorithm {name!r}: its Config says that {' and '.join(sorted(unknown))} is traced, and has it not"
        )
    try:
        typing.get_type_hints(config)
    except Exception as error:  # a name that is imported for type checkers only
        raise ValueError(f"algorithm {name!r}: the types of its Config cannot be read ({error})") from error
    if not any(f.name == "rollout_length" for f in dataclasses.fields(config)):
        raise ValueError(f"algorithm {name!r}: its Config has no rollout_length, the steps between updates")
