"""Test the disk estimate of a run: its checkpoints and metrics."""

from pathlib import Path

import pytest

from jaxrl_fast.config import load
from jaxrl_fast.parallel.placement import SINGLE_DEVICE, Placement
from jaxrl_fast.training import disk
from jaxrl_fast.training.memory import MemoryEstimate

pytestmark = pytest.mark.unit


def estimate(line="ppo", replay=0, placement=SINGLE_DEVICE, num_updates=1000):
    options = load.from_command_line(line.split()).options
    needs = MemoryEstimate(12_000, replay, 6_000, None)
    return disk.estimate(needs, placement, options, num_updates, 512, Path("not/there/yet"))


def test_checkpoint_estimate_is_state_of_one_worker_of_each_seed():
    assert estimate().checkpoint == 18_000 and not estimate().has_replay
    assert estimate(replay=9_000).checkpoint == 27_000 and estimate(replay=9_000).has_replay
    assert estimate(placement=Placement(num_grad_workers=2)).checkpoint == 9_000
    assert estimate(placement=Placement(num_seeds=3)).checkpoint == 18_000


def test_disk_estimate_adds_best_checkpoint_and_one_being_written():
    assert estimate("ppo --keep-checkpoints 5").num_checkpoints == 7


def test_metrics_estimate_grows_with_records_and_seeds():
    one = estimate("ppo --loggers none").metrics
    assert one == 500 * disk.RECORD_BYTES
    assert estimate("ppo --loggers none --log-every 512").metrics == 2 * one
    assert estimate("ppo --loggers none", placement=Placement(num_seeds=3)).metrics == 3 * one
    assert estimate("ppo").metrics > one


def test_disk_estimate_prints_one_line_with_free_space():
    said = str(estimate(replay=9_000)._replace(free=5 * 10**9))
    assert said == "checkpoints 27.0 kB with the replay, at most 4 · metrics about 1.1 MB · 5.0 GB free"
    assert estimate().free > 0 and estimate().total == 4 * 18_000 + estimate().metrics
