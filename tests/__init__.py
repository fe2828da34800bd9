"""What several tests share; `probes` has environments with known answers."""

from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)  # parameters with which a test takes long


def run_chunks_by(run, monkeypatch):
    """Programs that are built from here on run a chunk by `run(chunk, state, num_updates)`."""
    from jaxrl_fast import program  # later than conftest, which JAX listens to only before it is imported

    build = program.build

    def build_and_watch(*given, **options):
        built = build(*given, **options)
        return built._replace(chunk=partial(run, built.chunk))

    monkeypatch.setattr(program, "build", build_and_watch)
