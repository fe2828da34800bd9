"""Try options of envpool in a child process, because a bad value may abort the process.

envpool's families do not check most of their hundreds of options: a board of size 0 aborts, and one of size a million
never finishes. Without OpenGL, drawing an image of MuJoCo ends the process. This file is also the child's program,
which prints only the reason of a failure.
"""

import contextlib
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TRIAL_TIMEOUT_S = 20  # for one environment's first steps
CLEANUP_TIMEOUT_S = 1  # for processes that the child started, to end after it
FFI_TIMEOUT_S = 120  # for JAX to find its device and compile one step
IMAGE_TIMEOUT_S = 120  # for one environment's first image, which some tasks take 20 s to draw without a GPU
MAX_MEMORY_BYTES = 4 * 2**30  # of address space
TRIAL_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}  # more BLAS threads would reserve memory each
NUM_STEPS = 50
REJECTED_STATUS = 3  # the child's exit status if envpool raised an exception


@functools.cache
def rejection_reason(name: str, config: str) -> str:
    """Return why one environment of a task fails with these options (JSON), or "" if it steps."""
    return _run_child(["play", name, config], TRIAL_TIMEOUT_S, TRIAL_ENVIRONMENT)


@functools.cache
def ffi_failure() -> str:
    """Return why compiled programs cannot call envpool, or "" if they can; the child reserves no device memory."""
    return _run_child(["calls"], FFI_TIMEOUT_S, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


@functools.cache
def image_failure(name: str, config: str) -> str:
    """Return why a task with these options (JSON) cannot draw an image, or "" if it can."""
    return _run_child(["draw", name, config], IMAGE_TIMEOUT_S, TRIAL_ENVIRONMENT)


def _run_child(words: list[str], timeout_s: float, environment: dict[str, str]) -> str:
    """Return how this file's program failed, as the end of a sentence, or ""; nothing is printed or left behind."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    command = [sys.executable, "-P", os.path.abspath(__file__), *words]
    with (
        tempfile.TemporaryDirectory(prefix="jaxrl_fast_trial_", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as output,
    ):
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path} | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"the trial did not finish within {timeout_s} s"
        finally:
            has_survivors = _end_all(child)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if status < 0:
        return f"envpool aborted the trial process (signal {-status}, {signal.Signals(-status).name})"
    if status == REJECTED_STATUS and lines:
        return lines[-1]
    if status:
        return f"the trial process exited with status {status}"
    return "it leaves processes running" if has_survivors else ""


def _end_all(child: subprocess.Popen[bytes]) -> bool:
    """Kill a process and its children. Return whether it had exited while some children were still running."""
    ended, until = child.returncode is not None, time.monotonic() + CLEANUP_TIMEOUT_S
    while ended and _alive(child.pid) and time.monotonic() < until:
        time.sleep(0.02)
    has_survivors = ended and _alive(child.pid)
    with contextlib.suppress(ProcessLookupError):  # the group is empty
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return has_survivors


def _alive(group: int) -> bool:
    """Return whether a process of this group is still running."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process may have ended by itself
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def play(name: str, config: str) -> None:
    """Reset one environment and take some random steps."""
    import resource

    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MAX_MEMORY_BYTES)):
        resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
    import envpool
    import numpy as np

    family = envpool.registration.registry.specs[name][0]
    if family == "envpool.procgen":
        runpy.run_path(str(Path(__file__).with_name("qt.py")))["load_for"](family)  # without the package, which is slow
    pool = envpool.make_gymnasium(name, num_envs=1, seed=[1], **json.loads(config))
    pool.reset()
    space = pool.action_space
    for _ in range(NUM_STEPS if isinstance(space.shape, tuple) else 0):  # a Dict has no shape, and is rejected later
        pool.step(np.asarray([space.sample()], space.dtype))


def draw(name: str, config: str) -> None:
    """Draw the first observation of one environment."""
    runpy.run_path(str(Path(__file__).with_name("opengl.py")))["load"]()
    import envpool

    pool = envpool.make_gymnasium(name, num_envs=1, seed=[1], render_mode="rgb_array", **json.loads(config))
    pool.reset()
    pool.render(env_ids=[0])


def calls() -> None:
    """Step one environment from a compiled program."""
    import envpool
    import jax

    jax.devices()
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[0], num_threads=1)
    pool.reset()
    handle, _, _, step = pool.xla()
    jax.block_until_ready(jax.jit(step)(handle, jax.numpy.zeros(1, jax.numpy.int32)))


TRIALS: dict[str, Callable[..., None]] = {"play": play, "draw": draw, "calls": calls}

if __name__ == "__main__":
    try:
        TRIALS[sys.argv[1]](*sys.argv[2:])
    except Exception as error:  # environments may raise anything
        print(f"\n{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
        os._exit(REJECTED_STATUS)
    os._exit(0)  # without destructors, which may crash
