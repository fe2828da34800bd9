"""What --help says: every option with its group, its meaning and its default."""

import dataclasses
from typing import Any

from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.naming import PROGRAM
from jaxrl_fast.options import DEFAULT, Options
from jaxrl_fast.written import listed, shipped


def print_help(
    algo: str, options: Options, agent: Any, program: str = PROGRAM, says: str = "Trains {}.", *more: Any
) -> None:
    """For this algorithm, with these options and its own as the defaults; those of `more` dataclasses first."""
    import tyro

    groups = [*reversed(Options.__bases__), type(agent)]
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
        description=f"{says.format(algo)} --config takes a file or one of: {listed(shipped())}. Options given "
        "override it. Numbers may be written 1e6, 64k, 10M. Without an algorithm, a preset or an environment: "
        f"--config {DEFAULT['config']} --stop-when-solved.",
        registry=help_registry(),
    )


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
