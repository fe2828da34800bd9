"""Use JAX's persistent compilation cache, and repair entries that a full disk has damaged."""

import contextlib
import os
import re
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_fast.utils.warnings import warn

CACHE = "~/.cache/jaxrl_fast"
ENTRY_SUFFIX = "-cache"  # of JAX's files; their names begin with the program's
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
PROBLEM = r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)"  # how JAX warns
HIT_EVENT = "/jax/compilation_cache/cache_hits"
NAMES = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)

_lock = threading.RLock()
_wanted: list[bool] = []  # an entry for each context that is open, in any thread
_before: dict[str, Any] = {}  # JAX's settings before the first of them
_undo: list[Callable[[], None]] = []  # functions that undo other changes after the last of them
_counts = {"hits": 0, "problems": 0}  # programs read, and entries that could not be read or written


@contextlib.contextmanager
def compile_cache(enabled: bool) -> Iterator[Path | None]:
    """Use the persistent compilation cache within the context, if `enabled` and possible.

    Programs of host pools must not be cached: they contain the address of a pool, which no later process has. JAX's
    settings hold for all threads, so the cache is used while all open contexts enable it.

    Yields:
        The cache's folder, or None if the cache is off.
    """
    with _lock:
        if not _wanted:
            _open()
        _wanted.append(enabled)
        folder = _apply()
    try:
        yield folder
    finally:
        with _lock:
            _wanted.remove(enabled)
            if _wanted:
                _apply()
            else:
                _close()


class CacheUse:
    """The use of the cache within `watch`."""

    from_cache = False  # a program was read, and no other one was added
    added = False  # a program was added that later processes can read


@contextlib.contextmanager
def watch(cache: Path | None) -> Iterator[CacheUse]:
    """Yield a record of the use of the cache in the context, filled at the end."""
    use, before, num_entries = CacheUse(), dict(_counts), num_cache_entries(cache)
    yield use
    new = {name: _counts[name] - before[name] for name in before}
    change = num_cache_entries(cache) - num_entries
    use.from_cache = new["hits"] > 0 and change <= 0 and not new["problems"]
    use.added = change > 0


def num_cache_entries(cache: Path | None) -> int:
    """Return the number of programs in the cache; compiled kernels are in a subfolder and are not counted."""
    return sum(entry.is_file() for entry in os.scandir(cache)) if cache and cache.is_dir() else 0


def _open() -> None:
    """Note JAX's settings, and watch for entries that it cannot read or write."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    _before.update({name: jax.config.values[name] for name in NAMES})
    compilation_cache.reset_cache()  # JAX reads the settings only once
    if "listener" not in _counts:
        _counts["listener"] = 1
        jax.monitoring.register_event_listener(_count_hit)
    show, filters = warnings.showwarning, list(warnings.filters)

    def repair(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        """Repair the cache if this is one of JAX's warnings about it, else show the warning."""
        problem = re.match(PROBLEM, str(message), re.DOTALL)
        if problem:
            _repair(*problem.groups())
        else:
            show(message, *args, **kwargs)

    def undo() -> None:
        """Restore how warnings are shown, unless others have changed that too."""
        if warnings.showwarning is repair:
            warnings.showwarning = show
        for added in [each for each in warnings.filters if each not in filters]:
            if added[1] is not None and added[1].pattern == PROBLEM:
                warnings.filters.remove(added)  # type: ignore[attr-defined]

    warnings.showwarning = repair
    warnings.filterwarnings("always", message=PROBLEM)
    _undo.append(undo)


def _close() -> None:
    """Restore JAX's settings and how warnings are shown."""
    _use(_before)
    _before.clear()
    while _undo:
        _undo.pop()()


def _apply() -> Path | None:
    """Apply the settings common to all open contexts. Return the cache's folder, or None if the cache is off."""
    enabled = all(_wanted) and _before["jax_enable_compilation_cache"]  # the user may have disabled it
    folder = _cache_folder(_before["jax_compilation_cache_dir"]) if enabled else None
    settings = _before | {"jax_enable_compilation_cache": folder is not None}
    if folder:
        settings["jax_compilation_cache_dir"] = str(folder)
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            settings["jax_persistent_cache_min_compile_time_secs"] = 0.0
    _use(settings)
    return folder


def _use(settings: dict[str, Any]) -> None:
    """Apply settings of JAX."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    changed = {name: value for name, value in settings.items() if jax.config.values[name] != value}
    for name, value in changed.items():
        jax.config.update(name, value)
    if changed:
        compilation_cache.reset_cache()


def _cache_folder(given: str | None) -> Path | None:
    """Return the user's folder, else the default one, or None if it cannot be created."""
    if given:
        return Path(given)
    try:
        folder = Path(CACHE).expanduser()
        os.makedirs(folder, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        return None
    return folder


def _count_hit(event: str, **_: Any) -> None:
    if event == HIT_EVENT:
        _counts["hits"] += 1


def _repair(action: str, program: str, reason: str) -> None:
    """Remove the damaged entries of a program, so that JAX can write a new one, and warn.

    JAX warns before it compiles, and keeps existing files. A full disk truncates the files that JAX writes.
    """
    import jax

    _counts["problems"] += 1
    folder = jax.config.values["jax_compilation_cache_dir"]
    removed = _remove_damaged(Path(folder), program) if folder else 0
    if action == "writing":
        warn(f"the compiled program could not be cached in {folder} ({reason})")
    elif removed:
        warn(f"the compile cache {folder} had a damaged entry, which has been removed; compiling again")
    else:
        warn(f"an entry of the compile cache {folder} could not be read ({reason}); compiling again")


def _remove_damaged(folder: Path, program: str) -> int:
    """Remove the entries of a program that cannot be decompressed. Return their number."""
    removed = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if not (path.name.startswith(program) and path.name.endswith(ENTRY_SUFFIX)):
                continue
            with contextlib.suppress(OSError):
                if _is_damaged(path.read_bytes()):
                    path.unlink()
                    removed += 1
    return removed


def _is_damaged(content: bytes) -> bool:
    """Return whether an entry cannot be decompressed; False if its format is unknown here."""
    try:
        if not content.startswith(ZSTD_MAGIC):
            zlib.decompress(content)
            return False
        try:
            from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14
        except ImportError:
            try:
                import zstandard
            except ImportError:
                return False
            zstandard.ZstdDecompressor().decompress(content)
        else:
            zstd.decompress(content)
    except Exception:  # each library has its own error
        return True
    return False
