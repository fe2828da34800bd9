"""Compare runs, or all runs in a folder: `python -m jaxrl_fast.plot RUN... [--x seconds] [--y return_mean]`."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from jaxrl_fast.config import cli
from jaxrl_fast.plotting.compare import Options, RunRecords, draw_figure, group_runs
from jaxrl_fast.utils import files, formatting
from jaxrl_fast.utils.files import path_of

NAME = "plot.png"  # default output file


USAGE = cli.CommandSpec(
    "python -m jaxrl_fast.plot",
    "RUN...",
    Options,
    "Draw the curves of runs, or of all runs below a directory. Runs that differ only in their seed are one curve: "
    "their interquartile mean with a stratified bootstrap interval.",
    max_args=sys.maxsize,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    return cli.run_command(prepare, act, argv)


def prepare(argv: Sequence[str]) -> tuple[dict[str, list[RunRecords]], Options]:
    """Read the command line and the runs. Return the runs by the names of their curves, and the options."""
    words, options = cli.read(USAGE, argv)
    if not options.out:
        files.check_writable(Path(NAME))
    return group_runs([path_of(word) for word in words], options), options


def act(ready: tuple[dict[str, list[RunRecords]], Options]) -> None:
    """Draw the figure and print its path."""
    from jaxrl_fast.plotting import curves

    found, options = ready
    drawn = draw_figure(found, options)
    with nullcontext(path_of(options.out)) if options.out else files.claimed(Path(NAME)) as path:
        curves.save(drawn, path)
    num_runs = sum(map(len, found.values()))
    print(f"{path}   {formatting.counted(len(found), 'curve')} of {formatting.counted(num_runs, 'run')}")


if __name__ == "__main__":
    cli.start(main)
