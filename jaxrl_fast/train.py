"""Trains from the command line: `python -m jaxrl_fast.train [ppo] [--config PRESET] [--env ID] [options]`.

From here a run goes through `config` (what was asked for), `plan` (is it possible), `trainer` (the run) and `report`
(what is left of it). The command line is read before jax is imported, which is why these import it in functions.
"""

import signal
import sys

from jaxrl_fast import config, plan, trainer


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit status."""
    try:
        settings = config.from_command_line(sys.argv[1:] if argv is None else argv)
        ready = plan.prepare(settings)
    except ValueError as error:
        if "\n" in str(error):  # not one of our sentences
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    outcome = trainer.execute(ready)
    if outcome.failure:
        print(f"error: {outcome.failure}", file=sys.stderr)
        return 1
    return 128 + outcome.signal if outcome.signal else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
