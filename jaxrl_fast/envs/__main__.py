"""List the environments that can be trained: `python -m jaxrl_fast.envs [PATTERN]`."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jaxrl_fast import envs
from jaxrl_fast.config import cli
from jaxrl_fast.options.declare import option
from jaxrl_fast.utils import devices, formatting
from jaxrl_fast.utils.importing import install
from jaxrl_fast.utils.parsing import nearest

MAX_DESCRIBED = 40  # environments of a backend; if there are more, only names are listed
MAX_DESCRIBED_OF_SUITE = 3  # the same for a suite, where making one environment takes seconds


@dataclass(frozen=True)
class Options:
    """How the environments are listed."""

    describe: bool = option(False, "Show the observation and action of each environment, however many there are.")


USAGE = cli.CommandSpec(
    "python -m jaxrl_fast.envs",
    "[PATTERN]",
    Options,
    "List the environments that can be trained, with their observations and actions. PATTERN is a part of the "
    f"name, or contains * or ?. If a backend has more than {MAX_DESCRIBED} matches, only names are listed. To list a "
    "suite, begin PATTERN with its name: brax/.",
    min_args=0,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return cli.run_command(prepare, act, argv)


def prepare(argv: Sequence[str]) -> tuple[dict[str, list[str]], Options]:
    """Return the ids of each backend that match."""
    words, options = cli.read(USAGE, argv)
    devices.check_device()
    pattern = words[0] if words else ""
    found: dict[str, list[str]] = {}
    everything: list[str] = []
    missing: list[str] = []
    named = [suite for suite in envs.SUITES if pattern.lower().partition("/")[0] == suite]
    for backend in (*envs.BACKENDS, *named):
        try:
            ids = envs.registered(backend)
        except ValueError as error:  # the backend is not installed
            if named == [backend]:
                raise
            missing.append(f"{backend}: {error}")
            continue
        everything += ids
        found[backend] = [env_id for env_id in ids if matches(env_id, pattern)]
    if not any(found.values()):
        bare = [env_id.partition("/")[2] for env_id in everything]
        raise ValueError(f"PATTERN: no environment matches, got {pattern!r}{nearest(pattern, bare)}")
    for line in (*missing, *suites()) if not pattern else ():
        print(line, file=sys.stderr)
    return {backend: ids for backend, ids in found.items() if ids}, options


def suites() -> Iterator[str]:
    """Yield a line that names the installed suites, and one that names the others."""
    installed = [suite for suite in envs.SUITES if envs.is_installed(suite)]
    if installed:
        yield f"suites: {', '.join(installed)}; {USAGE.program} {installed[0]}/ lists one"
    absent = [suite for suite in envs.SUITES if suite not in installed]
    if absent:
        yield f"suites that are not installed: {', '.join(absent)}; {install(absent[0])} installs one"


def act(ready: tuple[dict[str, list[str]], Options]) -> None:
    """Print the list."""
    found, options = ready
    for backend, ids in found.items():
        print(f"{backend}: {formatting.counted(len(ids), 'environment')}", flush=True)
        few = options.describe or len(ids) <= (MAX_DESCRIBED_OF_SUITE if backend in envs.SUITES else MAX_DESCRIBED)
        for line in described(ids) if few else by_family(backend, ids):
            print(line, flush=True)


def matches(env_id: str, pattern: str) -> bool:
    """Return whether a pattern is a part of the id, or with * or ? matches the whole id, ignoring case."""
    pattern, names = pattern.lower(), (env_id.lower(), env_id.lower().partition("/")[2])
    if any(sign in pattern for sign in "*?["):
        return any(fnmatchcase(name, pattern) for name in names)
    return pattern in names[0]


def described(ids: Sequence[str]) -> Iterator[str]:
    """Yield a line for each id: its observation and action, or why it cannot be used."""
    from jaxrl_fast.envs import spaces  # imports jax

    width = max(map(len, ids))
    for env_id in ids:
        try:
            spec = envs.make(env_id, 1).spec
        except ValueError as error:
            yield f"  {env_id:<{width}}  {str(error).removeprefix(f'{env_id} ')}"
        else:
            yield f"  {env_id:<{width}}  {spaces.describe_obs(spec.obs):<22}  {spaces.describe_action(spec.action)}"


def by_family(backend: str, ids: Sequence[str]) -> Iterator[str]:
    """Yield lines of names, by family if the backend has families."""
    import textwrap

    family_of = getattr(importlib.import_module(envs.module_name(backend)), "family", lambda name: "")
    families: dict[str, list[str]] = {}
    for env_id in ids:
        name = env_id.partition("/")[2]
        families.setdefault(family_of(name).rpartition(".")[2], []).append(name)
    for family, names in families.items():
        yield f"  {family} ({len(names)})" if family else f"  {formatting.counted(len(names), 'name')}"
        whole = textwrap.TextWrapper(116, "    ", "    ", break_on_hyphens=False, break_long_words=False)
        yield whole.fill("  ".join(names))
    yield f"  {USAGE.program} PATTERN also shows observations and actions"


if __name__ == "__main__":
    cli.start(main)
