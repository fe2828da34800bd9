"""Read the settings of an existing run, and check the changes that a resume asks for."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config.parts import by_path, named
from jaxrl_fast.config.paths import CONFIG, RUNS, SWEEP_FILE
from jaxrl_fast.config.presets import read_meta, read_run
from jaxrl_fast.config.settings import (
    Request,
    Settings,
    plain,
    resolve,
    to_mapping,
    with_algorithm,
)
from jaxrl_fast.config.sources import SWEEP, Setting
from jaxrl_fast.options.declare import Option
from jaxrl_fast.utils.parsing import nearest, shown

DECIDED_BY_ENV = ("protocol", "rewards")  # if empty or "auto" in a sweep.yaml
DECIDED_BY_MEMORY = ("replay.storage", "replay.compression")  # if "auto" there


def resumed(algo: str, written: list[Setting], folder: Path) -> Settings:
    """Return the settings of the run in this directory with the given changes. Raise ValueError for a forbidden one."""
    origin = f"resume {folder}"
    if (folder / SWEEP_FILE).is_file():
        raise ValueError(f"{origin}: is a sweep, not a run; use {SWEEP} --resume {quote(str(folder))}")
    for setting in written:
        if setting.name in ("config", "run_dir", "replay_dir"):
            raise ValueError(f"{setting.origin}: cannot be combined with resume, which continues in the run directory")
    path = file_of_run(folder, origin)
    from_file, meta = read_run(path, origin)
    if "members" in meta:
        raise ValueError(f"{origin}: is a part of a sweep; use {SWEEP} --resume {quote(str(folder.parent))}")
    asked = with_algorithm(Request(algo, "", from_file, [], resumed=True), origin)
    before, now = resolve(asked), resolve(asked._replace(given=written))
    for setting in named(written, now.known, (now.options, now.agent), now.algo):
        option = now.known[setting.name]
        old, new = before.value(option.name), now.value(option.name)
        new = "auto" if option.name == "num_envs" and now.auto_num_envs else new
        fixed = not option.resumable or option.resumable == "inexact" and before.options.host.exact_resume
        if fixed and not option.equal(old, new):
            raise ValueError(
                f"{setting.origin}: a resume cannot change it from {plain(old) or 'none'}, got {plain(new)}"
            )
    check_env(folder, now.options.env)
    return now._replace(options=dataclasses.replace(now.options, resume=str(folder)))


def check_unchanged(
    settings: Settings, before: Mapping[str, Any], folder: Path, checkpoint: Path, decided: bool = True
) -> None:
    """Raise ValueError if options that affect results differ from the checkpoint's, because config.yaml was edited.

    `before` is `to_mapping` of the settings with which the checkpoint was saved. `decided`: options that depend on the
    environment have their final values, as in config.yaml. In sweep.yaml they may still be empty.
    """
    known = {"algo": Option("algo", str), **settings.known}
    old, new = by_path(before, known), by_path(to_mapping(settings) | {"env": settings.options.env}, known)
    for name, option in known.items():
        fixed = not option.resumable or option.resumable == "inexact" and old["host.exact_resume"]
        if not fixed or name not in old or name not in new or option.equal(old[name], new[name]):
            continue
        if decided or name not in DECIDED_BY_ENV + DECIDED_BY_MEMORY or new[name] not in ("", None, "auto"):
            was, now = (plain(tuple(v) if isinstance(v, list) else v) for v in (old[name], new[name]))
            raise ValueError(
                f"{folder / CONFIG}: {name} was {was} when {checkpoint.name} was saved, got {now}; restore the file"
            )


def of_run(folder: Path) -> Settings:
    """Return the settings that the run in this directory has saved."""
    from_file, _ = read_run(file_of_run(folder, str(folder)), folder)
    return resolve(with_algorithm(Request("", "", from_file, [], resumed=True), str(folder / CONFIG)))


def check_env(folder: Path, env: Any) -> None:
    """Raise ValueError if a run was trained on an object that may not be rebuilt from its name."""
    if isinstance(env, str) and read_meta(folder / CONFIG).get("env_is_an_object"):
        raise ValueError(
            f"{folder}: was trained on an environment instance that cannot be rebuilt from its name {env}; "
            "pass it, or its class, from Python as env=..."
        )


def file_of_run(folder: Path, origin: str) -> Path:
    """Return the path of a run's settings. Raise ValueError if the directory has no run."""
    path = folder / CONFIG
    if (folder / SWEEP_FILE).is_file():
        runs = sorted(str(below.parent) for below in folder.glob(f"*/{CONFIG}"))
        hint = f"use one of its runs, such as {runs[0]}" if runs else "none of its runs has started"
        raise ValueError(f"{origin}: is a sweep, not a run; {hint}")
    if not path.is_file():
        below = sorted((p.parent for p in folder.glob(f"*/{CONFIG}")), key=lambda run: run.stat().st_mtime)
        newest = f"; the newest run below it is {below[-1]}" if below else ""
        by_name = f"; did you mean {RUNS / folder.name}?" if (RUNS / folder.name / CONFIG).is_file() else ""
        raise ValueError(
            f"{shown(origin)}: is not a run directory (no {CONFIG}){newest or by_name or nearest_with(CONFIG, folder)}"
        )
    return path


def nearest_with(file: str, folder: Path) -> str:
    """Return a hint at the nearest name next to a directory without this file, of directories that have it."""
    siblings = []
    with contextlib.suppress(OSError):  # the parent does not exist or is private, and so may siblings be
        siblings = [f.name for f in folder.parent.iterdir() if os.path.isfile(f / file)]
    return nearest(folder.name, siblings, lambda name: str(folder.with_name(name)))
