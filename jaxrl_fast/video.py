"""Record the policy of a run: `python -m jaxrl_fast.video RUN [--episodes 1] [--out FILE]` makes a GIF or an MP4."""

from collections.abc import Sequence
from typing import Any

from jaxrl_fast.config import cli
from jaxrl_fast.evaluation.video import Options, open_run, record_video
from jaxrl_fast.utils import signals
from jaxrl_fast.utils.files import path_of

USAGE = cli.CommandSpec(
    "python -m jaxrl_fast.video",
    "RUN",
    Options,
    "Record the greedy policy of a run as a GIF, or as an MP4 if --out ends with .mp4.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    return cli.run_command(prepare, act, argv)


def prepare(argv: Sequence[str]) -> tuple[Any, Any, Options]:
    """Read the command line and the run's folder. Return the learner, the renderer and the options."""
    (folder,), options = cli.read(USAGE, argv)
    return open_run(path_of(folder), options)


def act(ready: tuple[Any, Any, Options]) -> None:
    """Record the video and print its path."""
    with signals.raised_interrupts():
        video, max_steps = record_video(*ready), ready[2].max_steps
    returns = ", ".join(f"{x:g}" for x in video.returns)
    cut = f" ({video.num_cut} of {len(video.returns)} cut off by max_steps {max_steps})" if video.num_cut else ""
    print(f"{video.path}   {video.num_frames} frames · return {returns}{cut}")


if __name__ == "__main__":
    cli.start(main)
