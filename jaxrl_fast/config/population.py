"""Define members of a population: trainings that differ only in seeds and real numbers, so one program runs them all.

Standard library only, so that a sweep is laid out before jax is imported.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxrl_fast.options.declare import options_of, value_of

LABEL = "option."  # begins the names of hyperparameters in records, where learning_rate is the current rate
Label = tuple[tuple[str, Any], ...]  # names and values that identify a member


class Member(NamedTuple):
    """One training of a population."""

    seed: int
    values: Mapping[str, float] = {}  # hyperparameters in which members differ, by name

    @property
    def label(self) -> dict[str, Any]:
        """Return the seed and the values as records name them: "option.learning_rate"."""
        return {"seed": self.seed} | {LABEL + name: value for name, value in self.values.items()}


def real_numbers(config: Any) -> tuple[str, ...]:
    """Return the hyperparameters of which members of one program may have different values.

    They are declared as `traced`. A value that leaves code out (None, or 0 where "nonzero" is declared) is another
    program.
    """
    traced = {name: option.traced for name, option in options_of(config).items() if option.traced}
    present = lambda value, kind: value is not None and (value != 0 or kind != "nonzero")
    return tuple(name for name, kind in traced.items() if present(value_of(config, name), kind))


def in_line(seed: int, num_seeds: int) -> tuple[Member, ...]:
    """Return members that differ in consecutive seeds."""
    return tuple(Member(seed + i) for i in range(num_seeds))


def member_of(record: Mapping[str, Any]) -> Label:
    """Return the member that a line of metrics.jsonl describes."""
    return tuple((name, value) for name, value in record.items() if name == "seed" or name.startswith(LABEL))


def by_member(records: Iterable[Mapping[str, Any]]) -> dict[Label, list[Mapping[str, Any]]]:
    """Return the lines of each member, in the order of the first ones."""
    found: dict[Label, list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(member_of(record), []).append(record)
    return found
