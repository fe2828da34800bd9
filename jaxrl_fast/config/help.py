"""Print --help: a short list of options, one part, one group, or everything. Standard library only."""

import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxrl_fast.config.convert import SWITCHES
from jaxrl_fast.config.presets import shipped
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.config.sources import PROGRAM, SINGULAR, join_names
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import (
    Importable,
    Option,
    Period,
    RayActors,
    Seconds,
    complete,
    fields_of,
    options_of,
    value_of,
)
from jaxrl_fast.options.run import DEFAULT, Options
from jaxrl_fast.utils.parsing import nearest

MAX_WIDTH, COLUMN = 120, 30  # characters of a line, and the column where descriptions begin
NAMES = {
    int: "N",
    float: "X",
    Seconds: "TIME",
    Period: "STEPS|TIME",
    RayActors: "ray:N",
    Importable: "MODULE:CLASS",
    str: "TEXT",
    Any: "VALUE",
}
BRIEF = ("task", "evaluation")  # groups of a run's options that the short help lists


class RunCommand(NamedTuple):
    """The help of a command that trains."""

    program: str = PROGRAM
    says: str = "Train {}."  # what the command does, with the algorithm in braces
    more: Sequence[Any] = ()  # records of further options, which come first
    without: Sequence[str] = ()  # names of options that the command does not have


TRAIN = RunCommand()


def print_run_help(topic: str, settings: Settings, command: RunCommand = TRAIN) -> None:
    """Print the help of a command that trains, with the values of the settings as defaults.

    Args:
        topic: "" for a short list, "all", a group ("output"), or an option or a part by its name ("memory").
        settings: The settings of the run.
        command: The command.

    Raises:
        ValueError: For an unknown topic.
    """
    options, agent = settings.options, settings.agent
    program, says, more, without = command
    groups = {title(record): record for record in more}
    groups |= {title(kind): kind for kind in reversed(Options.__bases__)} | {"agent": agent}
    if topic in groups:
        _print_group(topic, groups[topic], options, without)
    elif topic in ("", "all"):
        _print_intro(settings.algo, program, says)
        for name, group in groups.items():
            if topic or name in BRIEF or group in (*more, agent):
                _print_group(name, group, options, without, is_brief=not topic)
        if not topic:
            others = [name for name in groups if name not in (*BRIEF, "agent") and groups[name] not in more]
            lists = f"{', '.join(others)}; --help NAME lists them, or shows an option or a part; --help all shows all."
            print("\n" + "\n".join(_wrap(f"more options: {lists}")))
    else:
        _print_topic(topic.replace("-", "_"), [*more, options, agent], [*groups, "all"])


def title(group: Any) -> str:
    """Return the name of a group of options, from its class."""
    kind = group if isinstance(group, type) else type(group)
    return kind.__name__.removesuffix("Options").lower() or "options"


def print_help(usage: str, description: Sequence[str], groups: Sequence[Any]) -> None:
    """Print the usage and description of a command, and the options of records with their defaults."""
    print(f"usage: {usage}\n")
    for line in description:
        print(line)
    for group in groups:
        _print_group(title(group), group, group, ())


def _print_intro(algo: str, program: str, says: str) -> None:
    print(f"usage: {program} [{'|'.join(ALGORITHMS)}|MODULE] [--config PRESET] [options]\n")
    by_default = f"--config {DEFAULT['config']} --stop-when-solved"
    default = f"Without an algorithm, --config or --env, the default is {by_default}."
    intro = f"{says.format(algo)} Numbers may be written 1e6, 64k, 10M. {default}"
    lines = [*_wrap(intro), "", *_wrap("--config takes a file or a preset; given options override it:")]
    families: dict[str, list[str]] = {}
    for name in shipped():
        families.setdefault(name.split("_")[0], []).append(name)
    for names in families.values():
        lines += _wrap(join_names(names), "  ", "    ")
    print("\n".join(lines))


def _print_group(name: str, group: Any, values: Any, without: Sequence[str], is_brief: bool = False) -> None:
    """Print a group. `group` is a record, or a base of the type of `values`, which has the defaults then."""
    kind = group if isinstance(group, type) else type(group)
    record = values if isinstance(group, type) else group
    about = "" if (kind.__doc__ or "").startswith(f"{kind.__name__}(") else (kind.__doc__ or "").partition("\n")[0]
    print("\n" + "\n".join(_wrap(f"{name}: {about}")))
    own = fields_of(kind)
    for path, option in options_of(record).items():
        first, _, inner = path.partition(".")
        if first not in own or first in without or inner and is_brief:
            continue
        if "" not in option.parts:
            print("\n".join(_describe(option, value_of(record, path), is_brief)))


