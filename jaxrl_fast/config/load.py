"""Read the settings of a run from a command line or from Python keywords."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxrl_fast import agents
from jaxrl_fast.config.convert import convert
from jaxrl_fast.config.help import print_run_help
from jaxrl_fast.config.resume import resumed
from jaxrl_fast.config.settings import Settings, directory_of, request, resolve
from jaxrl_fast.config.sources import Setting, from_mapping, tokenize
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import POSITIVE, Option, Seconds
from jaxrl_fast.parallel.team import TIMEOUT_S
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.importing import describe

DISTRIBUTED = "distributed"  # an option of the command, which a run does not keep


def from_command_line(argv: Sequence[str]) -> Settings:
    """Return settings from a command line. Print the help and exit if `--help` is given."""
    algo, written = split(argv)
    asked, others = help_of(written)
    if asked is None:
        return _load(algo, written)
    topic = asked if asked not in ALGORITHMS else ""
    settings = _load(algo or (asked if asked in ALGORITHMS else ""), others)
    print_run_help(topic, settings)
    raise SystemExit(0)


def from_keywords(
    preset: str | None = None, algo: str | ModuleType = "", agent: Mapping[str, Any] | None = None, **options: Any
) -> Settings:
    """Return settings from Python: options as keywords, and the algorithm's options in `agent`."""
    given = ({} if preset is None else {"config": preset}) | options | ({"agent": agent} if agent else {})
    if not given.get("resume", True):  # the default
        del given["resume"]
    return _load(name_of(algo), from_mapping(given))


def split(argv: Sequence[str]) -> tuple[str, list[Setting]]:
    """Return the algorithm that a command line names, and its options."""
    positional, written = tokenize(argv)
    if len(positional) > 1:
        raise ValueError(f"only the algorithm is positional, got {positional[1]!r} too; use --env {positional[1]!r}")
    return positional[0] if positional else "", written


def processes_of(argv: Sequence[str]) -> tuple[tuple[str, float] | None, list[str]]:
    """Return where the processes of a run meet and its timeout, None for one process, and the rest of a command line.

    Raises ValueError for a timeout that is not one, or without distributed.
    """
    found, rest, words = {}, [], list(argv)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name not in (f"--{DISTRIBUTED}", f"--{DISTRIBUTED}.timeout"):
            rest.append(name + equals + value)
        elif name in found:
            raise ValueError(f"{name.removeprefix('--')}: given twice; keep one")
        else:
            follows = not equals and words and not words[0].startswith("-")
            found[name] = words.pop(0) if follows else value
    given = found.get(f"--{DISTRIBUTED}.timeout")
    option = Option(f"{DISTRIBUTED}.timeout", Seconds, TIMEOUT_S, bounds=POSITIVE)
    timeout = TIMEOUT_S if given is None else convert(option, Setting(option.name, [given], option.name))
    if f"--{DISTRIBUTED}" in found:
        return (found[f"--{DISTRIBUTED}"], float(timeout)), rest
    if given is not None:
        raise ValueError(f"{option.name}: is about several processes, got {given}; add --{DISTRIBUTED}")
    return None, rest


def gpu_of(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the GPU for which a dry run compiles, None for this machine's devices, and the rest of a command line."""
    _, written = tokenize(argv)
    asked = [s for s in written if s.name == "for"]
    if not asked:
        return None, [*argv]
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--for" and asked[-1].values:
            next(words)
        elif word.partition("=")[0] != "--for":
            rest.append(word)
    return " ".join(map(str, asked[-1].values)), rest


def help_of(written: Sequence[Setting]) -> tuple[str | None, list[Setting]]:
    """Return the topic of --help, "" for none and None without --help, and the other settings."""
    asked = [s for s in written if s.name == "help"]
    topic = " ".join(map(str, asked[-1].values)) if asked else None
    return topic, [s for s in written if s.name != "help"]


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether a command line has --help."""
    return help_of(tokenize(argv)[1])[0] is not None


def _load(algo: str, written: list[Setting]) -> Settings:
    """Return the settings of a new run, or with --resume the settings of an existing run."""
    resume = next((s for s in reversed(written) if s.name == "resume"), None)
    if resume is not None:
        folder = path_of(directory_of(resume, "a run directory"), "resume")
        return resumed(algo, [s for s in written if s.name != "resume"], folder)
    return resolve(request(algo, written))


def name_of(algo: str | ModuleType) -> str:
    """Return the name by which other processes import an algorithm."""
    if isinstance(algo, str):
        return algo
    if not algo:  # None
        return ""
    if not isinstance(algo, ModuleType):
        raise ValueError(f"algo: must be a name or a module, got {describe(algo)}; for example algo='ppo'")
    if algo.__name__ == "__main__":
        raise ValueError("algo: other processes cannot import the running script; put the algorithm into its own file")
    if algo.__name__ in ALGORITHMS:
        raise ValueError(f"algo: the module {algo.__name__} has the name of a built-in algorithm; rename it")
    return algo.__name__.removeprefix(f"{agents.__name__}.")
