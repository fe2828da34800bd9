"""Train an agent: `python -m jaxrl_fast.train [ppo] [--config PRESET] [--env ID] [options]`.

A run passes through `config` (read the options), `training.plan` (validate them), `training.trainer` (train) and
`training.run_logger` (write the results). The options are read before jax is imported, so that --help is fast.
"""

from collections.abc import Sequence

from jaxrl_fast.config import cli, load
from jaxrl_fast.config.settings import to_mapping
from jaxrl_fast.gpu_check import targets
from jaxrl_fast.parallel import distributed, team
from jaxrl_fast.runs import fingerprint
from jaxrl_fast.training import plan, trainer
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.errors import blamed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    return cli.run_command(prepare, execute, argv)


def prepare(argv: Sequence[str]) -> plan.Plan:
    """Return the plan of the run that a command line asks for."""
    processes, argv = load.processes_of(argv)
    gpu, argv = load.gpu_of(argv)
    if processes is not None and not load.asks_for_help(argv):
        distributed.join(*processes, fingerprint.versions())
        if gpu is not None:
            raise ValueError(f"for: compiles in one process, got {gpu}; leave out --distributed")
    settings = load.from_command_line(argv)
    distributed.start(to_mapping(settings), settings.options.devices)
    if gpu is None:
        return plan.make_plan(settings)
    if not settings.options.dry_run:
        raise ValueError(f"for: compiles without training, got {gpu}; add --dry-run")
    if settings.auto_num_envs:
        raise ValueError(f"num_envs: cannot be measured on a {gpu} that is not there, got auto; give a number")
    targets.check(gpu)
    targets.start()
    from jaxrl_fast.training import gpu_report

    return gpu_report.make_plan(settings, gpu)


def execute(ready: plan.Plan) -> int:
    """Train, print errors, and return the exit status."""
    from jaxrl_fast.training import gpu_report, startup  # imports jax

    leads = team.current().leads
    try:
        if ready.settings.options.dry_run:
            startup.dry_run(ready)
            return 0
        outcome = trainer.execute(ready)
    except (MemoryError, gpu_report.DoesNotFit) as error:
        if blamed(error) is not None:
            raise
        team.current().fail(str(error))
        if leads:
            warnings.print_stderr(f"error: {error}")
        return 2 if isinstance(error, gpu_report.DoesNotFit) else 1
    if outcome.failure and leads:
        warnings.print_stderr(f"error: {outcome.failure}")
    if outcome.failed_outputs and leads:
        warnings.print_stderr(f"error: {ready.shown(outcome.folder)}: {outcome.failed_outputs} could not be written")
    if outcome.failure or outcome.failed_outputs:
        return 1
    return 128 + outcome.signal if outcome.signal else 0


if __name__ == "__main__":
    cli.start(main)
