"""A sweep's folder: every combination is checked, then it is made, and says what is to be done.

sweeps/NAME/sweep.yaml     the groups, their members, and what they share
            01_num_envs-8  a run's folder, for each group; failed.json where it could not be run
            results.csv    a row for each member (`results`)
"""

import itertools
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxrl_fast.config.paths import SWEEP_FILE
from jaxrl_fast.config.settings import to_mapping
from jaxrl_fast.runs import directory
from jaxrl_fast.sweep import grid, slurm
from jaxrl_fast.sweep.directory import FAILED, SweepPlan, read
from jaxrl_fast.sweep.grid import Group
from jaxrl_fast.training import plan
from jaxrl_fast.utils import files, warnings
from jaxrl_fast.utils.files import is_folder_name, path_of
from jaxrl_fast.utils.importing import name_of

MAY_DIFFER = ("seed", "num_seeds", "report_every", "log_level")  # of a group's options: the same sweep may have others


def prepare(asked: grid.SweepRequest) -> SweepPlan:
    """Everything that can be refused is refused here, by a ValueError of one sentence. Then the folder is made."""
    own = asked.own
    if own.launcher == "slurm":
        slurm.check(own.slurm_options)
    if asked.resume:
        sweep = read(path_of(asked.resume, "--resume"))
        _check_found(sweep)
        grid.offer_devices(group.settings for group in sweep.groups.values())
    else:
        if own.workers > 1 or own.launcher != "local":
            _check_names(asked)
        folder = _chosen_folder(asked)
        grid.offer_devices(group.settings for group in asked.groups)
        if folder is not None and directory.is_taken(folder):
            sweep = _again(asked, folder)
        else:
            for group in asked.groups:
                plan.check_services(group.settings.options)
            groups = {
                name: g for name, g in _named(asked.columns, [p for g in asked.groups for p in split_to_fit(g, asked)])
            }
            sweep = _make(asked, groups, folder)
    if own.retry:
        for name in sweep.groups:
            (sweep.folder / name / FAILED).unlink(missing_ok=True)
    return sweep._replace(own=own, log_level=asked.log_level)


