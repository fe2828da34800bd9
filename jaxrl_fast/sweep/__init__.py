"""Many runs: `python -m jaxrl_fast.sweep ...` (`__main__`), or `jaxrl_fast.sweep("ppo_cartpole", seed=[0, 1])` (`api`).

`grid` reads the values and forms the combinations, `prepare` checks them and makes the folder, `runner` and `worker`
train, `report` and `table` write the results.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """The module has the name that the function has to have."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from jaxrl_fast.sweep import api

        return api.sweep(*args, **options)


sys.modules[__name__].__class__ = _Callable
