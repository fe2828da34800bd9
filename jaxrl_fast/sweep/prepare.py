"""Validate every combination of a sweep, then create its folder.

sweeps/NAME/sweep.yaml     the groups, their members, and their common settings
            01_num_envs-8  a run's folder for each group; it holds failed.json if the group failed
            results.csv    a row for each member (`table`)
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxrl_fast.config.parts import by_path
from jaxrl_fast.config.paths import FORMAT, SWEEP_FILE, SWEEP_TABLE, SWEEPS
from jaxrl_fast.config.population import Member
from jaxrl_fast.config.settings import Settings, to_mapping
from jaxrl_fast.options.run import Launch, SweepOptions
from jaxrl_fast.runs import directory
from jaxrl_fast.sweep import extend, grid, ray_tasks, slurm
from jaxrl_fast.sweep.directory import FAILED, SweepPlan, read_plan, unfinished
from jaxrl_fast.sweep.grid import Group
from jaxrl_fast.training import checks, plan
from jaxrl_fast.utils import files, warnings
from jaxrl_fast.utils.errors import blamed
from jaxrl_fast.utils.files import current_folder, path_of
from jaxrl_fast.utils.importing import name_of

OPTION = "sweep_dir"
ENV_COLUMNS = {"env", "env_options"}
MAY_DIFFER = ("seed", "num_seeds", "console_every", "log_level")  # options that a resumed sweep may change


def prepare(request: grid.SweepRequest) -> SweepPlan:
    """Validate the whole sweep, then create its folder or read the plan of the sweep to resume.

    Raises:
        ValueError: If any option or combination is not valid; the message is one line.
    """
    sweep_options, start = request.own, current_folder()
    check_launcher(sweep_options)
    if request.resume:
        sweep = read_plan(path_of(request.resume, "resume"))
        _check_env_names(sweep)
        sweep = _extended(sweep, request) if request.added else sweep
        grid.offer_devices(group.settings for group in sweep.groups.values())
        _check_can_continue(sweep)
        _check_members(sweep, sweep_options)
    else:
        if sweep_options.workers > 1 or sweep_options.launcher != "local":
            check_no_env_objects(group.settings for group in request.groups)
        folder = path_of(sweep_options.sweep_dir, OPTION) if sweep_options.sweep_dir else None
        grid.offer_devices(group.settings for group in request.groups)
        if folder is not None and directory.is_taken(folder):
            sweep = _resume_same(request, folder)
            _check_members(sweep, sweep_options)
        else:
            parts = _fitting(request.groups, request.columns, has_several_tasks(sweep_options))
            sweep = _create(request, dict(_with_names(request.columns, parts)), folder, start)
    if sweep_options.launcher == "ray":
        ray_tasks.check_nodes(sweep.folder / SWEEP_FILE, OPTION)
    if sweep_options.retry:
        for name in sweep.groups:
            (sweep.folder / name / FAILED).unlink(missing_ok=True)
    return sweep._replace(sweep_options=sweep_options, log_level=request.log_level)


def check_launcher(own: Launch) -> None:
    """Raise ValueError if the launcher is missing, or rejects its options."""
    if own.launcher == "slurm":
        slurm.check(own.slurm_options)
    if own.launcher == "ray":
        ray_tasks.check(own.ray_options)


def has_several_tasks(own: SweepOptions) -> bool:
    """Return whether several processes train each run of a sweep."""
    return own.launcher == "slurm" and slurm.num_tasks(own.slurm_options) > 1


def _fitting(groups: Sequence[Group], columns: Sequence[str], one_by_one: bool = False) -> list[Group]:
    """Return new groups in parts that fit into memory. Raise ValueError for one that is not valid.

    `one_by_one`: a group for each training, whose settings hold its values. `train` runs it.
    """
    if one_by_one:
        groups = [Group(grid.part(each, [m]).settings, (Member(m.seed),)) for each in groups for m in each.members]
    for group in groups:
        checks.check_services(group.settings.options)
    return [part for group in groups for part in split_to_fit(group, columns)]


def split_to_fit(group: Group, columns: Sequence[str]) -> list[Group]:
    """Return the group in as few equal parts as fit into memory.

    Raises:
        ValueError: If a single member does not fit, or is not valid.
    """
    from jaxrl_fast.training import memory

    ready = _validate_first(group, columns)
    one_by_one = not ready.env.on_device or ready.agent.learning.resources  # a part on the host supports one seed only
    max_members = 1 if one_by_one else len(group.members)
    if max_members > 1 and ready.needs and ready.needs.free is not None:
        member_bytes = ready.needs.total - ready.needs.data + memory.rollout_bytes(ready.env, ready.agent)
        data_bytes = ready.needs.data // ready.placement.num_devices
        placed = lambda size: ready.placement._replace(num_seeds=size, num_grad_workers=1)
        free = lambda size: memory.free_bytes(placed(size).num_devices) or 0
        of_data = lambda size: placed(size).num_devices * data_bytes
        fits = lambda size: placed(size).num_padded_seeds * member_bytes + of_data(size) <= free(size)
        max_members = next((size for size in range(max_members, 1, -1) if fits(size)), 1)
    num_parts = -(-len(group.members) // max_members)
    ends = [len(group.members) * i // num_parts for i in range(num_parts + 1)]
    return [grid.part(group, group.members[a:b]) for a, b in itertools.pairwise(ends)]


def _validate_first(group: Group, columns: Sequence[str]) -> plan.Plan:
    """Return the plan of a group's first member. Raise ValueError, with its values, if it is not valid."""
    one = grid.part(group, group.members[:1])
    try:
        return plan.validate_plan(one.settings, one.members)
    except ValueError as error:
        if "\n" in str(error) or not columns or blamed(error):
            raise
        named = ENV_COLUMNS.intersection(columns) if _is_of_env(error, one) else columns
        which = grid.words(grid.values_of(one, one.members[0], [c for c in columns if c in named]))
        raise ValueError(f"{which}: {error}" if which else str(error)) from error


