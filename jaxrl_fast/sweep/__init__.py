"""Train many runs: `python -m jaxrl_fast.sweep ...` or `jaxrl_fast.sweep("ppo_cartpole", seed=[0, 1])`.

`grid` reads the values and forms the combinations, `prepare` validates them and creates the folder, `runner` and
`worker` train, `report` and `table` write the results.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that can be called: `jaxrl_fast.sweep` is both this package and the function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from jaxrl_fast.sweep import api

        return api.sweep(*args, **options)


sys.modules[__name__].__class__ = _Callable
