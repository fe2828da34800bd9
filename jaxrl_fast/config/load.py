"""Read the settings of a run from a command line or from Python keywords."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxrl_fast import agents
from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.config.help import print_help
from jaxrl_fast.config.resume import resumed
from jaxrl_fast.config.settings import Settings, check_unused, folder_of, resolve
from jaxrl_fast.config.sources import Setting, from_mapping, tokenize
from jaxrl_fast.utils.files import path_of


def from_command_line(argv: Sequence[str]) -> Settings:
    """Settings from a command line. Prints the help and exits where it is asked for."""
    positional, written = tokenize(argv)
    if len(positional) > 1:
        too_many = f"{positional[1]!r} is one word too many: only an algorithm stands without an option's name"
        raise ValueError(f"{too_many}, and an environment is --env NAME")
    asks_help = any(s.name in ("help", "h") for s in written)
    written = [s for s in written if s.name not in ("help", "h")]
    settings = _resolve(positional[0] if positional else "", written)
    check_unused(written, [settings.agent])
    if asks_help:
        print_help(settings.algo, settings.options, settings.agent)
        raise SystemExit(0)
    return settings


def from_keywords(
    preset: str | None = None, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> Settings:
    """Settings from Python: the options' names as keywords, the algorithm's own in `agent`."""
    algo = name_of(algo)
    given = ({} if preset is None else {"config": preset}) | options | ({"agent": agent} if agent else {})
    if not given.get("resume", True):  # as by default
        del given["resume"]
    written = from_mapping(given, lambda name: name)
    settings = _resolve(algo, written)
    check_unused(written, [settings.agent])
    return settings


def _resolve(algo: str, written: list[Setting]) -> Settings:
    """Settings of a new run, or with --resume those of an existing one."""
    resume = next((s for s in reversed(written) if s.name == "resume"), None)
    if resume is None:
        return resolve(algo, written)
    folder = path_of(folder_of(resume, "a run's folder"), "--resume")
    return resumed(algo, [s for s in written if s.name != "resume"], folder)


def name_of(algo: str | ModuleType) -> str:
    """An algorithm's, by which other processes find it."""
    if not isinstance(algo, ModuleType):
        return algo
    if algo.__name__ == "__main__":
        raise ValueError(
            "algo: the script that runs is no module that others can import; put it into a file of its own"
        )
    if algo.__name__ in CONFIGS:
        raise ValueError(f"algo: the module {algo.__name__} has the name of an algorithm of ours; give it another")
    return algo.__name__.removeprefix(f"{agents.__name__}.")
