"""Configure all tests: JAX on the CPU, one compilation cache, reproducible examples, and three checks.

Implicit rank promotion is an error, here and in subprocesses. A training program of one seed must not use a key twice.
A warning is an error (pyproject.toml). Indices and transfers are checked in test_loop and test_train.
"""

import functools
import os
import re
import tempfile
import warnings
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

# A subprocess started by a test inherits these. Set JAX_PLATFORMS to run the tests on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Compilation takes most of the time of most tests. The README's commands and the benchmarks do not set these
# flags. Nor does the nightly workflow, which runs the tests with XLA_FLAGS="".
HASTY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if Version(version("jaxlib")) < Version("0.11"):  # a third faster; later versions exit at unknown flags
    HASTY += " --xla_cpu_use_fusion_emitters=false"
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("XLA_FLAGS", HASTY)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="jaxrl_fast_tests_", ignore_cleanup_errors=True)  # gone at exit
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")  # pytest's workers share the cache

import hypothesis
import jax
import pytest

from jaxrl_fast.parallel import program
from jaxrl_fast.parallel.placement import SINGLE_DEVICE

hypothesis.settings.register_profile("local", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--nightly", action="store_true", help="also run the tests of tests/nightly.txt")
    parser.addoption("--num-cpu-devices", default=4, type=int, help="CPU devices that tests of sharding see")


def pytest_configure(config):
    jax.config.update("jax_num_cpu_devices", config.getoption("--num-cpu-devices"))
    program.build = _checking_key_reuse(program.build)


def pytest_ignore_collect(collection_path, config):
    """Import only modules with unit tests for `-m unit`, since importing all takes longer than these tests."""
    if config.option.markexpr == "unit" and collection_path.name.startswith("test_"):
        return "mark.unit" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config, items):
    """Deselect slow tests without `--slow`, and the tests of tests/nightly.txt without `--nightly`.

    If all tests are collected, a line of tests/nightly.txt without a match is an error.
    """
    lines = Path(__file__).with_name("nightly.txt").read_text(encoding="utf-8").splitlines()
    slow, nightly = {item for item in items if item.get_closest_marker("slow")}, set()
    by_file = defaultdict(list)
    for item in items:
        by_file[item.nodeid.partition("::")[0]].append(item)
    for line in lines:
        if line and not line.startswith("#"):
            file = line.partition("::")[0].replace("\\", "")
            found = [item for item in by_file[file] if re.fullmatch(line, item.nodeid)]
            if not found and config.args == config.getini("testpaths") and not config.option.markexpr:
                raise pytest.UsageError(f"tests/nightly.txt: no test matches {line}")
            nightly.update(found)
    left_out = (set() if config.getoption("slow") else slow) | (set() if config.getoption("nightly") else nightly)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _checking_key_reuse(build):
    """Let JAX check for reused keys while it traces a program. The check is too slow for all tests."""

    @functools.wraps(build)
    def build_and_check(env, agent, num_updates, placement=SINGLE_DEVICE, *others):
        # vmap over arrays of keys counts as their use: over seeds, shards and independent players.
        alone = placement.num_seeds == placement.num_shards == 1 and not env.spec.players
        with jax.debug_key_reuse(alone):
            return build(env, agent, num_updates, placement, *others)

    return build_and_check


@pytest.fixture
def any_ranks():
    """Allow implicit rank promotion, for code of other libraries."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def strict_keys():
    """Check for reused keys in the whole test. A use whose result is discarded counts too."""
    with jax.debug_key_reuse(True):
        yield


@pytest.fixture(scope="session")
def rlax():
    """Return rlax, an independent implementation of value targets. Its imports emit warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import rlax

        return rlax
