"""Load algorithms by name: "ppo", or "my_package.my_module" for a custom one.

Each is a module with `Config` and `make(config, spec, num_updates) -> Agent`. `Config` is a frozen dataclass of options
(see `jaxrl_fast.options`). A built-in algorithm is imported only when its agent is made.
"""

import dataclasses
import functools
import importlib
import sys
from types import ModuleType

from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.algorithm import Algorithm
from jaxrl_fast.options.declare import Option, fields_of, options_of
from jaxrl_fast.options.run import Options
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.parsing import one_line


def load(name: str) -> ModuleType:
    """Return the module of an algorithm. Raise a one-line ValueError if no module has that name."""
    if name in ALGORITHMS:
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
    """Return the dataclass of an algorithm's options, which answers as an `Algorithm`. Raises ValueError as `load`."""
    return ALGORITHMS.get(name) or _answering(load(name).Config)


@functools.cache
def _answering(config: type) -> type:
    """Return a custom algorithm's Config with the defaults of `Algorithm` for what it does not define."""
    return config if issubclass(config, Algorithm) else type(config.__name__, (config, Algorithm), {})


def exists(name: str) -> bool:
    """Return whether an algorithm or any module has this name. The module's content is not checked."""
    if name in ALGORITHMS or not all(map(str.isidentifier, name.split("."))):
        return name in ALGORITHMS
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
    if taken := [field for field in fields_of(config) if field in fields_of(Options)]:
        raise ValueError(f"algorithm {name!r}: Config.{taken[0]} has the name of an option of the run; rename it")
    for option in declared.values():
        _check_option(name, option)


def _check_option(name: str, option: Option) -> None:
    """Raise ValueError for a declaration that does not fit its field."""
    if option.traced and option.kind not in (float, float | None):
        raise ValueError(f"algorithm {name!r}: Config.{option.name} must be a float to be traced; drop traced")
