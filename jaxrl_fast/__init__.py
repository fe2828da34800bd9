"""Reinforcement learning in JAX where a whole training run is one compiled program."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "fit", "load"]


def __getattr__(name: str) -> Any:
    """`fit`, `load` and `Run`, imported when first asked for, so that `import jaxrl_fast` costs nothing."""
    if name in ("fit", "load", "Run"):
        from jaxrl_fast import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
