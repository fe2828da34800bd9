"""Read the space of a search: which options vary, over which values, and on which scale.

A dimension is drawn as a plain number or word, its drawn variable: the option's value, one minus it, the exponent of a
power of two, or the text of a choice. Neither jax nor numpy is imported, so that messages about mistakes appear at
once.
"""

import math
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxrl_fast.config.convert import convert
from jaxrl_fast.config.names import ELSEWHERE, of_other_parts, refuse_ambiguous, refuse_unknown
from jaxrl_fast.config.settings import plain
from jaxrl_fast.config.sources import SEARCH, Setting, from_mapping, join_names
from jaxrl_fast.options.declare import Option, complete, options_of
from jaxrl_fast.options.run import OF_RUN
from jaxrl_fast.utils.importing import describe
from jaxrl_fast.utils.parsing import nearest, shown

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution

DEFAULT = "default"  # the word for the shipped space
Scale = Literal["linear", "log", "one_minus", "power_of_two"]
SCALES = {"linear": "", "log": "log", "one_minus": "1 - x, log", "power_of_two": "powers of two"}
SIZES = ("num_envs", "rollout_length", "num_minibatches", "batch_size", "critic_width", "sequence_length", "size")
DISCOUNTS = ("gamma", "lambda")  # end the names of numbers in [0, 1], also without declared bounds
LOG_FROM = 10.0  # ratio of the ends from which a range is logarithmic
FACTORS = (0.8, 1.25)  # of a perturbation (Jaderberg et al. 2017 use 0.8 and 1.2)
SHARE = 0.1  # of the range, by which a perturbation moves a number on a linear scale

# Shipped spaces. They have real numbers only, so that one program trains all trials of a round. Ranges are from RL
# Baselines3 Zoo (`hyperparams_opt.py`: clip_coef, entropy_coef, max_grad_norm of PPO, explore.end, tau of critics,
# noise.std) and from ARLBench (Becktepe et al. 2024, `get_hpo_config_space`: value_coef, gae_lambda, tau of DQN,
# temperature), which begin at 0 there. Learning rates reach 0.1 or 1 there, and discounts 0. Neither has the further
# options of PQN, REPPO and TD3, and the gradient's bound of DQN.
_ALL = "learning_rate=1e-5..1e-2 gamma=0.9..0.9999"
_VALUES = f"{_ALL} explore.end=0..0.2 optimizer.max_grad_norm=0.5..50"
_CRITICS = f"{_ALL} critic_learning_rate=1e-5..1e-2 target.tau=0.001..0.08"
SHIPPED = {
    "ppo": f"{_ALL} gae_lambda=0.8..0.9999 clip_coef=0.1..0.4 value_coef=linear:0.1..1 entropy_coef=1e-8..0.1 "
    "optimizer.max_grad_norm=0.3..2",
    "dqn": f"{_VALUES} target.tau=0.01..1",
    "pqn": f"{_VALUES} q_lambda=0..0.95",
    "sac": f"{_CRITICS} temperature=0.01..1",
    "td3": f"{_CRITICS} noise.std=0..1 target_noise=0..0.5",
    "ddpg": f"{_CRITICS} noise.std=0..1",
    "reppo": f"{_ALL} return_lambda=0.8..0.9999 kl_bound=0.01..1 kl_multiplier=1e-3..0.1 temperature=1e-3..0.1 "
    "optimizer.max_grad_norm=0.3..2",
}


class Dimension(NamedTuple):
    """An option that a search varies."""

    name: str  # the option's path: "learning_rate", "replay.size"
    kind: Literal["real", "whole", "choice"]
    low: float = 0  # both ends belong to the range; whole numbers are int
    high: float = 0
    scale: Scale = "linear"
    values: tuple[Any, ...] = ()  # of a choice


def default_space(algo: str) -> tuple[str, ...]:
    """Return the shipped space of an algorithm as texts. Raise ValueError if it has none."""
    if algo not in SHIPPED:
        raise ValueError(
            f"over: {DEFAULT} is for {join_names(SHIPPED)}, got {algo}; name options: learning_rate=LOW..HIGH"
        )
    return tuple(SHIPPED[algo].split())


