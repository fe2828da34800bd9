"""A sweep's folder: its plan, and which of its groups have finished or failed."""

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from jaxrl_fast.config import options, resume
from jaxrl_fast.config.names import PROGRAM
from jaxrl_fast.config.paths import CONFIG, SWEEP_FILE
from jaxrl_fast.config.population import Member
from jaxrl_fast.config.settings import resolve
from jaxrl_fast.config.sources import from_mapping
from jaxrl_fast.runs import files
from jaxrl_fast.sweep import grid
from jaxrl_fast.sweep.grid import Group
from jaxrl_fast.utils.files import is_folder_name

FAILED = "failed.json"


class SweepPlan(NamedTuple):
    """A sweep whose combinations have all been checked, and its folder."""

    folder: Path
    groups: Mapping[str, Group]  # by the name of the group's folder
    columns: tuple[str, ...]  # options in which members differ, beside the seed
    scale: str
    base_num_envs: int
    own: options.SweepOptions = options.SweepOptions()
    log_level: str = "info"


def read(folder: Path) -> SweepPlan:
    """What sweep.yaml says."""
    import yaml

    path = folder / SWEEP_FILE
    if not path.is_file():
        hint = resume.nearest_with(SWEEP_FILE, folder)
        if (folder / CONFIG).is_file():  # a run's folder
            parent = quote(str(folder.parent))
            of_sweep = f"it is a part of a sweep, with which --resume {parent} goes on"
            of_train = f"it is a run, with which {PROGRAM} --resume {quote(str(folder))} goes on"
            hint = f"; {of_sweep if (folder.parent / SWEEP_FILE).is_file() else of_train}"
        raise ValueError(f"--resume {folder}: there is no sweep in it (no {SWEEP_FILE}){hint}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        groups = {_plain(each["folder"]): _group(each["config"], each["members"]) for each in content["groups"]}
        if not groups:
            raise LookupError("groups")
        return SweepPlan(folder, groups, (*content["columns"],), content["scale"], content["base_num_envs"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what a sweep writes ({type(error).__name__})") from error


def _plain(name: str) -> str:
    """A folder's name that leads nowhere else."""
    if not is_folder_name(name):
        raise KeyError(name)
    return name


def _group(content: dict[str, Any], labels: list[dict[str, Any]]) -> Group:
    """A group as it was written down."""
    settings = from_mapping({k: v for k, v in content.items() if k not in ("algo", "num_seeds")}, str)
    of = lambda label: {name.removeprefix("agent."): value for name, value in label.items() if name != "seed"}
    members = tuple(Member(label["seed"], of(label)) for label in labels)
    return grid.part(Group(resolve(content["algo"], settings), members), members)


def unfinished(sweep: SweepPlan) -> list[str]:
    """Names of the groups that are neither done nor failed."""
    return [name for name in sweep.groups if not finished(sweep.folder / name)]


def finished(folder: Path) -> bool:
    """Done, diverged or failed: not to be run again."""
    return (folder / FAILED).is_file() or files.summary_if_any(folder).get("status") in ("done", "diverged")


def failure(folder: Path) -> str:
    """Why a group could not be run, or not to its end with any of its members, in a line; empty where it could."""
    try:
        return json.loads((folder / FAILED).read_text(encoding="utf-8"))["failure"]
    except FileNotFoundError:
        return files.summary_if_any(folder).get("failure") or ""
    except (OSError, ValueError, KeyError):
        return f"{FAILED} cannot be read"
