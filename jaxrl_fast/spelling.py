"""How people write names and numbers. Standard library only."""

import difflib
import math
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable

SECONDS = {"min": 60, "h": 3600, "s": 1}
PATH_SEPARATORS = r"[/\\]"
SUFFIXES = {"k": 10**3, "M": 10**6, "B": 10**9}
NAMES = {"k": "thousands", "M": "millions", "B": "billions"}
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
SMALLEST, LARGEST = 2.0**-126, 3.4e38  # numbers that float32 keeps its digits of

ELSEWHERE = {  # what other libraries call our options (docs/moving.md)
    **dict.fromkeys(("env_id", "env_name"), "env"),
    **dict.fromkeys(("total_timesteps", "timesteps"), "total_steps"),
    **dict.fromkeys(("num_steps", "n_steps"), "agent.rollout_length"),
    **dict.fromkeys(("update_epochs", "n_epochs"), "agent.num_epochs"),
    **dict.fromkeys(("clip_coef", "clip_eps", "clip_range"), "agent.clip"),
    **dict.fromkeys(("clip_vloss", "clip_range_vf"), "agent.value_clip"),
    **dict.fromkeys(("normalize_env", "vecnormalize"), "agent.normalize_observations"),
    **dict.fromkeys(("start_e", "exploration_initial_eps"), "agent.epsilon_start"),
    **dict.fromkeys(("end_e", "epsilon_finish", "exploration_final_eps"), "agent.epsilon_end"),
    **dict.fromkeys(("exploration_fraction", "epsilon_anneal_time"), "agent.epsilon_steps"),
    **dict.fromkeys(("train_frequency", "train_freq", "training_interval"), "agent.replay_ratio"),
    **dict.fromkeys(("target_network_frequency", "target_update_interval"), "agent.target_period"),
    "n_envs": "num_envs",
    "wandb_project_name": "project",
    "preset": "config",
    "track": "wandb",
    "tensorboard_log": "run_dir",
    "lr": "agent.learning_rate",
    "anneal_lr": "agent.anneal",
    "vf_coef": "agent.value_coef",
    "ent_coef": "agent.entropy_coef",
    "norm_adv": "agent.normalize_advantage",
    "buffer_size": "agent.capacity",
    "buffer_batch_size": "agent.batch_size",
    "tau": "agent.target_step_size",
}


def nearest(word: str, names: Iterable[object], spell: Callable[[str], str] = str, cutoff: float = 0.6) -> str:
    """For a message about an unknown word: "; did you mean a or b?", or nothing if no name is near.

    A name that has the word as its last part, as "agent.clip" has "clip", is nearest of all.
    """
    by_lower = {str(name).lower(): str(name) for name in names}
    tail = word.lower().rpartition(".")[2]
    close = [name for name in by_lower if name.rpartition(".")[2] == tail]
    close = close or difflib.get_close_matches(word.lower(), by_lower, n=2, cutoff=cutoff)
    return f"; did you mean {' or '.join(spell(by_lower[name]) for name in close)}?" if close else ""


def shown(words: object) -> str:
    """A user's words in a message of one line: as they are, or as Python writes them where that would break it."""
    text = str(words)
    return text if text.isprintable() else repr(text)


def parse_int(text: str) -> int:
    """A whole number: 64, 64k, 1e6, 1.5M, 2_000. ValueError if it is none."""
    factor = SUFFIXES.get(text[-1:], 1)
    text = text[:-1] if factor > 1 else text
    try:
        return int(text) * factor
    except ValueError:
        value = float(text) * factor
        if not math.isfinite(value) or not math.isclose(value, round(value), rel_tol=1e-12):  # 4.1M: 4099999.9999999995
            raise ValueError from None
        return round(value)


def parse_float(text: str) -> float:
    """A finite number: 2.5e-4, 10k. ValueError if it is none."""
    factor = SUFFIXES.get(text[-1:], 1)
    value = float(text[:-1] if factor > 1 else text) * factor
    if not math.isfinite(value):
        raise ValueError
    return value


def suffix_meant(text: str) -> str:
    """For a message about what is no number but for its suffix's case: "; did you mean 1M, M for millions?"."""
    suffix = text[-1:].swapcase()
    meant = text[:-1] + suffix
    try:
        parse_float(meant)
    except ValueError:
        return ""
    return f"; did you mean {meant}, {suffix} for {NAMES[suffix]}?" if suffix in NAMES else ""


def parse_seconds(text: str) -> float:
    """A time: 30, 30s, 5min, 2h. ValueError if it is none."""
    unit = next((unit for unit in SECONDS if text.endswith(unit)), "")
    return parse_float(text.removesuffix(unit)) * SECONDS.get(unit, 1)


def parse_period(text: str) -> tuple[int, float]:
    """Environment steps or seconds, the other 0: 64k, 1M, 30s, 5min, 2h. ValueError if it is neither."""
    period = (0, parse_seconds(text)) if text.endswith(tuple(SECONDS)) else (parse_int(text), 0.0)
    if min(period) < 0:
        raise ValueError
    return period


def where(error: BaseException) -> str:
    """For a sentence's end: " (own.py:57, in step_env)", the last place of an error in what is not installed, or ""."""
    ours = __file__.removesuffix("spelling.py")
    not_own = (ours, "<", sysconfig.get_path("stdlib"))
    is_own = lambda path: not path.startswith(not_own) and "site-packages" not in path and "dist-packages" not in path
    places = [at for at in traceback.extract_tb(error.__traceback__) if is_own(at.filename)]
    if not places:
        return ""
    path, line, name, _ = places[-1]
    return f" ({re.split(PATH_SEPARATORS, path)[-1]}:{line}, in {name})"


def why(error: Exception) -> str:
    """What went wrong, for a sentence's end: the system's words, or the kind of error and its first line.

    Where JAX reports what a callback raised, that is its last line.
    """
    lines = str(error).strip().splitlines()
    line = lines[-1:] if any("Traceback (most recent call last)" in line for line in lines) else lines[:1]
    return getattr(error, "strerror", None) or ": ".join([type(error).__name__, *line])
