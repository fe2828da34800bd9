"""Scale a hyperparameter with the number of environments: the option `--scale`."""

from typing import NamedTuple

from jaxrl_fast.config.settings import Settings
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import options_of
from jaxrl_fast.utils.formatting import counted

SCALED = {
    **dict.fromkeys(("learning-rate-linear", "learning-rate-sqrt"), "learning_rate"),
    "minibatches": "num_minibatches",
}


class Rule(NamedTuple):
    """A rule that scales a hyperparameter with the number of environments."""

    name: str  # "" for none
    power: float
    base: int

    def apply(self, settings: Settings) -> Settings:
        if not self.name:
            return settings
        num_envs, now = settings.options.num_envs, settings.value(self.name)
        value = now * (num_envs / self.base) ** self.power
        if self.name == "learning_rate":
            value = float(f"{value:.6g}")
        else:
            value = max(value, 1)  # fewer rows than a minibatch has are one minibatch
            if value != int(value):
                scaled = f"{counted(now, 'minibatch', 'es')} for {counted(self.base, 'environment')}"
                raise ValueError(
                    f"scale minibatches: {scaled} must scale to a whole number, got {value:g} for {num_envs}; "
                    f"use a multiple of {self.base}, or a divisor"
                )
            value = int(value)
        return settings.replace(**{self.name: value})


def rule(scale: str, base: Settings) -> Rule:
    """Return the rule of --scale, which starts from these settings."""
    num_envs = base.options.num_envs
    if scale == "none":
        return Rule("", 0, num_envs)
    name = SCALED[scale]
    if name not in options_of(base.agent):
        able = " and ".join(algo for algo, kind in ALGORITHMS.items() if name in options_of(kind))
        raise ValueError(f"scale {scale}: needs an algorithm with {name} ({able}), got {base.algo}")
    return Rule(name, 0.5 if scale.endswith("sqrt") else 1.0, num_envs)
