"""Read the option `wrap`: what is put around environments, in this order."""

from typing import NamedTuple

from jaxrl_fast.utils.parsing import nearest

WORDS = ("quarantine", "no-quarantine", "hide=PART", "previous", "time-limit", "package.module:function")


class Wrappers(NamedTuple):
    """What is put around environments, also around those on the device."""

    quarantine: bool | None = None  # numbers that are not finite end an episode; None: only in physics simulations
    hide: tuple[str, ...] = ()  # parts of the observation that agents do not see
    previous: bool = False  # observations tell the previous action and reward
    time_limit: bool = False  # time limits are terminations
    custom: tuple[str, ...] = ()  # a user's functions from `Env` to `Env`


def read(words: tuple[str, ...]) -> Wrappers:
    """Return the wrappers that words name. Raise ValueError for an unknown word."""
    found = Wrappers()
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name == "hide" and value:
            found = found._replace(hide=(*found.hide, value))
        elif ":" in word:
            found = found._replace(custom=(*found.custom, word))
        elif name in ("quarantine", "no-quarantine") and not equals:
            found = found._replace(quarantine=name == "quarantine")
        elif name == "previous" and not equals:
            found = found._replace(previous=True)
        elif name == "time-limit" and not equals:
            found = found._replace(time_limit=True)
        else:
            hint = nearest(name, [known.partition("=")[0] for known in WORDS])
            raise ValueError(f"wrap: must be some of {', '.join(WORDS)}, got {word!r}{hint or '; use one of these'}")
    return found
