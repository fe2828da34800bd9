"""Test the compile cache: it does without damaged entries, reports what it did, and restores JAX's settings."""

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxrl_fast
from jaxrl_fast.utils import compile_cache

settings = lambda: {name: jax.config.values[name] for name in compile_cache.NAMES}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of an empty cache; restore JAX's settings afterwards."""
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    given = settings()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    for name, value in given.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compiled(number):
    """Compile a small program as a new process would. Return what the cache did."""
    with compile_cache.compile_cache(True) as cache, compile_cache.watch(cache) as use:
        assert int(jax.jit(lambda x: x + number)(1)) == number + 1  # == of arrays would be a second program
    return use


def test_program_is_cached_once_and_then_read(folder, capsys):
    first, second = compiled(7), compiled(7)
    assert (first.added, first.from_cache) == (True, False)
    assert (second.added, second.from_cache) == (False, True)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_damaged_entry_is_compiled_again(folder, num_bytes):
    compiled(7)
    (entry,) = folder.glob("*-cache")
    entry.write_bytes(entry.read_bytes()[:num_bytes])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert not compiled(7).from_cache


def test_full_disk_does_not_stop_program(folder):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.warns(UserWarning, match="Error writing persistent compilation cache entry"):
            assert not compiled(7).from_cache
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_concurrent_threads_restore_jax_settings(folder):
    """Three threads enter one after the other; the second one disables the cache."""
    before = settings()
    barriers = [threading.Barrier(3, timeout=30) for _ in range(4)]

    def use(place, enabled):
        for barrier in barriers[: place + 1]:
            barrier.wait()
        with compile_cache.compile_cache(enabled):
            for barrier in barriers[place + 1 :]:
                barrier.wait()

    threads = [threading.Thread(target=use, args=each) for each in enumerate((True, False, True))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert settings() == before


def test_compile_cache_contexts_may_exit_in_entry_order(folder):
    before = settings()
    first, second = compile_cache.compile_cache(True), compile_cache.compile_cache(False)
    first.__enter__()
    assert second.__enter__() is None and not jax.config.values["jax_enable_compilation_cache"]
    first.__exit__(None, None, None)
    assert not jax.config.values["jax_enable_compilation_cache"]
    second.__exit__(None, None, None)
    assert settings() == before


@pytest.mark.slow
def test_concurrent_fits_restore_jax_settings(folder, tmp_path):
    """Each of three runs waits at its first record for the others; one of them disables the cache."""
    before = dict(jax.config.values)
    together, is_enabled = threading.Barrier(3, timeout=300), {}

    def train(seed):
        def on_record(records, state):
            if seed not in is_enabled:
                together.wait()
                is_enabled[seed] = jax.config.values["jax_enable_compilation_cache"]
                together.wait()

        return jaxrl_fast.fit(
            "ppo_cartpole",
            seed=seed,
            num_envs=2,
            total_steps=64,
            eval_episodes=1,
            rollout_length=8,
            num_minibatches=1,
            num_epochs=1,
            hidden_sizes=[4],
            compile_cache=seed != 1,
            loggers=(),
            run_dir=str(tmp_path / f"run_{seed}"),
            callbacks=[SimpleNamespace(on_record=on_record)],
        )

    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(train, range(3)))
    assert [run.summary["status"] for run in runs] == ["done"] * 3
    assert is_enabled == {0: False, 1: False, 2: False}
    assert dict(jax.config.values) == before
