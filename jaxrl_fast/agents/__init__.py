"""Load algorithms by name: "ppo", or "my_package.my_module" for a custom one.

Each is a module with `Config` and `make(config, spec, num_updates) -> Agent`. `Config` is a frozen dataclass of
options: `configs` lists its members, and `option` declares a field. A built-in algorithm is imported only when its
agent is made.
"""

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType

from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.option import Option, options_of
from jaxrl_fast.utils.parsing import one_line


def load(name: str) -> ModuleType:
    """Return the module of an algorithm. Raise a one-line ValueError if no module has that name."""
    if name in CONFIGS:
        return importlib.import_module(f"{__name__}.{name}")
    module = importing.module(name, f"algorithm {name!r}")
    missing = [part for part in ("Config", "make") if not hasattr(module, part)]
    if missing:
        raise ValueError(
            f"algorithm {name!r}: the module must define Config and make, got no {' and no '.join(missing)}"
        )
    _check_options(name, module.Config)
    return module


def options(name: str) -> type:
    """Return the dataclass of an algorithm's options. Raises ValueError as `load` does."""
    return CONFIGS.get(name) or load(name).Config


def exists(name: str) -> bool:
    """Return whether an algorithm or any module has this name. The module's content is not checked."""
    if name in CONFIGS or not all(map(str.isidentifier, name.split("."))):
        return name in CONFIGS
    return name.partition(".")[0] not in sys.stdlib_module_names and importing.module_exists(name)


def _check_options(name: str, config: type) -> None:
    """Raise ValueError for a Config that cannot be read."""
    if not dataclasses.is_dataclass(config):
        got = importing.describe(config)
        raise ValueError(f"algorithm {name!r}: Config must be a dataclass, got {got}; add @dataclass(frozen=True)")
    unset = [f.name for f in dataclasses.fields(config) if f.default is f.default_factory is dataclasses.MISSING]
    if unset:
        raise ValueError(f"algorithm {name!r}: fields of Config must have defaults, got none for {', '.join(unset)}")
    try:
        declared = options_of(config)
    except Exception as error:  # for example a name imported for type checkers only, or invalid bounds
        raise ValueError(f"algorithm {name!r}: the fields of Config cannot be read ({one_line(error)})") from error
    if "rollout_length" not in declared:
        raise ValueError(f"algorithm {name!r}: Config must have a field rollout_length, the steps between updates")
    for option in declared.values():
        _check_option(name, option, declared)


def _check_option(name: str, option: Option, declared: Mapping[str, Option]) -> None:
    """Raise ValueError for a declaration that does not fit its field."""
    if option.needs and option.needs[0] not in declared:
        raise ValueError(f"algorithm {name!r}: Config.{option.name} needs {option.needs[0]}, which is not a field")
    if option.traced and option.kind not in (float, float | None):
        raise ValueError(f"algorithm {name!r}: Config.{option.name} must be a float to be traced; drop traced")