def parse(
    texts: str | Sequence[str] | Mapping[str, Any], known: Mapping[str, Option], algo: str
) -> tuple[Dimension, ...]:
    """Return the dimensions of a space, with one for each option.

    Args:
        texts: "learning-rate=1e-5..1e-2", "clip-coef=linear:0.1..1", "schedule=constant,linear" or "default", which
            other texts override; or a mapping of names: a tuple of two numbers is a range, another tuple or a list has
            choices, and a text is read like the one after "=".
        known: the options of the run by path (`Settings.known`).
        algo: the algorithm's name, for "default" and for messages.

    Raises:
        ValueError: If an option does not exist or cannot be searched, or if a range or a choice is not valid.
    """
    texts = [texts] if isinstance(texts, str) else texts
    pairs = list(texts.items()) if isinstance(texts, Mapping) else [_pair(text) for text in texts]
    found: dict[str, Dimension] = {}
    for name, value in pairs:
        if (name, value) != (DEFAULT, True):
            path = _path(str(name).strip().replace("-", "_"), known, algo)
            if path in found:
                raise ValueError(f"over: {path}: given twice; keep one")
            found[path] = _dimension(path, value, known[path])
    if (DEFAULT, True) in pairs:
        # The options of parts that the run does not have are left out of the shipped space.
        present = {name: text for name, text in map(_pair, default_space(algo)) if name in known}
        shipped = {name: text for name, text in present.items() if not _conflict(name, found, known)}
        found = {name: _dimension(name, text, known[name]) for name, text in shipped.items()} | found
    if not found:
        raise ValueError("over: needs an option and its values, got none; for example learning_rate=1e-5..1e-2")
    for name in found:
        if part := _conflict(name, found, known):
            raise ValueError(f"over: {name}: must exist in every trial, but {part} has no such option; leave one out")
    return tuple(found.values())


def distributions(space: Sequence[Dimension]) -> "dict[str, BaseDistribution]":
    """Return the distribution of each dimension's drawn variable, by the option's path."""
    from optuna import distributions as of

    found: dict[str, BaseDistribution] = {}
    for dimension in space:
        low, high = _ends(dimension)
        is_log = dimension.scale in ("log", "one_minus")
        if dimension.kind == "choice":
            found[dimension.name] = of.CategoricalDistribution([word(value) for value in dimension.values])
        elif dimension.kind == "whole":
            found[dimension.name] = of.IntDistribution(int(low), int(high), log=is_log)
        else:
            found[dimension.name] = of.FloatDistribution(low, high, log=is_log)
    return found


def value_of(dimension: Dimension, drawn: Any) -> Any:
    """Return the option's value for its drawn variable."""
    if dimension.kind == "choice":
        return next(value for value in dimension.values if word(value) == drawn)
    value = 1 - drawn if dimension.scale == "one_minus" else 2**drawn if dimension.scale == "power_of_two" else drawn
    return _clip(dimension, value)


def drawn_of(dimension: Dimension, value: Any) -> Any:
    """Return the drawn variable for an option's value; `value_of` of it is the value."""
    if dimension.kind == "choice":
        return word(value)
    if dimension.scale == "power_of_two":
        return int(value).bit_length() - 1
    return 1 - value if dimension.scale == "one_minus" else value


def perturb(dimension: Dimension, value: Any, rng: "np.random.Generator") -> Any:
    """Return a value near another one, one step up or down on the dimension's scale, within its range.

    A step multiplies or divides by 1.25 on a logarithmic scale (of 1 - x if the scale is one_minus), moves by a tenth
    of the range on a linear one, and goes to the neighbor among powers of two and choices. A whole number moves by at
    least 1.
    """
    up = int(rng.integers(2))
    if dimension.kind == "choice":
        neighbor = [*map(word, dimension.values)].index(word(value)) + (1 if up else -1)
        return dimension.values[min(max(neighbor, 0), len(dimension.values) - 1)]
    if dimension.scale == "linear":
        moved = value + (SHARE if up else -SHARE) * (dimension.high - dimension.low)
    elif dimension.scale == "power_of_two":
        moved = value * 2 if up else value // 2
    else:
        moved = drawn_of(dimension, value) * FACTORS[up]
        moved = 1 - moved if dimension.scale == "one_minus" else moved
    if dimension.kind == "whole":
        moved = max(round(moved), value + 1) if up else min(round(moved), value - 1)
    return _clip(dimension, moved)


def resample(dimension: Dimension, rng: "np.random.Generator") -> Any:
    """Return a value that is drawn uniformly on the dimension's scale."""
    return at(dimension, rng.random())


