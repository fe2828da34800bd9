"""Trains from the command line: `python -m jaxrl_fast.train [ppo] [--config PRESET] [--env ID] [options]`.

From here a run goes through `config` (what was asked for), `plan` (is it possible), `trainer` (the run) and `journal`
(what it leaves). The command line is read before jax is imported, which is why these import it in functions.
"""

from collections.abc import Sequence

from jaxrl_fast import cli
from jaxrl_fast.config import load
from jaxrl_fast.training import plan, trainer
from jaxrl_fast.utils import warnings


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    return cli.run_command(prepare, execute, argv)


def prepare(argv: Sequence[str]) -> plan.Plan:
    """Return the plan of the run that a command line asks for."""
    return plan.make_plan(plan.decide_num_envs(load.from_command_line(argv)))


def execute(ready: plan.Plan) -> int:
    """Runs it. Returns the exit status."""
    try:
        outcome = trainer.execute(ready)
    except MemoryError as error:
        warnings.print_stderr(f"error: {error}")
        return 1
    if outcome.failure:
        warnings.print_stderr(f"error: {outcome.failure}")
    if outcome.unwritten:
        warnings.print_stderr(f"error: {outcome.folder}: {outcome.unwritten} could not be written")
    if outcome.failure or outcome.unwritten:
        return 1
    return 128 + outcome.signal if outcome.signal else 0


if __name__ == "__main__":
    cli.start(main)
