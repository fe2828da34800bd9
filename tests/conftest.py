"""What holds for every test: JAX on the CPU, one compilation cache, examples that can be repeated."""

import os
import tempfile

# A subprocess started by a test inherits these. Set JAX_PLATFORMS to run the tests on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
# Compiling is most of the time of most tests. The README's commands and the benchmarks compile as users do; so do the
# tests with XLA_FLAGS="".
HASTY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("XLA_FLAGS", HASTY)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="jaxrl_fast_tests_", ignore_cleanup_errors=True)  # gone at exit
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")  # the workers share it

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("local", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser):
    parser.addoption("--strict-ranks", action="store_true", help="in every test, not only those with the fixture")
    parser.addoption("--strict-keys", action="store_true", help="in every test, not only those with the fixture")
    parser.addoption("--num-cpu-devices", default=4, type=int, help="CPU devices that tests of sharding see")


def pytest_configure(config):
    jax.config.update("jax_num_cpu_devices", config.getoption("--num-cpu-devices"))
    if config.getoption("--strict-ranks"):
        jax.config.update("jax_numpy_rank_promotion", "raise")
    if config.getoption("--strict-keys"):
        jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture
def strict_ranks():
    """[N] may not meet [T, N] unless the code says so. For formulas; networks and gymnax add biases the plain way."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def strict_keys():
    """No key is used twice. JAX reads this off the program, so a key kept where its use was discarded counts too."""
    with jax.debug_key_reuse(True):
        yield