def _print_topic(topic: str, records: Sequence[Any], others: Sequence[str]) -> None:
    """Print an option, or a part with the options of all its alternatives."""
    known = {path: (option, record) for record in records for path, option in options_of(record).items()}
    paths = complete(topic, known)
    if not paths:
        choices = [path for path, (option, _) in known.items() if option.parts]
        hint = nearest(topic, [*known, *others]) or f"; use all, or one of {join_names([*others, *choices])}"
        raise ValueError(f"help: no option, part or group has this name, got {topic}{hint}")
    for path in paths:
        option, record = known[path]
        print("\n".join(_describe(option, value_of(record, path))))
        printed = set[tuple[str, Any]]()
        for words, part in _alternatives(option) if "" not in option.parts else [("", option.parts[""])]:
            own = {inner.name: (inner, value_of(part, inner.name)) for inner in options_of(part).values()}
            new = [pair for name, pair in own.items() if (name, pair[1]) not in printed]
            printed |= {(name, default) for name, (_, default) in own.items()}
            about = (part.__doc__ or "").partition("\n")[0] + " It has the options above, too." * (len(new) < len(own))
            print("\n" + "\n".join(_wrap(f"--{path.replace('_', '-')} {words}: {about}")))
            for inner, default in new:
                print("\n".join(_describe(inner._replace(name=f"{path}.{inner.name}"), default)))


def _alternatives(option: Option) -> Iterator[tuple[str, Any]]:
    """Yield the words and the part of each alternative; alternatives with the same options are one."""
    found: dict[type, tuple[list[str], Any]] = {}
    for word, part in option.parts.items():
        found.setdefault(type(part), ([], part))[0].append(word)
    if option.custom:
        found.setdefault(type(option.custom), ([], option.custom))[0].append("MODULE:CLASS")
    for words, part in found.values():
        yield ", ".join(words), part


def _describe(option: Option, default: Any, is_brief: bool = False) -> list[str]:
    """Return the lines of one option; if brief, with the first sentence of its help."""
    name = option.name.replace("_", "-")
    place, dot, last = name.rpartition(".")
    names = "--" + SINGULAR.get(option.name, name).replace("_", "-")
    names += f", --{place}{dot}no-{last}" if option.kind in SWITCHES else f" {_takes(option)}"
    notes = [] if default is False or default in ("", (), {}) else [f"default: {_written(default)}"]
    notes += [option.bounds.short] if option.bounds and not is_brief else []
    indent = " " * COLUMN
    text = (re.split(r"(?<! al)\. |; ", option.help)[0].rstrip(".") + "." if is_brief else option.help) or "-"
    meaning = _wrap(f"{text} ({', '.join(notes)})" if notes else text, indent, indent)
    head = f"  {names}"
    return [head + meaning[0][len(head) :], *meaning[1:]] if len(head) < COLUMN - 1 else [head, *meaning]


def _takes(option: Option) -> str:
    """Return the placeholder of an option's value: N, tanh|relu, N ..."""
    return "|".join([*option.parts, *(["MODULE:CLASS"] if option.custom else [])]) or _placeholder(
        option.kind, option.words
    )


def _placeholder(kind: Any, words: Sequence[str] = ()) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (dict, tuple):
        return "KEY=VALUE ..." if origin is dict else f"{_placeholder(arguments[0])} ..."
    if origin is Literal:
        return "|".join(filter(None, arguments))
    parts = arguments if origin in (typing.Union, types.UnionType) else (kind,)
    found = [NAMES.get(part, "") or "|".join(typing.get_args(part)) for part in parts if part is not types.NoneType]
    return "|".join((*found, *words))


def _written(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if isinstance(value, Mapping):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else "none" if value is None else str(value)


def width() -> int:
    """Return the width of a line on this terminal."""
    return max(min(shutil.get_terminal_size().columns, MAX_WIDTH), COLUMN + 20)


def _wrap(text: str, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(text, width(), initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
