"""Read the settings of an existing run, and check what a resume may change."""

import dataclasses
import operator
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from jaxrl_fast.config.names import SWEEP, known_options, without_no
from jaxrl_fast.config.options import Task, types_of
from jaxrl_fast.config.paths import CONFIG, RUNS, SWEEP_FILE
from jaxrl_fast.config.presets import read_meta
from jaxrl_fast.config.settings import Settings, as_lists, resolve, same_env
from jaxrl_fast.config.sources import Setting
from jaxrl_fast.utils.parsing import nearest, shown

DECIDE_RESETS = ("exact_resume", "save_every", "eval_every", "eval_episodes", "eval_envs")  # where games begin anew
STEPPING_OPTIONS = (
    "num_threads",
    "thread_affinity_offset",
)  # options of environments that only say how they are stepped


def resumed(algo: str, written: list[Setting], folder: Path) -> Settings:
    """Settings of the run in this folder, with what was written over them where that may change."""
    if (folder / SWEEP_FILE).is_file():
        raise ValueError(f"--resume {folder} is a sweep and no run; go on with {SWEEP} --resume {quote(str(folder))}")
    path = file_of_run(folder, f"--resume {folder}")
    for setting in written:
        if setting.name in ("config", "run_dir", "name"):
            raise ValueError(f"{setting.said} does not go with --resume, which goes on in the run's own folder")
    if "members" in read_meta(path):
        whole = f"{SWEEP} --resume {quote(str(folder.parent))}"
        raise ValueError(f"--resume {folder} is a part of a sweep; go on with {whole}")
    as_preset = Setting("config", [str(path)], "--resume")
    before, now = resolve(algo, [as_preset]), resolve(algo, [as_preset, *written])
    known = known_options(type(now.agent))
    for setting in (without_no(s, known) for s in written):
        place, name = ("agent", setting.name[6:]) if setting.name.startswith("agent.") else ("options", setting.name)
        old, new = (getattr(getattr(which, place), name) for which in (before, now))
        fixed = place == "agent" or name in types_of(Task) and name != "total_steps"
        fixed |= before.options.exact_resume and name in DECIDE_RESETS
        same = SAME.get(name, operator.eq)(old, new)
        if fixed and not same:
            raise ValueError(f"{setting.said} {plain(new)}: this run has {plain(old)}, and goes on only with that")
    check_env(folder, now.options.env)
    return now._replace(preset="", options=dataclasses.replace(now.options, resume=str(folder)))


def of_run(folder: Path) -> Settings:
    """Settings of the run in this folder, as it wrote them down."""
    path = file_of_run(folder, str(folder))
    return resolve("", [Setting("config", [str(path)], str(path))])


def check_env(folder: Path, env: Any) -> None:
    """ValueError where a run was trained in an object, which its name would make anew in another way."""
    if isinstance(env, str) and read_meta(folder / CONFIG).get("env_is_an_object"):
        raise ValueError(
            f"{folder} was trained in an object of {env}, which may have been made in a way of its own; give that, or "
            "the class, from Python: env=..."
        )


def file_of_run(folder: Path, said: str) -> Path:
    """Where the run in this folder wrote its settings down."""
    path = folder / CONFIG
    if (folder / SWEEP_FILE).is_file():
        runs = sorted(str(below.parent) for below in folder.glob(f"*/{CONFIG}"))
        there = f"one of its runs is {runs[0]}" if runs else "none of its runs has begun"
        raise ValueError(f"{said} is a sweep and no run; {there}")
    if not path.is_file():
        below = sorted((p.parent for p in folder.glob(f"*/{CONFIG}")), key=lambda run: run.stat().st_mtime)
        newest = f"; the newest in a folder of it is {below[-1]}" if below else ""
        by_name = f"; did you mean {RUNS / folder.name}?" if (RUNS / folder.name / CONFIG).is_file() else ""
        hint = newest or by_name or nearest_with(CONFIG, folder)
        raise ValueError(f"{shown(said)}: there is no run in it (no {CONFIG}){hint}")
    return path


def nearest_with(file: str, folder: Path) -> str:
    """For a message about a folder that has no such file: the nearest names beside it of folders that have."""
    siblings = [f.name for f in folder.parent.iterdir() if (f / file).is_file()] if folder.parent.is_dir() else []
    return nearest(folder.name, siblings, lambda name: str(folder.with_name(name)))


def _same_episodes(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Options of environments that play the same."""
    of_games = lambda options: {
        name: as_lists(value) for name, value in options.items() if name not in STEPPING_OPTIONS
    }
    return of_games(old) == of_games(new)


SAME = {
    "env": same_env,
    "env_options": _same_episodes,
}  # how values are compared that a run cannot change; others by ==


def plain(value: Any) -> str:
    """A value as it is written on a command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else "none" if value is None else str(value)
