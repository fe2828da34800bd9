"""Find hyperparameters: `python -m jaxrl_fast.search ...` or `jaxrl_fast.search("ppo_cartpole", over=...)`.

`request` reads the options, `spaces` the ranges, and `study` draws the values of trials. `rounds` trains the trials of
a round as members of few programs, `stages` says how long and which, and `report` writes the results. `work` puts them
together, and `tasks` starts it here, as Slurm jobs or as Ray tasks.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that can be called: `jaxrl_fast.search` is both this package and the function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from jaxrl_fast.search import api

        return api.search(*args, **options)


sys.modules[__name__].__class__ = _Callable
