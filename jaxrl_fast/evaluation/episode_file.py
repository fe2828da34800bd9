"""Read a file that says how each episode of an evaluation begins: by a seed, and options of `reset`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxrl_fast.options.declare import MAX_INDEX
from jaxrl_fast.utils.files import path_of

Begin = tuple[int | None, dict[str, Any] | None]  # seed and options of `reset`
EXAMPLE = '7, or {"seed": 7, "options": {"level": 3}}'


def read(name: str) -> tuple[Begin, ...]:
    """Return the begin of each episode, one a line. Raise ValueError for a line that is none."""
    try:
        lines = Path(path_of(name)).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ValueError(f"episodes_file: cannot be read ({reason}), got {name}; give a text file") from error
    found = tuple(_begin(f"{name}:{i}", line) for i, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise ValueError(f"episodes_file: must have a line for each episode, got {name} without any; add {EXAMPLE}")
    return found


def with_begins(env: Any, begins: tuple[Begin, ...], config: Any) -> Any:
    """Return environments that begin their first episodes as `begins` says, no more of them than there are episodes.

    `env` are the evaluation's environments, and `config` their settings. Raise ValueError if they cannot.
    """
    if env.on_device:
        raise ValueError(f"episodes_file: {env.spec.id} runs on the device, got a file; use play_seed")
    num_envs = min(env.spec.num_envs, len(begins))
    return env.view.resize(num_envs, config._replace(episodes=begins))


def in_order(rows: tuple[Any, ...], num_episodes: int) -> tuple[Any, ...]:
    """Return arrays [S, E] of the episodes in the file. Environments may have played further ones, which come last."""
    return tuple(x[:, :num_episodes] for x in rows)


def counted(options: Any) -> Any:
    """Return the options of an evaluation with the number of episodes that its file has, if there is one."""
    return dataclasses.replace(options, episodes=len(read(options.episodes_file))) if options.episodes_file else options


def _begin(where: str, line: str) -> Begin:
    problem = f"episodes_file: {where}: must be a seed or an object with seed and options, got {line.strip()[:60]}"
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{problem}; write {EXAMPLE}") from error
    value = value if isinstance(value, dict) else {"seed": value}
    seed, options = value.get("seed"), value.get("options")
    is_seed = seed is None and options is not None or type(seed) is int and 0 <= seed <= MAX_INDEX
    if not is_seed or not isinstance(options, dict | None) or not value.keys() <= {"seed", "options"}:
        raise ValueError(f"{problem}; write {EXAMPLE}")
    return seed, options
