"""Plays what a run has learned: `python -m jaxrl_fast.evaluate RUN [--episodes 128]`."""

from collections.abc import Sequence
from typing import Any

from jaxrl_fast import cli
from jaxrl_fast.evaluation.episodes import Options, open_run, run
from jaxrl_fast.utils import formatting
from jaxrl_fast.utils.files import path_of

USAGE = cli.CommandSpec(
    "python -m jaxrl_fast.evaluate",
    "RUN",
    Options,
    "Evaluate the policy of a run in fresh environments: print the returns and write evaluation.json to the run.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    return cli.run_command(prepare, act, argv)


def prepare(argv: Sequence[str]) -> tuple[Any, Options]:
    """What the command line asks for, with what the run's folder holds."""
    (folder,), options = cli.read(USAGE, argv)
    return open_run(path_of(folder), options), options


def act(ready: tuple[Any, Options]) -> None:
    """Plays and says how it went."""
    result = run(*ready)
    for line in lines(result):
        print(line)


def lines(result: dict[str, Any]) -> list[str]:
    """For the terminal."""
    steps = formatting.short_number(result["env_steps"])
    about = [result["algo"], result["env_id"], f"{result['policy']} policy of {result['checkpoint']} ({steps} steps)"]
    about += [" ".join(f"{name}={value:g}" for name, value in result["member"].items())] * bool(result["member"])
    rows = [(f"seed {each['seed']}", each) for each in result["seeds"]]
    rows += [(f"{len(rows)} seeds", result)] if len(rows) > 1 else []
    written = [f"written  {result['file']}"] if result["file"] else []
    return [" · ".join(about), *(_line(name, row) for name, row in rows), *written]


def _line(name: str, row: dict[str, Any]) -> str:
    played = formatting.counted(row["eval_episodes"], "episode")
    unfinished = f", {row['eval_truncated']} more did not end in time" if row["eval_truncated"] else ""
    if row["eval_return_mean"] is None:
        return f"{name:<9} {played}{unfinished}"
    mean, std, low, high, least, most = (
        row[f"eval_return_{what}"] for what in ("mean", "std", "low", "high", "min", "max")
    )
    spread = (
        f" ± {std:.2f}   mean's 95% interval {low:.2f} to {high:.2f}   least {least:.2f}, most {most:.2f}"
        if row["eval_episodes"] > 1
        else ""
    )
    return f"{name:<9} return {mean:.2f}{spread}   length {row['eval_length_mean']:.0f}   {played}{unfinished}"


if __name__ == "__main__":
    cli.start(main)
