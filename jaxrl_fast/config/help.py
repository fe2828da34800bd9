"""Print --help: every option by group, with its values, meaning and default. Standard library only."""

import dataclasses
import shutil
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.config.convert import SWITCHES
from jaxrl_fast.config.names import PROGRAM
from jaxrl_fast.config.options import DEFAULT, Options
from jaxrl_fast.config.presets import shipped
from jaxrl_fast.config.sources import SINGULAR, join_names
from jaxrl_fast.utils.option import Importable, Option, Period, Seconds, options_of

ONLY = {
    "continuous": "continuous actions only",
    "several_envs": "several environments only",
    "no_simba": "no effect on network simba",
    "images": "observations [H, W] and [H, W, C] only",
    "several_steps": "several gradient steps in an update only",
}
MAX_WIDTH, COLUMN = 120, 30  # characters of a line, and the column where descriptions begin
NAMES = {
    int: "N",
    float: "X",
    Seconds: "TIME",
    Period: "STEPS|TIME",
    Importable: "MODULE:CLASS",
    str: "TEXT",
    Any: "VALUE",
}


def print_run_help(
    algo: str,
    options: Options,
    agent: Any,
    program: str = PROGRAM,
    says: str = "Train {}.",
    more: Sequence[Any] = (),
    without: Sequence[str] = (),
) -> None:
    """Print the help of a command that trains, with the defaults of the instances; `more` groups come first."""
    by_default = f"--config {DEFAULT['config']} --stop-when-solved"
    default = f"Without an algorithm, --config or --env, the default is {by_default}."
    intro = f"{says.format(algo)} Numbers may be written 1e6, 64k, 10M. {default}"
    lines = [*_wrap(intro), "", *_wrap("--config takes a file or a preset; given options override it:")]
    families: dict[str, list[str]] = {}
    for name in shipped():
        families.setdefault(name.split("_")[0], []).append(name)
    for names in families.values():
        lines += _wrap(join_names(names), "  ", "    ")
    print_help(f"{program} [{'|'.join(CONFIGS)}|MODULE] [--config PRESET] [options]", lines, [])
    for group in more:
        _print_group(group, "")
    for kind in reversed(Options.__bases__):
        _print_group(kind(**{f.name: getattr(options, f.name) for f in dataclasses.fields(kind)}), "", without)
    _print_group(agent, "agent.")


def print_help(usage: str, description: Sequence[str], groups: Sequence[Any]) -> None:
    """Print the usage and description of a command, and the options of dataclass instances with their defaults."""
    print(f"usage: {usage}\n")
    for line in description:
        print(line)
    for group in groups:
        _print_group(group, "")


def _print_group(group: Any, prefix: str, without: Sequence[str] = ()) -> None:
    kind = type(group)
    about = "" if (kind.__doc__ or "").startswith(f"{kind.__name__}(") else (kind.__doc__ or "").partition("\n")[0]
    title = "agent" if prefix else kind.__name__.removesuffix("Options").lower() or "options"
    print("\n" + "\n".join(_wrap(f"{title}: {about}")))
    for name, option in options_of(kind).items():
        if name not in without:
            print("\n".join(_describe(option, prefix, getattr(group, name))))


def _describe(option: Option, prefix: str, default: Any) -> list[str]:
    """Return the lines of one option."""
    name = option.name.replace("_", "-")
    names = "--" + SINGULAR.get(prefix + option.name, prefix + name).replace("_", "-")
    names += f", --{prefix}no-{name}" if option.kind in SWITCHES else f" {_takes(option.kind, option.words)}"
    notes = [] if default in ("", (), {}) else [f"default: {_written(default)}"]
    notes += [option.bounds.short] if option.bounds else []
    if option.needs:
        switch, *values = option.needs
        needed = "" if values == [True] else f" {' or '.join(map(_written, values))}"
        notes.append(f"needs --{prefix}{switch.replace('_', '-')}{needed}")
    notes += [ONLY[option.only]] if option.only else []
    indent = " " * COLUMN
    meaning = _wrap(f"{option.help} ({', '.join(notes)})" if notes else option.help or "-", indent, indent)
    head = f"  {names}"
    return [head + meaning[0][len(head) :], *meaning[1:]] if len(head) < COLUMN - 1 else [head, *meaning]


def _takes(kind: Any, words: Sequence[str] = ()) -> str:
    """Return the placeholder of an option's value: N, {tanh|relu}, N ..."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (dict, tuple):
        return "KEY=VALUE ..." if origin is dict else f"{_takes(arguments[0])} ..."
    if origin is Literal:
        return f"{{{'|'.join(filter(None, arguments))}}}"
    parts = arguments if origin in (typing.Union, types.UnionType) else (kind,)
    found = [NAMES.get(part, "") or "|".join(typing.get_args(part)) for part in parts if part is not types.NoneType]
    return "|".join((*found, *words))


def _written(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else "none" if value is None else str(value)


def width() -> int:
    """Return the width of a line on this terminal."""
    return max(min(shutil.get_terminal_size().columns, MAX_WIDTH), COLUMN + 20)


def _wrap(text: str, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(text, width(), initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
