"""Read a sweep's folder: its plan, and which of its groups have finished or failed."""

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from jaxrl_fast.config import resume
from jaxrl_fast.config.paths import CONFIG, SWEEP_FILE, check_format
from jaxrl_fast.config.population import LABEL, Member
from jaxrl_fast.config.settings import Request, resolve, with_algorithm
from jaxrl_fast.config.sources import PROGRAM, SWEEP, from_mapping
from jaxrl_fast.options import run as options
from jaxrl_fast.runs import files
from jaxrl_fast.sweep import grid
from jaxrl_fast.sweep.grid import Group
from jaxrl_fast.utils.files import is_folder_name

FAILED = "failed.json"


class SweepPlan(NamedTuple):
    """A sweep whose combinations have been validated, and its folder."""

    folder: Path  # absolute, because environments may change the current directory
    groups: Mapping[str, Group]  # by the name of the group's folder
    columns: tuple[str, ...]  # options in which members differ, except the seed
    scale: str
    base_num_envs: int
    sweep_options: options.SweepOptions = options.SweepOptions()
    log_level: str = "info"
    place: Path | None = None  # the folder as it was given, if it differs

    def shown(self, path: Path) -> Path:
        """Return a path in the sweep's folder for a message: relative if the folder was given so."""
        return (self.place or self.folder) / path.relative_to(self.folder)


def read_plan(folder: Path) -> SweepPlan:
    """Return the plan that sweep.yaml in `folder` holds.

    Raises:
        ValueError: If the folder holds no sweep, or its sweep.yaml is not valid.
    """
    import yaml

    path = folder / SWEEP_FILE
    if not path.is_file():
        raise ValueError(f"resume {folder}: the folder has no {SWEEP_FILE}{_resume_hint(folder)}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_format(content.get("format", 1), f"resume {folder}")
        groups = {_checked_name(each["folder"]): _group(each["config"], each["members"]) for each in content["groups"]}
        if not groups:
            raise LookupError("groups")
        own = (*content["columns"],), content["scale"], content["base_num_envs"]
        return SweepPlan(folder.absolute(), groups, *own, place=folder)
    except (
        OSError,
        UnicodeDecodeError,
        yaml.YAMLError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ValueError(f"{path} is not a valid sweep file ({type(error).__name__})") from error


def _resume_hint(folder: Path) -> str:
    """Return the end of an error message: how to resume `folder`, which is not a sweep."""
    if not (folder / CONFIG).is_file():
        return resume.nearest_with(SWEEP_FILE, folder)
    if (folder.parent / SWEEP_FILE).is_file():
        return f"; it is part of a sweep, resume that with {SWEEP} --resume {quote(str(folder.parent))}"
    return f"; it is a run, resume it with {PROGRAM} --resume {quote(str(folder))}"


def _checked_name(name: str) -> str:
    """Return a folder's name. Raise KeyError if it leads out of the sweep's folder."""
    if not is_folder_name(name):
        raise KeyError(name)
    return name


def _group(content: dict[str, Any], labels: list[dict[str, Any]]) -> Group:
    """Return the group that an entry of sweep.yaml describes."""
    settings = from_mapping({k: v for k, v in content.items() if k not in ("algo", "num_seeds")})
    request = with_algorithm(Request(content["algo"], "", settings, [], resumed=True), SWEEP_FILE)
    values = lambda label: {name.removeprefix(LABEL): value for name, value in label.items() if name != "seed"}
    members = tuple(Member(label["seed"], values(label)) for label in labels)
    return grid.part(Group(resolve(request), members), members)


def unfinished(sweep: SweepPlan) -> list[str]:
    """Return the names of the groups that have neither finished nor failed."""
    return [name for name, group in sweep.groups.items() if not is_finished(sweep.folder / name, group)]


def is_finished(folder: Path, group: Group) -> bool:
    """Return whether a group is done, diverged or failed, and is not to be run again."""
    summary = files.summary_if_any(folder)
    return (folder / FAILED).is_file() or summary.get("status") == "diverged" or is_done(summary, group)


def is_done(summary: Mapping[str, Any], group: Group) -> bool:
    """Return whether a group has made all of its steps, or is solved; False if it has been extended since."""
    options = group.settings.options
    if summary.get("status") != "done" or summary["env_steps"] >= options.total_steps:
        return summary.get("status") == "done"
    settled = zip(summary["steps_to_solve_per_seed"], summary["diverged_at_per_seed"], strict=True)
    return options.stop_when_solved and all(solved or diverged for solved, diverged in settled)


def failure(folder: Path) -> str:
    """Return in one line why a group failed or all of its members diverged; empty if neither happened."""
    try:
        return json.loads((folder / FAILED).read_text(encoding="utf-8"))["failure"]
    except FileNotFoundError:
        return files.summary_if_any(folder).get("failure") or ""
    except (OSError, ValueError, KeyError):
        return f"{FAILED} cannot be read"
