"""What holds for every test: JAX on the CPU and strict, one compilation cache, examples that can be repeated."""

import os
import tempfile

# A subprocess started by a test inherits these. Set JAX_PLATFORMS to run the tests on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
_cache = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="jaxrl_fast_tests_", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("local", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser):
    parser.addoption("--rank-promotion", default="allow", choices=("allow", "warn", "raise"), help="[N] + [T, N]")
    parser.addoption("--no-key-reuse-check", action="store_true", help="let a random key be used twice")
    parser.addoption("--num-cpu-devices", default=4, type=int, help="CPU devices that tests of sharding see")


def pytest_configure(config):
    jax.config.update("jax_numpy_rank_promotion", config.getoption("--rank-promotion"))
    jax.config.update("jax_debug_key_reuse", not config.getoption("--no-key-reuse-check"))
    jax.config.update("jax_num_cpu_devices", config.getoption("--num-cpu-devices"))


@pytest.fixture
def strict_ranks():
    """For tests of formulas: [N] may not meet [T, N] unless someone wrote that it should."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def key_reuse_allowed():
    """For tests that use a key twice on purpose, or run others' code that does."""
    with jax.debug_key_reuse(False):
        yield
