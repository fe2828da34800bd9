"""What --help says: every option with its group, its meaning and its default."""

import dataclasses
import shutil
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.config.names import PROGRAM
from jaxrl_fast.config.options import DEFAULT, Options
from jaxrl_fast.config.presets import shipped
from jaxrl_fast.config.sources import join_names


def print_help(
    algo: str,
    options: Options,
    agent: Any,
    program: str = PROGRAM,
    says: str = "Trains {}.",
    *more: Any,
    without: Sequence[str] = (),
) -> None:
    """For this algorithm, with these options and its own as the defaults; those of `more` dataclasses first."""
    import tyro

    groups = [*(_without(group, without) for group in reversed(Options.__bases__)), type(agent)]
    names = [*(g.__name__.lower() for g in groups[:-1]), "agent"]
    markers = [tyro.conf.OmitArgPrefixes] * (len(groups) - 1) + [None]
    fields: list[Any] = [(type(g).__name__.lower(), tyro.conf.OmitArgPrefixes[type(g)]) for g in more]  # type: ignore[misc]
    fields += [(n, m[g] if m else g) for n, g, m in zip(names, groups, markers)]
    shape = dataclasses.make_dataclass("Help", fields)
    parts = [g(**{f.name: getattr(options, f.name) for f in dataclasses.fields(g)}) for g in groups[:-1]]
    tyro.cli(
        shape,
        args=["--help"],
        default=shape(*more, *parts, agent),
        prog=f"{program} [{'|'.join(CONFIGS)}|MODULE] [--config PRESET]",
        description=_description(says.format(algo)),
        registry=help_registry(),
    )


def _description(says: str) -> str:
    """What is not said of one option, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, 120)
    said = f"{says} Numbers may be written 1e6, 64k, 10M. Without an algorithm, a preset or an environment: "
    said += f"--config {DEFAULT['config']} --stop-when-solved."
    lines = [*textwrap.wrap(said, width), "", "--config takes a file or a preset; options given override it:"]
    families: dict[str, list[str]] = {}
    for name in shipped():
        families.setdefault(name.split("_")[0], []).append(name)
    for of in families.values():
        lines += textwrap.wrap(join_names(of), width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _without(group: type, names: Sequence[str]) -> type:
    """A dataclass of options, of which the help does not show these."""
    import tyro

    hidden = [f for f in dataclasses.fields(group) if f.name in names]
    if not hidden:
        return group
    fields = [(f.name, Annotated[f.type, tyro.conf.Suppress], f) for f in hidden]
    told = {"__doc__": group.__doc__}
    return dataclasses.make_dataclass(group.__name__, fields, bases=(group,), namespace=told, frozen=True)


def help_registry() -> Any:
    """How the help shows what tyro would not: a dictionary."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()
    as_pairs = PrimitiveConstructorSpec(
        nargs="*",
        metavar="KEY=VALUE ...",
        instance_from_str=lambda texts: dict(text.split("=", 1) for text in texts),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{k}={v}" for k, v in value.items()],
    )
    registry.primitive_rule(lambda info: as_pairs if info.type_origin is dict else None)
    return registry
