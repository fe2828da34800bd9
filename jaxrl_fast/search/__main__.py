"""Find hyperparameters: `python -m jaxrl_fast.search [ppo] [--config PRESET] --over learning-rate=1e-5..1e-2`."""

from jaxrl_fast.config import cli
from jaxrl_fast.search import prepare, request, runner


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    return cli.run_command(lambda argv: prepare.prepare(request.from_command_line(argv)), runner.execute, argv)


if __name__ == "__main__":
    cli.start(main)
