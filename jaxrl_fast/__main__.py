"""List the commands: `python -m jaxrl_fast`."""

from collections.abc import Sequence

from jaxrl_fast import __version__
from jaxrl_fast.config import cli
from jaxrl_fast.utils.parsing import nearest

COMMANDS = {
    "train": "train an agent",
    "sweep": "train with every combination of options and seeds",
    "evaluate": "evaluate the policy of a run",
    "video": "record the policy of a run as a GIF or MP4",
    "export": "export the policy of a run for JAX, onnxruntime or numpy",
    "plot": "draw the learning curves of runs",
    "envs": "list the environments",
    "check": "check an environment before training",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    return cli.run_command(prepare, print, argv)


def prepare(argv: Sequence[str]) -> str:
    """Return the list of commands. Raise ValueError for any argument."""
    if not argv or argv[0] in ("-h", "--help"):
        commands = (f"  python -m jaxrl_fast.{name:<10}{description}" for name, description in COMMANDS.items())
        return "\n".join((f"jaxrl_fast {__version__}; commands (each has --help and --version):", *commands))
    name = argv[0] if argv[0] in COMMANDS else ""
    hint = (
        f"; use python -m jaxrl_fast.{name}" if name else nearest(argv[0], COMMANDS, "python -m jaxrl_fast.{}".format)
    )
    raise ValueError(f"unknown argument {argv[0]!r}{hint}")


if __name__ == "__main__":
    cli.start(main)
