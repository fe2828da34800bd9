"""Use JAX's persistent compilation cache. JAX warns of an entry that it cannot read or write, and compiles."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CACHE = "~/.cache/jaxrl_fast"
HIT_EVENT = "/jax/compilation_cache/cache_hits"
NAMES = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)

_lock = threading.RLock()
_wanted: list[bool] = []  # an entry for each context that is open, in any thread
_before: dict[str, Any] = {}  # JAX's settings before the first of them
_counts = {"hits": 0}  # programs read


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
    use, hits, num_entries = CacheUse(), _counts["hits"], num_cache_entries(cache)
    yield use
    change = num_cache_entries(cache) - num_entries
    use.from_cache = _counts["hits"] > hits and change <= 0
    use.added = change > 0


def num_cache_entries(cache: Path | None) -> int:
    """Return the number of programs in the cache; compiled kernels are in a subfolder and are not counted."""
    return sum(entry.is_file() for entry in os.scandir(cache)) if cache and cache.is_dir() else 0


def _open() -> None:
    """Note JAX's settings, and count the programs that it reads."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    _before.update({name: jax.config.values[name] for name in NAMES})
    compilation_cache.reset_cache()  # JAX reads the settings only once
    if "listener" not in _counts:
        _counts["listener"] = 1
        jax.monitoring.register_event_listener(_count_hit)


def _close() -> None:
    """Restore JAX's settings."""
    _use(_before)
    _before.clear()


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