def _is_of_env(error: ValueError, group: Group) -> bool:
    """Return whether the environment alone, without any other option, raises this error."""
    from jaxrl_fast import envs

    options = group.settings.options
    try:
        envs.make(options.env, 1, **options.env_options)
    except ValueError as of_env:
        return str(of_env) == str(error)
    return False


def _extended(sweep: SweepPlan, request: grid.SweepRequest) -> SweepPlan:
    """Return the sweep with the values that the request adds, and write sweep.yaml. Nothing is written if invalid."""
    longer, missing = extend.extend(sweep, request.added, request.split)
    grid.offer_devices(group.settings for group in (*longer.groups.values(), *missing))
    for name in sweep.groups:
        if (sweep.folder / name).is_dir():
            directory.claim(sweep.folder / name).release()
    for name in (n for n in unfinished(longer) if longer.groups[n] != sweep.groups[n]):
        _validate_first(longer.groups[name], longer.columns)
        directory.checkpoint_to_resume(sweep.folder / name)
    parts = _fitting(missing, longer.columns, has_several_tasks(request.own))
    new = _with_names(longer.columns, parts, len(sweep.groups))
    longer = longer._replace(groups={**longer.groups, **dict(new)})
    lock = directory.claim(sweep.folder)
    try:
        if read_plan(sweep.folder)._replace(place=sweep.place) != sweep:
            raise ValueError(
                f"resume {sweep.shown(sweep.folder)}: another process has extended the sweep; repeat the command"
            )
        _keep_table(sweep, longer)
        _write(longer)
    finally:
        lock.release()
    return longer


def _keep_table(sweep: SweepPlan, longer: SweepPlan) -> None:
    """Copy the table of a sweep before its runs are extended: results_1000000.csv keeps the results so far."""
    before, after = (next(iter(each.groups.values())).settings.options.total_steps for each in (sweep, longer))
    table = sweep.folder / SWEEP_TABLE
    if after > before and table.is_file():
        files.replace(table.with_stem(f"{table.stem}_{before}"), table.read_text(encoding="utf-8"))


def _resume_same(request: grid.SweepRequest, folder: Path) -> SweepPlan:
    """Return the plan of the sweep in `folder`. Raise ValueError if it is not the requested one."""
    if not (folder / SWEEP_FILE).is_file():
        raise ValueError(f"{OPTION}: the folder {folder} exists and is not a sweep; choose another")
    saved = read_plan(folder)
    if any(" at 0x" in repr(group.settings.options.env) for group in request.groups):
        warnings.warn(f"{folder} was trained on environment instances; make sure that the given ones are the same")
    new, old = list(_member_settings(request.groups)), list(_member_settings(saved.groups.values()))
    if sorted(map(repr, new)) != sorted(map(repr, old)) or saved.scale != request.own.scale:
        all_names = dict.fromkeys(name for member in (*new, *old) for name in member)
        names = [name for name in all_names if {str(m.get(name)) for m in new} != {str(m.get(name)) for m in old}]
        what = f" ({', '.join(names[:3])} differ)" if names else ""
        raise ValueError(f"{OPTION}: {folder} holds a different sweep{what}; choose another")
    trainings = (grid.part(group, [member]) for group in request.groups for member in group.members)
    found = dict(zip(map(repr, new), trainings, strict=True))
    first = lambda group: repr(next(_member_settings([group])))
    groups = {name: grid.part(found[first(group)], group.members) for name, group in saved.groups.items()}
    return saved._replace(groups=groups)


