"""Members of a population: trainings that differ in seeds and real numbers only, so that one program runs them all.

Standard library only, so that a sweep is laid out before jax is imported.
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxrl_fast.agents.configs import CONFIGS

# They decide more than numbers: the replay ratio is counted as a fraction, and v_min has to be below v_max.
STATIC = ("replay_ratio", "v_min", "v_max")
Label = tuple[tuple[str, Any], ...]  # names and values that tell a member apart
OFF_AT_ZERO = ("max_grad_norm",)  # 0 leaves code out; other real numbers at 0 are numbers like others


class Member(NamedTuple):
    """One training of a population."""

    seed: int
    values: Mapping[str, float] = {}  # hyperparameters in which members differ, by name

    @property
    def label(self) -> dict[str, Any]:
        """What tells it apart, as records have it: "learning_rate" is there as what it is now, so this is "agent."."""
        return {"seed": self.seed} | {f"agent.{name}": value for name, value in self.values.items()}


def real_numbers(config: Any) -> tuple[str, ...]:
    """Names of the hyperparameters that members of one program may have values of their own of.

    By rule: what is declared a real number. Not what STATIC names, and not a value that leaves code out (None, or 0 of
    OFF_AT_ZERO): it is another program. Of an algorithm of one's own, which may ask its numbers for more than
    arithmetic, only what its Config says are `traced`.
    """
    kinds = typing.get_type_hints(type(config))
    own = None if type(config) in CONFIGS.values() else getattr(config, "traced", ())
    declared = (f.name for f in dataclasses.fields(config) if kinds[f.name] in (float, float | None))
    present = lambda name: (value := getattr(config, name)) is not None and (value != 0 or name not in OFF_AT_ZERO)
    able = lambda name: name not in STATIC and (own is None or name in own)
    return tuple(name for name in declared if able(name) and present(name))


def in_line(seed: int, num_seeds: int) -> tuple[Member, ...]:
    """Seeds from here on."""
    return tuple(Member(seed + i) for i in range(num_seeds))


def member_of(record: Mapping[str, Any]) -> Label:
    """Which member a line of metrics.jsonl is of."""
    return tuple((name, value) for name, value in record.items() if name == "seed" or name.startswith("agent."))


def by_member(records: Iterable[Mapping[str, Any]]) -> dict[Label, list[Mapping[str, Any]]]:
    """The lines of each member, in the order of its first one."""
    found: dict[Label, list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(member_of(record), []).append(record)
    return found
