"""Algorithms by name. Each module has `Config`, `State`, `loss` and `make(config, spec, num_updates) -> Agent`."""

import importlib
from types import ModuleType

from jaxrl_fast.agents.configs import CONFIGS


def load(name: str) -> ModuleType:
    """The module of an algorithm of CONFIGS, imported only when asked for."""
    assert name in CONFIGS, name
    return importlib.import_module(f"{__name__}.{name}")
