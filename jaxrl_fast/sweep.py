"""Trains with every combination: `python -m jaxrl_fast.sweep [ppo] [--config PRESET] --num-envs 1,8,64 --seed 0..4`.

From here a sweep goes through `grid` (what was asked for), `layout` (is it possible, and in how many programs),
`sweeper` (the work) and `results` (what came of it). From Python the module is a function too:
`jaxrl_fast.sweep("ppo_cartpole", seed=[0, 1])`.
"""

import sys
from types import ModuleType
from typing import Any

from jaxrl_fast import command, grid, layout, sweeper


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit status."""
    return command.run(lambda argv: layout.prepare(grid.from_command_line(argv)), sweeper.execute, argv)


class _Callable(ModuleType):
    """The module has the name that the function has to have."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from jaxrl_fast import api

        return api.sweep(*args, **options)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    command.start(main)
