"""Extend an existing sweep: add values of its options, or make its runs longer.

Afterwards the sweep has every combination of old and new values. Existing trainings keep their groups, and so their
folders, programs and numbers. The missing combinations form new groups.
"""

import dataclasses
import itertools
import math
import typing
from collections.abc import Callable, Mapping, Sequence

from jaxrl_fast.config.convert import convert
from jaxrl_fast.config.paths import SWEEP_FILE
from jaxrl_fast.config.settings import (
    Request,
    Settings,
    plain,
    to_mapping,
    with_algorithm,
)
from jaxrl_fast.config.sources import Setting, from_mapping
from jaxrl_fast.options.declare import Option
from jaxrl_fast.sweep import grid, scaling, values
from jaxrl_fast.sweep.directory import SweepPlan
from jaxrl_fast.sweep.grid import Group

Axes = Mapping[str, list[Setting]]  # the values of options, by name
LENGTH = "total_steps"


def extend(
    sweep: SweepPlan, added: Sequence[Setting], split: Callable[[Option, Setting], list[Setting]]
) -> tuple[SweepPlan, list[Group]]:
    """Return the sweep with its new columns and its new length, and groups of the trainings that it lacks.

    Args:
        sweep: The existing sweep.
        added: The options to extend it by, as they were written.
        split: Returns the values of an option (`values.split_words` or `values.split_values`).

    Raises:
        ValueError: If an option is not valid, or would change existing trainings.
    """
    first = next(iter(sweep.groups.values())).settings
    asked = Request(first.algo, "", from_mapping(to_mapping(first)), added)
    known = first.known
    fixed, several = grid.sort_out(with_algorithm(asked, SWEEP_FILE), split)
    given = {setting.name: [setting] for setting in fixed} | several
    for name, settings in given.items():
        if any(name not in group.settings.known for group in sweep.groups.values()):
            problem = f"not every run of the sweep has this option, got {plain(tuple(settings[0].values))}"
            raise ValueError(f"{settings[0].origin}: {problem}; start another sweep for it")
        _check_extends(sweep, known[name], name, settings)
    if length := given.pop(LENGTH, []):
        sweep = _lengthen(sweep, convert(known[LENGTH], length[0]), length[0].origin)
    trainings = [grid.part(group, [m]).settings for group in sweep.groups.values() for m in group.members]
    axes = _with_old_values(trainings, given, known)
    missing = _missing(trainings, axes, sweep.columns)
    columns = dict.fromkeys((*sweep.columns, *(name for name in axes if name != "seed")))
    varied = {name for group in sweep.groups.values() for name in group.members[0].values}
    varied |= {*axes}
    return sweep._replace(columns=(*columns,)), grid.groups_of(iter(missing), varied)


def _check_extends(sweep: SweepPlan, option: Option, name: str, settings: list[Setting]) -> None:
    """Raise ValueError if an option cannot extend the sweep."""
    origin, found = settings[0].origin, [convert(option, setting) for setting in settings]
    got = f"got {', '.join(map(plain, found))}"
    if name == LENGTH:
        if len(found) > 1 or LENGTH in sweep.columns:
            problem = "takes one value" if len(found) > 1 else "differs between the runs of this sweep"
            raise ValueError(f"{origin}: {problem}, {got}; start another sweep for several lengths")
        return
    if not option.sweepable or option.resumable or typing.get_origin(option.kind) is dict:
        remedy = "give seed 3,4 for more seeds" if name == "num_seeds" else "start another sweep for it"
        raise ValueError(f"{origin}: would change the existing runs of the sweep, {got}; {remedy}")
    if sweep.scale != "none" and name in ("num_envs", scaling.SCALED[sweep.scale]):
        raise ValueError(f"{origin}: cannot extend a sweep with scale {sweep.scale}, {got}; start another sweep")
    if "auto" in found and "auto" in option.words:
        raise ValueError(f"{origin}: must be a number to extend a sweep, {got}; give the number")


def _lengthen(sweep: SweepPlan, total_steps: int, origin: str) -> SweepPlan:
    """Return the sweep with longer runs. Raise ValueError if they would be shorter."""
    now = next(iter(sweep.groups.values())).settings.options.total_steps
    if total_steps < now:
        raise ValueError(f"{origin}: must be at least the {now} steps of the sweep, got {total_steps}")
    return sweep._replace(groups={name: _with_length(g, total_steps) for name, g in sweep.groups.items()})


def _with_length(group: Group, total_steps: int) -> Group:
    """Return a group of longer runs."""
    options = dataclasses.replace(group.settings.options, total_steps=total_steps)
    return group._replace(settings=group.settings._replace(options=options))


def _with_old_values(trainings: Sequence[Settings], given: Axes, known: Mapping[str, Option]) -> Axes:
    """Return all values, old and given, of each option that has a new one."""
    axes = {}
    for name, settings in given.items():
        old = values.without_repeats(
            known[name], [values.setting_of(name, training.value(name)) for training in trainings]
        )
        both = values.without_repeats(known[name], [*old, *settings])
        if len(both) > len(old):
            axes[name] = both
    return axes


def _missing(trainings: Sequence[Settings], axes: Axes, columns: Sequence[str]) -> list[Settings]:
    """Return the combinations of values that the sweep lacks. Each is a copy of a training, apart from these values.

    A combination is its values of `columns`, `axes` and the seed. Other options may follow from them, such as the
    solved threshold from the environment, and are those of the training that is copied.
    """
    names = [*dict.fromkeys((*columns, *axes, "seed"))]
    of = lambda settings, chosen: repr([settings.value(name) for name in chosen])
    bases: dict[str, list[Settings]] = {}  # by all other values
    for training in trainings:
        bases.setdefault(of(training, [name for name in names if name not in axes]), []).append(training)
    number = len(bases) * math.prod(map(len, axes.values()))
    if number > values.MAX_VALUES:
        raise ValueError(f"a sweep has at most {values.MAX_VALUES} trainings, got {number}; give fewer values")
    existing = {of(training, names) for training in trainings}
    known = {name: option for training in trainings for name, option in training.known.items()}
    others = [name for name in axes if name != "seed"]
    found: list[Settings] = []
    for similar in bases.values():
        same_values = {of(training, others): training for training in reversed(similar)}
        same_env = {training.options.env: training for training in reversed(similar)}
        for combination in itertools.product(*(axes[name] for name in others)):
            given = [convert(known[setting.name], setting) for setting in combination]
            base = same_values.get(repr(given)) or same_env.get(dict(zip(others, given)).get("env"), similar[0])
            asked = with_algorithm(Request("", "", from_mapping(to_mapping(base)), []), SWEEP_FILE)
            fixed = [values.setting_of(name, base.value(name)) for name in columns if name == "solved_threshold"]
            one = {setting.name: [setting] for setting in combination} | {n: axes[n] for n in axes if n == "seed"}
            found += [each for each in grid.resolve_all(asked, fixed, one) if of(each, names) not in existing]
    return found
