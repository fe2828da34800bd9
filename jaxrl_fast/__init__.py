"""Train reinforcement-learning agents in JAX, with a whole training run in one compiled program."""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "Bounds",
    "Callback",
    "Part",
    "Run",
    "RunState",
    "Search",
    "Sweep",
    "__version__",
    "choice",
    "fit",
    "load",
    "option",
    "search",
    "sweep",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import jaxrl_fast` is fast."""
    if name in ("fit", "load", "Run"):
        from jaxrl_fast import api

        return getattr(api, name)
    if name in ("option", "choice", "Part", "Bounds"):
        from jaxrl_fast.options import declare

        return getattr(declare, name)
    if name in ("Callback", "RunState"):
        from jaxrl_fast.training import callbacks

        return getattr(callbacks, name)
    if name in ("Sweep", "Search"):
        return getattr(importlib.import_module(f"{__name__}.{name.lower()}.api"), name)
    if name in ("sweep", "search"):  # a callable module: `python -m jaxrl_fast.sweep` needs a module of this name
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
