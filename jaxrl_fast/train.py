"""Trains from the command line: `python -m jaxrl_fast.train [ppo] [--config PRESET] [--env ID] [options]`.

From here a run goes through `config` (what was asked for), `plan` (is it possible), `trainer` (the run) and `journal`
(what it leaves). The command line is read before jax is imported, which is why these import it in functions.
"""

from collections.abc import Sequence

from jaxrl_fast import command, config, host, plan, trainer


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    return command.run(lambda words: plan.prepare(config.from_command_line(words)), execute, argv)


def execute(ready: plan.Plan) -> int:
    """Runs it. Returns the exit status."""
    try:
        outcome = trainer.execute(ready)
    except MemoryError as error:
        host.tell(f"error: {error}")
        return 1
    if outcome.failure:
        host.tell(f"error: {outcome.failure}")
    if outcome.unwritten:
        host.tell(f"error: {outcome.folder}: {outcome.unwritten} could not be written")
    if outcome.failure or outcome.unwritten:
        return 1
    return 128 + outcome.signal if outcome.signal else 0


if __name__ == "__main__":
    command.start(main)
