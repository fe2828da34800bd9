"""What the options of several algorithms share."""

from fractions import Fraction
from typing import Any

MIN_ROLLOUT = 32  # environment steps in all between updates of an algorithm that leaves it to us


def as_fraction(number: float) -> Fraction:
    """As it is written, not as it is stored: 0.1 is 1/10."""
    return Fraction(str(number))


def rollout_length(config: Any, num_envs: int) -> int:
    """Environment steps between updates, in each environment."""
    left_to_us = max(1, MIN_ROLLOUT // num_envs)
    return left_to_us if config.rollout_length == "auto" else config.rollout_length