def at(dimension: Dimension, share: float) -> Any:
    """Return the value at a position on the dimension's scale: a share of its length, from 0 to 1."""
    if dimension.kind == "choice":
        return dimension.values[min(int(share * len(dimension.values)), len(dimension.values) - 1)]
    low, high = _ends(dimension)
    margin = 0.5 if dimension.kind == "whole" else 0.0  # so that the ends have the same share as other numbers
    if dimension.scale == "one_minus":  # the larger x, the smaller 1 - x
        share = 1 - share
    if dimension.scale in ("log", "one_minus"):
        drawn = (low - margin) * ((high + margin) / (low - margin)) ** share
    else:
        drawn = low - margin + share * (high - low + 2 * margin)
    return value_of(dimension, round(drawn) if dimension.kind == "whole" else drawn)


def position(dimension: Dimension, value: Any) -> float:
    """Return the position of a value on the dimension's scale, from 0 to 1; of a choice, that among the choices."""
    if dimension.kind == "choice":
        return [*map(word, dimension.values)].index(word(value)) / (len(dimension.values) - 1)
    (low, high), drawn = _ends(dimension), drawn_of(dimension, value)
    is_log = dimension.scale in ("log", "one_minus")
    share = math.log(drawn / low) / math.log(high / low) if is_log else (drawn - low) / (high - low)
    return 1 - share if dimension.scale == "one_minus" else share


def text_of(dimension: Dimension) -> str:
    """Return a dimension for the terminal and the report: "gamma 0.9..0.9999 (1 - x, log)"."""
    if dimension.kind == "choice":
        return f"{dimension.name} {', '.join(map(word, dimension.values))}"
    scale = f" ({SCALES[dimension.scale]})" if SCALES[dimension.scale] else ""
    return f"{dimension.name} {word(dimension.low)}..{word(dimension.high)}{scale}"


def word(value: Any) -> str:
    """Return a value as it is written on a command line: "true", "64 64", "0.1"."""
    return str(value).lower() if isinstance(value, bool) else plain(value)


def _pair(text: Any) -> tuple[str, Any]:
    """Return the option's name and its values from OPTION=VALUES; for the shipped space its word and True."""
    if isinstance(text, str) and text.strip() == DEFAULT:
        return DEFAULT, True
    name, equals, values = text.partition("=") if isinstance(text, str) else ("", "", "")
    if not (name.strip() and equals):
        hint = nearest(text, [DEFAULT]) if isinstance(text, str) else ""
        hint = hint or "; for example learning_rate=1e-5..1e-2"
        raise ValueError(f"over: must be OPTION=VALUES or {DEFAULT}, got {shown(describe(text))}{hint}")
    return name, values.strip()


def _path(name: str, known: Mapping[str, Option], algo: str) -> str:
    """Return the path of the option with this name. Raise ValueError if there is none, or if it cannot be searched."""
    setting = Setting(name, [], f"over: {shown(name)}", on_command_line=True)
    paths = complete(name, known)
    if len(paths) > 1:
        refuse_ambiguous(setting, paths)
    if not paths:
        offered = of_other_parts(known)
        if (others := complete(name, offered)) and ("." in name or ELSEWHERE.get(name) not in known):
            part, words = others[0].rpartition(".")[0], offered[others[0]]
            problem = f"is an option of {part} {' or '.join(words)}, which the run does not have"
            raise ValueError(f"over: {name}: {problem}; choose {part} {words[0]}")
        refuse_unknown(setting, known, (), algo, SEARCH)
    option = known[paths[0]]
    fixed = option.name in OF_RUN and option.name != "num_envs" or typing.get_origin(option.kind) is dict
    if fixed or not option.sweepable or "" in option.parts:
        way = "search one of its options" if "" in option.parts else "give it one value, outside of over"
        raise ValueError(f"over: {option.name}: cannot be searched; {way}")
    return option.name


