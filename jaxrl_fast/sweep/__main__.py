"""Train with every combination: `python -m jaxrl_fast.sweep [ppo] [--config PRESET] --num-envs 1,8,64 --seed 0..4`."""

from jaxrl_fast.config import cli
from jaxrl_fast.sweep import grid, prepare, runner


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    return cli.run_command(lambda argv: prepare.prepare(grid.from_command_line(argv)), runner.execute, argv)


if __name__ == "__main__":
    cli.start(main)
