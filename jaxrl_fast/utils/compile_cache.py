"""JAX's persistent compilation cache."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CACHE = "~/.cache/jaxrl_fast"


@contextlib.contextmanager
def compile_cache(wanted: bool) -> Iterator[Path | None]:
    """What is compiled meanwhile outlives the process if that is wanted and there is a place for it; gives the place.

    It is not for programs of host pools, for a pool's address is a part of them, and no later process has it.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    wanted = wanted and jax.config.values["jax_enable_compilation_cache"]  # the user may have said no to JAX
    folder = _cache_folder(jax.config.values["jax_compilation_cache_dir"]) if wanted else None
    settings: dict[str, Any] = {"jax_enable_compilation_cache": folder is not None}
    if folder:
        settings["jax_compilation_cache_dir"] = str(folder)
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            settings["jax_persistent_cache_min_compile_time_secs"] = 0.0
    before = {name: jax.config.values[name] for name in settings}

    def use(settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX looks at its settings once

    use(settings)
    try:
        yield folder
    finally:
        use(before)


def _cache_folder(given: str | None) -> Path | None:
    """The user's, or ours, or none where none can be made."""
    if given:
        return Path(given)
    try:
        folder = Path(CACHE).expanduser()
        os.makedirs(folder, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None
    return folder


def num_cache_entries(cache: Path | None) -> int:
    """How many programs the cache holds; what `native` keeps lies there in a folder."""
    return sum(entry.is_file() for entry in os.scandir(cache)) if cache and cache.is_dir() else 0
