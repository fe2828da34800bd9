"""Reinforcement learning in JAX where a whole training run is one compiled program."""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Callback", "Run", "RunState", "Sweep", "__version__", "fit", "load", "sweep"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Imported when first asked for, so that `import jaxrl_fast` costs nothing."""
    if name in ("fit", "load", "Run"):
        from jaxrl_fast import api

        return getattr(api, name)
    if name in ("Callback", "RunState"):
        from jaxrl_fast.training import callbacks

        return getattr(callbacks, name)
    if name == "Sweep":
        from jaxrl_fast.sweep.api import Sweep

        return Sweep
    if name == "sweep":  # a module that can be called, for `python -m jaxrl_fast.sweep` is its name too
        return importlib.import_module(f"{__name__}.sweep")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
