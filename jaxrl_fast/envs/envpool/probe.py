"""What may make envpool end its process is tried in another one, which may die of it.

Its families take most of their options without looking, and there are hundreds: a board of size 0 aborts, and one of a
million is never laid. So this file is also a program, which knows nothing of ours but where Qt is, and prints
only why it failed.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS = 20  # for one environment's first steps
SECONDS_TO_FOLLOW = 1  # for what it has started to end after it
SECONDS_OF_CALLS = 120  # for JAX to find its device, and compile one step
MAX_BYTES = 4 * 2**30  # of addresses: an option that asks for more memory is refused it
MODEST = {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}  # else each core takes its own; malloc stays what it is
NUM_STEPS = 50
REFUSED = 3  # the exit status where envpool said why


@functools.cache
def why_rejected(name: str, config: str) -> str:
    """Why a task of envpool cannot be played with these options (JSON), from one environment; "" where it can."""
    return _tried(["play", name, config], SECONDS, MODEST)


@functools.cache
def why_no_calls() -> str:
    """Why compiled programs cannot call envpool; "" where they can. The device's memory is left to this process."""
    return _tried(["calls"], SECONDS_OF_CALLS, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def _tried(words: list[str], seconds: float, more: dict[str, str]) -> str:
    """How this file's program failed, in a sentence's end; "" where it did not. Nothing of it is seen or left."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    command = [sys.executable, "-P", os.path.abspath(__file__), *words]
    with (
        tempfile.TemporaryDirectory(prefix="jaxrl_fast_trial_", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as output,
    ):
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path} | more,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"envpool was not through with the trial after {seconds} s"
        finally:
            left = _end_all(child)
        output.seek(0)
        said = output.read().decode(errors="replace").strip().splitlines()
    if status < 0:
        return f"envpool ended the process that tried it (signal {-status}, {signal.Signals(-status).name})"
    if status == REFUSED and said:
        return said[-1]
    if status:
        return f"the process that tried it ended with status {status}"
    return "it leaves processes behind, which would go on for ever" if left else ""


def _end_all(child: subprocess.Popen[bytes]) -> bool:
    """Ends a process and all that it has started; whether it has ended and any of these were still there after that."""
    ended, until = child.returncode is not None, time.monotonic() + SECONDS_TO_FOLLOW
    while ended and _alive(child.pid) and time.monotonic() < until:
        time.sleep(0.02)
    left = ended and _alive(child.pid)
    with contextlib.suppress(ProcessLookupError):  # the group is empty
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return left


def _alive(group: int) -> bool:
    """A process of this group is there, and has not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def play(name: str, config: str) -> None:
    """One environment, its reset and some steps at random."""
    import resource

    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MAX_BYTES)):
        resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
    import envpool
    import numpy as np

    family = envpool.registration.registry.specs[name][0]
    if family == "envpool.procgen":
        from jaxrl_fast.envs.envpool import qt

        qt.load_for(family)
    pool = envpool.make_gymnasium(name, num_envs=1, seed=[1], **json.loads(config))
    pool.reset()
    space = pool.action_space
    for _ in range(NUM_STEPS if isinstance(space.shape, tuple) else 0):  # a Dict has none, and is refused later
        pool.step(np.asarray([space.sample()], space.dtype))


def calls() -> None:
    """One step of one environment from a compiled program."""
    import envpool
    import jax

    jax.devices()
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[0], num_threads=1)
    pool.reset()
    handle, _, _, step = pool.xla()
    jax.block_until_ready(jax.jit(step)(handle, jax.numpy.zeros(1, jax.numpy.int32)))


if __name__ == "__main__":
    try:
        calls() if sys.argv[1] == "calls" else play(*sys.argv[2:])
    except Exception as error:  # whatever envpool says
        print(f"\n{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
        os._exit(REFUSED)
    os._exit(0)  # how pools end is no matter
