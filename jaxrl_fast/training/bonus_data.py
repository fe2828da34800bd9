"""Read what the bonus of a run learns from, and check on a resume that it is the same.

Nothing of it is in a checkpoint. The run's config.yaml has its fingerprint, so a resume needs the same data, perhaps at
another place. Evaluation and export do not need it.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_fast.config import paths
from jaxrl_fast.config.presets import read_meta
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.options.bonus import BC, MINARI, RND, Annealed, Distill
from jaxrl_fast.utils.files import path_of

if TYPE_CHECKING:
    from jaxrl_fast.types import Env, PyTree

PATH = "bonus.data"  # in an algorithm's options
FINGERPRINT = "bonus_data"  # in config.yaml, among other facts


def option_of(agent_config: Any) -> str:
    """Return the option that names the data of an algorithm's bonus, or "" if none does."""
    part = getattr(agent_config, "bonus", None)
    return "bonus.dataset" if isinstance(part, BC) else "bonus.run" if isinstance(part, Distill) else ""


def with_absolute_path(settings: Settings) -> Settings:
    """Return settings whose bonus names a file by its absolute path, since an environment may change the directory."""
    option = option_of(settings.agent)
    name = settings.value(option) if option else ""
    if not name or name.startswith(MINARI):
        return settings
    return settings.replace(**{option: str(path_of(name, option).absolute())})


def loaded(settings: Settings, env: "Env") -> Settings:
    """Return settings whose bonus has its data, as numpy arrays. Raise ValueError if it does not fit."""
    part, option = getattr(settings.agent, "bonus", None), option_of(settings.agent)
    if isinstance(part, BC | Distill | RND) and env.spec.players:
        raise ValueError(f"bonus: {part.kind} requires an environment without players, got {env.spec.id}; use none")
    if not option:
        return settings
    from jaxrl_fast.training import dataset, teacher

    load: Callable[[str, Env], PyTree] = dataset.load if option == "bonus.dataset" else teacher.load
    data = load(settings.value(option), env)
    bonus = dataclasses.replace(settings.agent.bonus, data=data)
    settings = settings._replace(agent=dataclasses.replace(settings.agent, bonus=bonus))
    if settings.options.resume:
        _check_same(settings, option)
    return settings


def of_program(agent_config: Any) -> "Mapping[str, PyTree]":
    """Return the data of an algorithm's bonus by its path in the options; empty if there are none."""
    part = getattr(agent_config, "bonus", None)
    return {PATH: part.data} if isinstance(part, Annealed) and part.data is not None else {}


def fingerprint(agent_config: Any) -> dict[str, str]:
    """Return the SHA-256 of the data of an algorithm's bonus, for config.yaml; empty if there are none."""
    found = of_program(agent_config)
    if not found:
        return {}
    import jax
    import numpy as np

    total = hashlib.sha256()
    for path, x in jax.tree.leaves_with_path(found[PATH]):
        total.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode())
        total.update(np.ascontiguousarray(x).view(np.uint8).data)
    return {FINGERPRINT: total.hexdigest()}


def _check_same(settings: Settings, option: str) -> None:
    """Raise ValueError if a resumed run had other data."""
    path = Path(settings.options.resume) / paths.CONFIG
    before, now = read_meta(path).get(FINGERPRINT), fingerprint(settings.agent)[FINGERPRINT]
    if before != now:
        name = settings.value(option)
        problem = f"must have the data with which the run began, got others in {name}"
        raise ValueError(f"{option}: {problem}; restore them, or name the place where they are")
