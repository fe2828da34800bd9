"""What there is to run: `python -m jaxrl_fast` lists the commands."""

from collections.abc import Sequence

from jaxrl_fast import __version__, cli
from jaxrl_fast.utils.parsing import nearest

COMMANDS = {
    "train": "trains an agent",
    "sweep": "trains with every combination of options and seeds, and compares",
    "evaluate": "plays what a run has learned, and says how well",
    "video": "shows it as a GIF",
    "plot": "draws the learning curves of runs",
    "envs": "lists the environments",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    return cli.run_command(prepare, print, argv)


def prepare(argv: Sequence[str]) -> str:
    """The list, or the version where that is asked for."""
    if not argv or argv[0] in ("-h", "--help"):
        commands = (f"  python -m jaxrl_fast.{name:<10}{meaning}" for name, meaning in COMMANDS.items())
        return "\n".join((f"jaxrl_fast {__version__}; each of these has --help:", *commands))
    if argv[0] == "--version":
        return __version__
    name = argv[0] if argv[0] in COMMANDS else ""
    hint = f"; python -m jaxrl_fast.{name}" if name else nearest(argv[0], COMMANDS, "python -m jaxrl_fast.{}".format)
    raise ValueError(f"{argv[0]!r} is no option here{hint}")


if __name__ == "__main__":
    cli.start(main)
