"""Switch JAX's persistent compilation cache on or off."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CACHE = "~/.cache/jaxrl_fast"


@contextlib.contextmanager
def compile_cache(enabled: bool) -> Iterator[Path | None]:
    """Use the persistent compilation cache within the context, if `enabled` and possible.

    Programs of host pools must not be cached: they contain the address of a pool, which no later process has.

    Yields:
        The cache's folder, or None if the cache is off.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    enabled = enabled and jax.config.values["jax_enable_compilation_cache"]  # the user may have disabled it
    folder = _cache_folder(jax.config.values["jax_compilation_cache_dir"]) if enabled else None
    settings: dict[str, Any] = {"jax_enable_compilation_cache": folder is not None}
    if folder:
        settings["jax_compilation_cache_dir"] = str(folder)
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            settings["jax_persistent_cache_min_compile_time_secs"] = 0.0
    previous = {name: jax.config.values[name] for name in settings}

    def use(settings: dict[str, Any]) -> None:
        """Apply JAX settings."""
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX reads the settings only once

    use(settings)
    try:
        yield folder
    finally:
        use(previous)


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


def num_cache_entries(cache: Path | None) -> int:
    """Return the number of programs in the cache; compiled kernels are in a subfolder and are not counted."""
    return sum(entry.is_file() for entry in os.scandir(cache)) if cache and cache.is_dir() else 0
