"""Export the policy of a run: `python -m jaxrl_fast.export RUN --to stablehlo|onnx|npz`."""

from collections.abc import Sequence

from jaxrl_fast.config import cli
from jaxrl_fast.evaluation.export import Export, Options, export_run, write
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.warnings import print_stderr

USAGE = cli.CommandSpec(
    "python -m jaxrl_fast.export",
    "RUN",
    Options,
    "Export the policy of a run for programs without jaxrl_fast: write a folder with the policy and its card.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    return cli.run_command(prepare, act, argv)


def prepare(argv: Sequence[str]) -> Export:
    """Read the command line and the run's folder. Return the exported policy."""
    (folder,), options = cli.read(USAGE, argv)
    return export_run(path_of(folder), options)


def act(export: Export) -> int:
    """Write the folder, and print its contents and how to load it. Return the exit status."""
    try:
        folder = write(export)
    except FileExistsError:  # created by another program since `prepare` looked
        print_stderr(f"error: out: was created meanwhile, got {export.folder}; choose another folder")
        return 1
    for line in lines(export):
        print(line)
    print(f"written  {folder}")
    return 0


def lines(export: Export) -> list[str]:
    """Return the lines to print: the policy, its inputs and outputs, and the code that loads it."""
    card = export.card
    title = f"{card['algo']} · {card['env_id']} · {card['policy']} policy of {card['checkpoint']} as {card['format']}"
    arrays = [
        f"{kind:<8} {x['name']}: {x['dtype']}[{', '.join(map(str, x['shape']))}]"
        for kind, name in (("input", "inputs"), ("output", "outputs"))
        for x in card[name]
    ]
    code = export.files.get("policy.py", b"").decode().splitlines()
    return [title, *arrays, "", *(f"    {line}" for line in (*code, *[""] * bool(code), *card["load"])), ""]


if __name__ == "__main__":
    cli.start(main)
