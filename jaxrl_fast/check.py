"""Check an environment before training: `python -m jaxrl_fast.check my_module:MyEnv`."""

import itertools
from collections.abc import Iterator, Sequence

from jaxrl_fast.config import cli
from jaxrl_fast.training.env_check import Finding, Options, check
from jaxrl_fast.utils import devices, warnings

USAGE = cli.CommandSpec(
    "python -m jaxrl_fast.check",
    "ENV",
    Options,
    "Step an environment with random actions, and print its spaces, its speed and the problems to fix.",
    min_args=0,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status: 1 if there is a problem to fix."""
    return cli.run_command(prepare, act, argv)


def prepare(argv: Sequence[str]) -> tuple[str, Iterator[Finding], Finding]:
    """Read the command line and make the environment. Return its id, the findings, and the first of these."""
    words, options = cli.read(USAGE, argv)
    given = [name for name in (*words, options.env) if name]
    if len(given) != 1:
        raise ValueError(f"env: must be one environment, got {' and '.join(given) or 'none'}; {USAGE.program} ENV")
    (env_id,) = given
    devices.check_device()
    if options.algo == "none" and options.num_envs != Options.num_envs:
        warnings.warn("num_envs: has no effect; algo is none, so no training is timed")
    findings = check(env_id, options)
    return env_id, findings, next(findings)


def act(ready: tuple[str, Iterator[Finding], Finding]) -> int:
    """Print each finding at once. Return the exit status."""
    env_id, findings, first = ready
    print(env_id)
    to_fix = 0
    for finding in itertools.chain([first], findings):
        print(f"  {finding.level:<5} {finding.text}", flush=True)
        to_fix += finding.level == "fix"
    if to_fix:
        print(f"{to_fix} to fix")
    return int(to_fix > 0)


if __name__ == "__main__":
    cli.start(main)
