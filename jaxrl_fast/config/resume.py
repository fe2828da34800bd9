"""Read the settings of an existing run, and check the changes that a resume asks for."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config.convert import without_no
from jaxrl_fast.config.names import SWEEP
from jaxrl_fast.config.paths import CONFIG, RUNS, SWEEP_FILE
from jaxrl_fast.config.presets import read_meta, read_run
from jaxrl_fast.config.settings import (
    Request,
    Settings,
    check_unused,
    options_of_algorithm,
    plain,
    resolve,
    to_mapping,
    with_algorithm,
)
from jaxrl_fast.config.sources import Setting
from jaxrl_fast.utils.option import Option
from jaxrl_fast.utils.parsing import nearest, shown

DECIDED_BY_ENV = ("protocol", "quarantine", "agent.clip_rewards")  # if empty in a sweep.yaml
DECIDED_BY_MEMORY = ("agent.replay_storage", "agent.replay_compression")  # if "auto" there


def resumed(algo: str, written: list[Setting], folder: Path) -> Settings:
    """Return the settings of the run in this directory with the given changes. Raise ValueError for a forbidden one."""
    origin = f"--resume {folder}"
    if (folder / SWEEP_FILE).is_file():
        raise ValueError(f"{origin}: is a sweep, not a run; use {SWEEP} --resume {quote(str(folder))}")
    for setting in written:
        if setting.name in ("config", "run_dir", "name", "replay_dir"):
            raise ValueError(
                f"{setting.origin}: cannot be combined with --resume, which continues in the run directory"
            )
    path = file_of_run(folder, origin)
    from_file, meta = read_run(path, origin)
    if "members" in meta:
        raise ValueError(f"{origin}: is a part of a sweep; use {SWEEP} --resume {quote(str(folder.parent))}")
    asked = with_algorithm(Request(algo, "", from_file, [], resumed=True), origin)
    before, now = resolve(asked), resolve(asked._replace(given=written))
    known = options_of_algorithm(now.algo)
    for setting in (without_no(s, known) for s in written):
        option, is_own = known[setting.name], setting.name.startswith("agent.")
        old, new = (getattr(which.agent if is_own else which.options, option.name) for which in (before, now))
        new = "auto" if option.name == "num_envs" and now.auto_num_envs else new
        fixed = not option.resumable or option.resumable == "inexact" and before.options.exact_resume
        if fixed and not option.equal(old, new):
            raise ValueError(f"{setting.origin}: a resume cannot change it from {plain(old)}, got {plain(new)}")
    check_env(folder, now.options.env)
    check_unused(asked._replace(given=written), [now.agent])
    return now._replace(options=dataclasses.replace(now.options, resume=str(folder)))


def check_unchanged(
    settings: Settings, before: Mapping[str, Any], folder: Path, checkpoint: Path, decided: bool = True
) -> None:
    """Raise ValueError if options that affect results differ from the checkpoint's, because config.yaml was edited.

    `before` is `to_mapping` of the settings with which the checkpoint was saved. `decided`: options that depend on the
    environment have their final values, as in config.yaml. In sweep.yaml they may still be empty.
    """
    now = to_mapping(settings) | {"env": settings.options.env}
    options = {"algo": Option("algo", str)} | options_of_algorithm(settings.algo)
    for name, option in options.items():
        last = name.removeprefix("agent.")
        saved, current = (config["agent"] if name != last else config for config in (before, now))
        fixed = not option.resumable or option.resumable == "inexact" and before["exact_resume"]
        undecided = (
            not decided and name in DECIDED_BY_ENV + DECIDED_BY_MEMORY and current.get(last) in ("", None, "auto")
        )
        is_known = last in saved and last in current and not undecided
        if fixed and is_known and not option.equal(saved[last], current[last]):
            old, new = (plain(tuple(v) if isinstance(v, list) else v) for v in (saved[last], current[last]))
            raise ValueError(
                f"{folder / CONFIG}: {name} was {old} when {checkpoint.name} was saved, got {new}; restore the file"
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
