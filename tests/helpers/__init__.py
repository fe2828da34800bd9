"""Helpers of several tests: marks and a record here; environments, agents, runs and oracles in the modules."""

from functools import partial

import pytest


def slow(*values, **options):
    """Return a parameter with which a test is slow. A test that is always slow has the mark `pytest.mark.slow`."""
    assert not any(getattr(value, "__name__", "").startswith("test_") for value in values), "use @pytest.mark.slow"
    return pytest.param(*values, **options, marks=pytest.mark.slow)


def run_chunks_by(run, monkeypatch):
    """Patch `program.build`: later programs run a chunk by `run(chunk, state, num_updates)`."""
    from jaxrl_fast.parallel import program  # conftest must configure JAX before this import

    build = program.build

    def build_and_watch(*given, **options):
        built = build(*given, **options)
        return built._replace(chunk=partial(run, built.chunk))

    monkeypatch.setattr(program, "build", build_and_watch)


RECORD = {
    "seed": 0,
    "env_steps": 12_288,
    "updates": 6,
    "wall_time_s": 1.5,
    "train_time_s": 0.5,
    "env_steps_per_s": 96_000.0,
    "episodes": 410,
    "return_mean": 24.375,
    "return_min": 8.0,
    "return_max": 77.0,
    "episode_length_mean": 24.375,
    "value_loss": 31.5,
    "entropy": 0.69,
    "learning_rate": 1e-3,
}