def _dimension(name: str, given: Any, option: Option) -> Dimension:
    """Return the dimension of an option from text or from Python values."""
    origin = f"over: {name}"
    if isinstance(given, str) and ".." in given:
        scale, colon, ends = given.rpartition(":")
        first, _, last = ends.partition("..")
        return _range(option, origin, first, last, scale.strip().replace("-", "_") if colon else None)
    if isinstance(given, str):
        parts = given.split(",")
        if not all(map(str.strip, parts)):
            raise ValueError(f"{origin}: has an empty value, got {given!r}")
        several = [Setting(name, part.split(), origin) for part in parts]
    else:
        given = given.tolist() if hasattr(given, "tolist") else given  # numpy's
        listed = list(given) if isinstance(given, list | tuple | range) else [given]
        if isinstance(given, tuple) and len(given) == 2 and all(map(_is_number, given)):
            return _range(option, origin, *given, None)
        several = [from_mapping({name: value})[0]._replace(origin=origin) for value in listed]
    values = tuple(convert(option, setting) for setting in several)
    words = [*map(word, values)]
    if len(values) < 2:
        raise ValueError(
            f"{origin}: needs a range or several values, got {' '.join(words) or 'none'}; use LOW..HIGH or A,B"
        )
    for one in words:
        if words.count(one) > 1:
            raise ValueError(f"{origin}: has {one} twice; keep one")
    if name == "num_envs" and "auto" in values:
        raise ValueError(f"{origin}: must be numbers in a search, got auto; name them")
    return Dimension(name, "choice", values=values)


def _range(option: Option, origin: str, first: Any, last: Any, scale: str | None) -> Dimension:
    """Return the dimension of a range. Its scale is chosen if it is None."""
    low, high = (convert(option, Setting(option.name, [str(end).strip()], origin)) for end in (first, last))
    got = f"got {first}..{last}"
    if not (_is_number(low) and _is_number(high)):
        raise ValueError(f"{origin}: takes no range, {got}; give several values, separated by commas")
    if high <= low:
        problem = "the smaller number of a range comes first" if high < low else "a range needs two different numbers"
        raise ValueError(f"{origin}: {problem}, {got}")
    if option.traced == "nonzero" and low <= 0 <= high:
        raise ValueError(f"{origin}: 0 disables it, so a range must be above 0, {got}; begin above 0")
    whole = isinstance(low, int) and isinstance(high, int)
    low, high = (low, high) if whole else (float(low), float(high))
    are_powers = whole and _is_power_of_two(low) and _is_power_of_two(high)
    needs = {"log": "a range above 0", "one_minus": "real numbers below 1", "power_of_two": "two powers of two"}
    is_possible = {"linear": True, "log": low > 0, "one_minus": not whole and high < 1, "power_of_two": are_powers}
    scale = scale or _default_scale(option, low, high, are_powers)
    if scale not in SCALES:
        hint = nearest(scale, SCALES) or f"; there are {join_names(SCALES)}"
        raise ValueError(f"{origin}: unknown scale {scale!r}{hint}")
    if not is_possible[scale]:
        raise ValueError(f"{origin}: the scale {scale} needs {needs[scale]}, {got}; change the range or the scale")
    return Dimension(option.name, "whole" if whole else "real", low, high, typing.cast(Scale, scale))


def _default_scale(option: Option, low: float, high: float, are_powers: bool) -> Scale:
    """Return the scale of a range.

    Powers of two for a size; 1 - x on a log scale for a number like a discount, if it is at least 0.5; else a log scale
    if the ends differ by a factor of 10 or more.
    """
    if are_powers and option.name.rpartition(".")[2] in SIZES:
        return "power_of_two"
    is_share = option.bounds is not None and option.bounds.max <= 1 or option.name.endswith(DISCOUNTS)
    if is_share and isinstance(low, float) and low >= 0.5 and high < 1:
        return "one_minus"
    return "log" if low > 0 and high / low >= LOG_FROM * (1 - 1e-9) else "linear"


def _conflict(name: str, found: Mapping[str, Dimension], known: Mapping[str, Option]) -> str:
    """Return the choice of parts in a space that does not always have an option, as "memory none", or ""."""
    for other, dimension in found.items():
        inner = name.removeprefix(f"{other}.")
        for value in dimension.values if inner != name else ():
            if inner not in options_of(known[other].part(value)):
                return f"{other} {value}"
    return ""


def _ends(dimension: Dimension) -> tuple[float, float]:
    """Return the ends of the range of a dimension's drawn variable."""
    if dimension.scale == "one_minus":
        return 1 - dimension.high, 1 - dimension.low
    if dimension.scale == "power_of_two":
        return drawn_of(dimension, dimension.low), drawn_of(dimension, dimension.high)
    return dimension.low, dimension.high


def _clip(dimension: Dimension, value: Any) -> Any:
    return min(max(value, dimension.low), dimension.high)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_power_of_two(number: int | float) -> bool:
    return number >= 1 and int(number) & (int(number) - 1) == 0
