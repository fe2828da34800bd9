"""This machine and this process: devices, the compile cache, signals, versions."""

import contextlib
import errno
import gc
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

from jaxrl_fast import __version__
from jaxrl_fast.spelling import why

CACHE = "~/.cache/jaxrl_fast"
LOCK = ".lock"
WATCH_S = 1.0  # between looks at other processes
NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP  # what file systems say that have none
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # the last is what submitit sends before the end


def offer_cpu_devices(wanted: int | str = "auto") -> None:
    """Lets JAX see every core as a device, or so many, or the most that were wanted before.

    It must be told before it first looks for devices.
    """
    import jax

    with contextlib.suppress(RuntimeError):  # too late, as in a notebook that has used JAX: what is there will do
        number = num_cores() if wanted == "auto" else int(wanted)
        jax.config.update("jax_num_cpu_devices", max(number, jax.config.values["jax_num_cpu_devices"]))


def quieten_blas() -> None:
    """Keeps scipy's BLAS, which JAX loads for orthogonal parameters, to one thread: more stay awake for nothing.

    For a tenth of a second after the first parameters they take a core from training. For a process of our own, before
    there are parameters; what the user has set stays.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warn(line: str) -> None:
    """On standard error."""
    tell(f"warning: {line}")


@contextlib.contextmanager
def warned(what: str) -> Iterator[None]:
    """What goes wrong in here is a warning, for it is not worth ending anything."""
    try:
        yield
    except Exception as error:
        warn(f"{what} ({why(error)})")


def tell(line: str) -> None:
    """Prints a line to standard error, if anybody reads it and there is room: one that is lost ends no training."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a signal came while another line was written
        print(line, file=sys.stderr)


def device() -> str:
    import jax

    first = jax.devices()[0]
    return "cpu" if first.platform == "cpu" else f"{first.platform} {first.device_kind}"


def gpu_unused() -> bool:
    """A GPU is here, JAX computes on the CPU, and nobody asked it to."""
    import jax

    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def why_no_c() -> str:
    """Why our C for a CPU, on which JAX computes, cannot be had; "" where it can, or is not wanted."""
    from jaxrl_fast import native  # which imports jax

    return native.why_not() if device() == "cpu" else ""


def peak_memory_mb() -> float:
    """The most that was in use: on the device where it keeps count, else of this process."""
    import jax

    on_device = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return round(on_device / 2**20 if on_device else _most_resident() / 2**10, 1)


def _most_resident() -> int:
    """Kilobytes. What `getrusage` says begins, in a process that another one started, with what that one had."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most // 2**10 if sys.platform == "darwin" else most  # macOS counts bytes


def versions() -> dict[str, str]:
    """The versions of everything that decides the result."""
    packages = ("jax", "jaxlib", "flax", "optax", "gymnax", "envpool", "numpy")
    found = {p: metadata.version(p) for p in packages if util.find_spec(p)}
    return {"jaxrl_fast": __version__, "python": platform.python_version(), **found}


def check_device() -> None:
    """ValueError where JAX finds none of the kind that it was told to use."""
    import jax

    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        asked = jax.config.values["jax_platforms"]
        which = f"JAX_PLATFORMS={asked}: " if asked else ""
        reason = " ".join(str(error).split()) or "it has no support for such a one"
        raise ValueError(f"{which}JAX finds no device here ({reason})") from error


def compiles() -> bool:
    """Whether JAX compiles what is jitted."""
    import jax

    return not jax.config.jax_disable_jit  # type: ignore[attr-defined]


def is_double() -> bool:
    """JAX makes float64 and int64 where no type is named."""
    import jax

    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


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


def forget(envs: Iterable[Any]) -> None:
    """Drops what was compiled, and after that the pools of these environments, whose addresses were in it."""
    import jax

    jax.clear_caches()
    gc.collect()
    for env in envs:
        env.close()


def entries(cache: Path | None) -> int:
    """How many programs the cache holds; what `native` keeps lies there in a folder."""
    return sum(entry.is_file() for entry in os.scandir(cache)) if cache and cache.is_dir() else 0


class Lock:
    """The right to write into a run's folder, until it is released. BlockingIOError: another process has it."""

    descriptor = -1

    def __init__(self, folder: Path):
        self.descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            import fcntl

            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has no such lock
            pass
        except OSError as error:
            if error.errno in NO_LOCKS:
                warn(f"the file system of {folder} has no locks, so nothing keeps two processes from writing there")
                return
            self.release()
            raise

    def release(self) -> None:
        """The kernel does so too when the process ends, however it ends."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    __del__ = release


def fingerprint() -> dict[str, Any]:
    """What decides the bits of a result, beside the configuration."""
    import jax

    from jaxrl_fast import native  # which imports jax

    return {
        "device": device(),
        "num_devices": jax.local_device_count(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "c_compiler": native.compiler(),
        "prng": jax.config.values["jax_default_prng_impl"],
    }


def stop_without(parent: int) -> None:
    """From now on this process is told to stop when the one that started it, however it ended, is no more.

    By SIGUSR1, for a parent that was told to stop has passed on what it was told: the same signal once more would be
    the word to quit at once (`stop_signals`), before what was trained is saved.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextlib.contextmanager
def stop_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """The first signal lets the chunk finish; the second does what it would have done.

    Under `nohup` the end of the terminal stays ignored. Where it is not, it is told twice at once, by the shell and by
    the kernel, so the second time is no second word.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {n: signal.getsignal(n) for name in SIGNALS if (n := getattr(signal, name, None))}
    hangup = getattr(signal, "SIGHUP", -1)
    if before.get(hangup) is signal.SIG_IGN:
        del before[hangup]

    def note(number, _):
        signal.signal(number, signal.SIG_IGN if number == hangup else before[number] or signal.SIG_DFL)
        stop(number)
        tell("stopping after this chunk; once more to quit at once")

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: another language's, which Python cannot put back
