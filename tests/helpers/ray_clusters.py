"""A local Ray cluster for tests."""

import gc
import warnings

import pytest

from jaxrl_fast.utils import ray_cluster


def local_ray():
    """Yield the module `ray`, with a cluster of two cores on this machine; shut it down afterwards."""
    ray = pytest.importorskip("ray")
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_ADDRESS", "local")
    patch.setenv("PYTHONWARNINGS", "default")
    try:
        yield ray_cluster.connect("host.workers", "ray:2")
    finally:
        ray.shutdown()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves files open
            gc.collect()
        patch.undo()