def _member_settings(groups: Any) -> Iterator[dict[str, Any]]:
    """Yield for each member a flat dictionary of every setting that affects its training."""
    for group in groups:
        known = group.settings.known
        for member in group.members:
            content = by_path(to_mapping(grid.part(group, [member]).settings), known)
            yield {"seed": member.seed} | {k: v for k, v in content.items() if k not in MAY_DIFFER}


def _create(request: grid.SweepRequest, groups: dict[str, Group], folder: Path | None, start: Path) -> SweepPlan:
    """Create the sweep's folder and write sweep.yaml. Raise ValueError if that is not possible."""
    settings = request.groups[0].settings
    env_name = directory.name_of_env(name_of(settings.options.env))
    default = SWEEPS / f"{settings.algo_name}_{env_name}_{datetime.now():%Y%m%d-%H%M%S}"
    place = directory.make(folder, default, start, OPTION)
    own = request.columns, request.own.scale, request.base_num_envs
    sweep = SweepPlan(start / place, groups, *own, place=place)
    lock = directory.claim_new(sweep.folder, OPTION)
    try:
        _write(sweep)
    finally:
        lock.release()
    return sweep


def _write(sweep: SweepPlan) -> None:
    """Write sweep.yaml."""
    import yaml

    content = {
        "format": FORMAT,
        "columns": list(sweep.columns),
        "scale": sweep.scale,
        "base_num_envs": sweep.base_num_envs,
        "groups": [
            {"folder": name, "config": to_mapping(g.settings), "members": [m.label for m in g.members]}
            for name, g in sweep.groups.items()
        ],
    }
    files.replace(sweep.folder / SWEEP_FILE, yaml.safe_dump(content, sort_keys=False))


def _with_names(columns: Sequence[str], groups: Sequence[Group], num_before: int = 0) -> Iterator[tuple[str, Group]]:
    """Yield each group with its folder's name, 01_num_envs-8: a number, and the columns shared by its members."""
    num_groups = num_before + len(groups)
    for i, group in enumerate(groups, num_before + 1):
        name = f"{i:0{max(len(str(num_groups)), 2)}d}"
        shared = [c for c in columns if c not in group.members[0].values]
        for column, value in grid.values_of(group, group.members[0], shared).items():
            name += re.sub(r"[^\w.-]+", "-", f"_{column}-{value}")
        yield name[:80], group


def _check_can_continue(sweep: SweepPlan) -> None:
    """Raise ValueError for a mistake in devices or environments that would fail every unfinished group."""
    from jaxrl_fast import envs

    made: list[tuple[Any, Any]] = []
    for name in unfinished(sweep):
        options = sweep.groups[name].settings.options
        checks.check_devices(options)
        if (options.env, options.env_options) not in made:
            envs.make(options.env, 1, **options.env_options)
            made.append((options.env, options.env_options))


def _check_members(sweep: SweepPlan, own: SweepOptions) -> None:
    """Raise ValueError if jobs of several tasks, which train one run each, would resume programs of several runs."""
    if has_several_tasks(own) and any(len(g.members) > 1 or g.members[0].values for g in sweep.groups.values()):
        problem = "a job of several tasks trains one run, and this sweep has programs of several"
        number = slurm.num_tasks(own.slurm_options)
        raise ValueError(f"slurm_options: {problem}, got {number} tasks; start another sweep")


def _check_env_names(sweep: SweepPlan) -> None:
    """Raise ValueError if an environment was given as an object: sweep.yaml holds only its repr."""
    for group in sweep.groups.values():
        env = str(group.settings.options.env)
        if re.search(r"[^\w./:-]", env):
            remedy = "resume with jaxrl_fast.sweep(...) and the same arguments"
            name = re.sub(r"<(?:class ')?(.+)\.(.+?)(?:'| object)>", r"\1:\2", env)
            raise ValueError(
                f"resume {sweep.shown(sweep.folder)}: its environment was given as an object ({name}); {remedy}"
            )


def check_no_env_objects(several: Iterable[Settings]) -> None:
    """Raise ValueError if an environment was given as an object: other processes can only make it by name."""
    for settings in several:
        env = settings.options.env
        if not isinstance(env, str):
            remedy = "give package.module:Class"
            raise ValueError(f"env: workers and launcher require a name, got {name_of(env)}; {remedy}")
