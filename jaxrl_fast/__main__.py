"""List the commands: `python -m jaxrl_fast`. Run one: `python -m jaxrl_fast train` is `python -m jaxrl_fast.train`."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_fast import __version__
from jaxrl_fast.config import cli
from jaxrl_fast.utils.parsing import nearest

COMMANDS = {
    "train": "train an agent",
    "sweep": "train with every combination of options and seeds",
    "search": "find hyperparameters",
    "evaluate": "evaluate the policy of a run",
    "video": "record the policy of a run as a GIF or MP4",
    "export": "export the policy of a run for JAX, onnxruntime or numpy",
    "plot": "draw the learning curves of runs",
    "envs": "list the environments",
    "check": "check an environment before training",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, or list all commands. Return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return command(argv[0])(argv[1:])
    return cli.run_command(prepare, print, argv)


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function that runs a command: `main` of its module or of its package's `__main__`."""
    module = importlib.import_module(f"{__package__}.{name}")
    is_package = hasattr(module, "__path__")
    found: Any = importlib.import_module(f"{module.__name__}.__main__") if is_package else module
    run: Callable[[Sequence[str]], int] = found.main
    return run


def prepare(argv: Sequence[str]) -> str:
    """Return the list of commands. Raise ValueError for any argument."""
    if not argv or argv[0] in ("-h", "--help"):
        commands = (f"  python -m jaxrl_fast.{name:<10}{description}" for name, description in COMMANDS.items())
        return "\n".join((f"jaxrl_fast {__version__}; commands (each has --help and --version):", *commands))
    raise ValueError(f"unknown argument {argv[0]!r}{nearest(argv[0], COMMANDS, 'python -m jaxrl_fast.{}'.format)}")


if __name__ == "__main__":
    cli.start(main)
