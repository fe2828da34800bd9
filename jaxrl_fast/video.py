"""Shows what a run has learned: `python -m jaxrl_fast.video RUN [--episodes 1] [--out FILE]` makes a GIF or an MP4."""

from collections.abc import Sequence
from typing import Any

from jaxrl_fast import cli
from jaxrl_fast.evaluation.video import Options, open_run, run
from jaxrl_fast.utils.files import path_of

USAGE = cli.CommandSpec(
    "python -m jaxrl_fast.video",
    "RUN",
    Options,
    "Record the greedy policy of a run as a GIF, or as an MP4 if the name of --out ends so.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    return cli.run_command(prepare, act, argv)


def prepare(argv: Sequence[str]) -> tuple[Any, Any, Options]:
    """What the command line asks for, with what the run's folder holds."""
    (folder,), options = cli.read(USAGE, argv)
    return open_run(path_of(folder), options)


def act(ready: tuple[Any, Any, Options]) -> None:
    """Makes the video and says where it is."""
    video, most = run(*ready), ready[2].max_steps
    returns = ", ".join(f"{x:g}" for x in video.returns)
    cut = f" ({video.num_cut} of {len(video.returns)} cut off by --max-steps {most})" if video.num_cut else ""
    print(f"{video.path}   {video.num_frames} frames · return {returns}{cut}")


if __name__ == "__main__":
    cli.start(main)