def split_to_fit(group: Group, asked: grid.SweepRequest) -> list[Group]:
    """The group in as few equal parts as fit into memory. ValueError where not even one member does, or can run."""
    from jaxrl_fast import agents
    from jaxrl_fast.training import build, memory
    from jaxrl_fast.utils.memory import free_bytes

    one = grid.part(group, group.members[:1])
    try:
        ready = plan.validate_plan(one.settings, one.members)
    except ValueError as error:
        if "\n" in str(error) or not asked.columns:
            raise
        which = grid.words(grid.values_of(one, one.members[0], asked.columns))
        raise ValueError(f"{which}: {error}") from error
    most = len(group.members) if ready.env.on_device else 1  # a host pool has one seed
    if most > 1 and ready.needs and ready.needs.free is not None:
        whole = build.whole_env(one.settings, agents.load(one.settings.algo), ready.num_updates)
        each = ready.needs.total + memory.rollout_bytes(*whole)
        placed = lambda size: ready.placement._replace(num_seeds=size, num_grad_workers=1)
        fits = lambda size: placed(size).num_padded_seeds * each <= (free_bytes(placed(size).num_devices) or 0)
        most = next((size for size in range(most, 1, -1) if fits(size)), 1)
    num_parts = -(-len(group.members) // most)
    ends = [len(group.members) * i // num_parts for i in range(num_parts + 1)]
    return [grid.part(group, group.members[a:b]) for a, b in itertools.pairwise(ends)]


def _again(asked: grid.SweepRequest, folder: Path) -> SweepPlan:
    """A sweep that is asked for again, in the folder that it has. ValueError where it is another."""
    if not (folder / SWEEP_FILE).is_file():
        raise ValueError(f"the folder {folder} exists already and holds no sweep; choose another {_way(asked)}")
    before = read(folder)
    if any(" at 0x" in repr(group.settings.options.env) for group in asked.groups):
        warnings.warn(f"{folder} was trained in objects; nobody can tell whether those that are given are the same")
    now, then = list(_flat(asked.groups)), list(_flat(before.groups.values()))
    if now != then or before.scale != asked.own.scale:
        names = [name for name in now[0] if {str(m[name]) for m in now} != {str(m.get(name)) for m in then}]
        what = f" ({', '.join(names[:3])} differ)" if names else ""
        raise ValueError(f"{folder} is the folder of another sweep{what}; choose another {_way(asked)}")
    ours = iter([(group, member) for group in asked.groups for member in group.members])
    groups = {}
    for name, old in before.groups.items():
        pairs = [next(ours) for _ in old.members]
        groups[name] = grid.part(pairs[0][0], [member for _, member in pairs])
    return before._replace(groups=groups)


def _flat(groups: Any) -> Iterator[dict[str, Any]]:
    """Everything that decides each member's training, in a row."""
    for group in groups:
        for member in group.members:
            content = to_mapping(grid.part(group, [member]).settings)
            agent = {f"agent.{name}": value for name, value in content.pop("agent").items()}
            yield member.label | {k: v for k, v in content.items() if k not in MAY_DIFFER} | agent


def _make(asked: grid.SweepRequest, groups: dict[str, Group], folder: Path | None) -> SweepPlan:
    """The folder, with what is in it written down."""
    import yaml

    taken = lambda chosen: f"the folder {chosen} exists already; choose another {_way(asked)}"
    settings = asked.groups[0].settings
    env_name = directory.name_of_env(name_of(settings.options.env))
    ours = Path("sweeps") / f"{settings.algo_name}_{env_name}_{datetime.now():%Y%m%d-%H%M%S}"
    for chosen in [folder] if folder else [ours, *(ours.with_name(f"{ours.name}-{i}") for i in range(2, 100))]:
        try:
            chosen.mkdir(parents=True)
            break
        except FileExistsError:
            if chosen == folder and not directory.is_taken(chosen):
                break
        except OSError as error:
            raise ValueError(f"the folder {chosen} cannot be made ({error.strerror}); choose another") from error
    else:
        raise ValueError(taken(chosen))
    sweep = SweepPlan(chosen, groups, asked.columns, asked.own.scale, asked.base_num_envs)
    content = {
        "columns": list(sweep.columns),
        "scale": sweep.scale,
        "base_num_envs": sweep.base_num_envs,
        "groups": [
            {"folder": name, "config": to_mapping(g.settings), "members": [m.label for m in g.members]}
            for name, g in groups.items()
        ],
    }
    lock = directory.claim(chosen)
    try:
        if directory.is_taken(chosen):  # by another sweep, since we looked
            raise ValueError(taken(chosen))
        files.replace(chosen / SWEEP_FILE, yaml.safe_dump(content, sort_keys=False))
    finally:
        lock.release()
    return sweep


def _named(columns: tuple[str, ...], groups: list[Group]) -> Iterator[tuple[str, Group]]:
    """01_num_envs-8: a number, and what is the same in the group and not in all."""
    for i, group in enumerate(groups):
        name = f"{i + 1:0{max(len(str(len(groups))), 2)}d}"
        shared = [c for c in columns if c.removeprefix("agent.") not in group.members[0].values]
        for column, value in grid.values_of(group, group.members[0], shared).items():
            name += re.sub(r"[^\w.-]+", "-", f"_{column.removeprefix('agent.')}-{value}")
        yield name[:80], group


def _way(asked: grid.SweepRequest) -> str:
    """The option by which its folder is chosen."""
    return "--sweep-dir" if asked.own.sweep_dir else "--name"


def _chosen_folder(asked: grid.SweepRequest) -> Path | None:
    """What the user asked for."""
    if asked.own.sweep_dir and asked.name:
        said = f"--sweep-dir {asked.own.sweep_dir}"
        raise ValueError(f"--name {asked.name} does not go with {said}, which has the name in it")
    if asked.own.sweep_dir:
        return path_of(asked.own.sweep_dir, "--sweep-dir")
    if not is_folder_name(asked.name):
        raise ValueError(f"--name {asked.name}: a name is wanted, without folders; --sweep-dir takes a path")
    return Path("sweeps") / asked.name if asked.name else None


def _check_found(sweep: SweepPlan) -> None:
    """An environment that was given as an object is written down as Python shows it, by which nobody finds it."""
    for group in sweep.groups.values():
        env = group.settings.options.env
        if re.search(r"[^\w./:-]", env):
            again = "it goes on by jaxrl_fast.sweep(...) with the same arguments"
            raise ValueError(f"--resume {sweep.folder}: its environment was given as an object ({env}); {again}")


def _check_names(asked: grid.SweepRequest) -> None:
    """Other processes know environments by name only."""
    for group in asked.groups:
        if not isinstance(group.settings.options.env, str):
            raise ValueError("other processes know an environment by its name only; give package.module:Class")
