"""Evaluate the policy of a run: `python -m jaxrl_fast.evaluate RUN [--episodes 128]`."""

from collections.abc import Sequence
from typing import Any

from jaxrl_fast.config import cli
from jaxrl_fast.evaluation.episodes import Options, evaluate_run, open_run
from jaxrl_fast.utils import formatting
from jaxrl_fast.utils.files import path_of

USAGE = cli.CommandSpec(
    "python -m jaxrl_fast.evaluate",
    "RUN",
    Options,
    "Evaluate the policy of a run in fresh environments: print the returns and write evaluation.json to the run.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    return cli.run_command(prepare, act, argv)


def prepare(argv: Sequence[str]) -> tuple[Any, Options]:
    """Read the command line and the run's folder. Return the learners and the options."""
    (folder,), options = cli.read(USAGE, argv)
    return open_run(path_of(folder), options), options


def act(ready: tuple[Any, Options]) -> None:
    """Evaluate the run and print the results."""
    result = evaluate_run(*ready)
    for line in lines(result):
        print(line)


def lines(result: dict[str, Any]) -> list[str]:
    """Return the lines to print: one for each seed and one for all seeds; with --against, one for each side."""
    steps = formatting.short_number(result["env_steps"])
    if "against" in result:
        return lines_of_match(result)
    about = [result["algo"], result["env_id"], f"{result['policy']} policy of {result['checkpoint']} ({steps} steps)"]
    about += [" ".join(f"{name}={value:g}" for name, value in result["member"].items())] * bool(result["member"])
    differs = [f"{name}={value}" for name, value in result["differs_from_training"].items()]
    about += [f"not as trained: {' '.join(differs)}"] * bool(differs)
    rows = [(f"seed {row['seed']}", row) for row in result["seeds"]]
    rows += [(f"{len(rows)} seeds", result)] if len(rows) > 1 else []
    of_players = lambda row: [(f"  {player}", own) for player, own in row.get("players", {}).items()]
    rows = [line for name, row in rows for line in [(name, row), *of_players(row)]]
    written = [f"written  {result['file']}"] if result["file"] else []
    if collected := result.get("collected"):
        written.append(f"collected  {formatting.counted(collected['steps'], 'step')} in {collected['file']}")
    return [" · ".join(about), *(_line(name, row) for name, row in rows), *written]


def lines_of_match(result: dict[str, Any]) -> list[str]:
    """Return the lines to print of a match: one for each side."""
    rows = [f"{_line(name, row)}   won {row['won'] or 0:.0%}" for name, row in result["sides"].items()]
    written = [f"written  {result['file']}"] if result["file"] else []
    head = f"{result['algo']} · {result['env_id']} · {result['checkpoint']} against {result['against']}"
    return [head, *rows, *written]


def _line(name: str, row: dict[str, Any]) -> str:
    """Return the line of one seed, or of all seeds."""
    played = formatting.counted(row["eval_episodes"], "episode")
    unfinished = f", {row['eval_truncated']} more did not end" if row["eval_truncated"] else ""
    if row["eval_return_mean"] is None:
        return f"{name:<9} {played}{unfinished}"
    statistics = ("mean", "std", "low", "high", "min", "max")
    mean, std, low, high, minimum, maximum = (row[f"eval_return_{name}"] for name in statistics)
    spread = (
        f" ± {std:.2f}   95% interval of the mean {low:.2f} to {high:.2f}   min {minimum:.2f}, max {maximum:.2f}"
        if row["eval_episodes"] > 1
        else ""
    )
    return f"{name:<9} return {mean:.2f}{spread}   length {row['eval_length_mean']:.0f}   {played}{unfinished}"


if __name__ == "__main__":
    cli.start(main)
