"""Test the disk estimate of a run: its checkpoints and metrics."""

import dataclasses
import errno
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_fast.config import cli, load
from jaxrl_fast.parallel.placement import SINGLE_DEVICE, Placement
from jaxrl_fast.replay.host import journal, resource
from jaxrl_fast.replay.host.buffer import HostBuffer, Shape
from jaxrl_fast.runs import checkpoint, checkpoint_writer
from jaxrl_fast.training import disk, startup
from jaxrl_fast.training.memory import MemoryEstimate
from jaxrl_fast.utils import files

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


NUM_ENVS, FRAME_BYTES, SIZE = 4, 50, 16 * 4 * 40  # a replay of 40 blocks of each environment


@pytest.mark.parametrize("with_best", [False, True])
@pytest.mark.parametrize("blocks_apart", [3, 40, 100])
@pytest.mark.parametrize("on_disk", [False, True])
def test_files_of_replay_with_all_kept_checkpoints_take_no_more_than_estimated(
    on_disk, blocks_apart, with_best, tmp_path, monkeypatch
):
    """Fill a buffer 20 times, and save it with a real writer; one checkpoint may be the best of all."""
    for module in (journal, checkpoint):
        monkeypatch.setattr(module, "sync", lambda path: None)  # saves time
    buffer = HostBuffer(Shape(SIZE // NUM_ENVS, NUM_ENVS, FRAME_BYTES), on_disk, compressed=False)
    (tmp_path / "checkpoints").mkdir()
    buffer.open(tmp_path / "replay")
    writer = checkpoint_writer.Writer(tmp_path / "checkpoints", 2, [resource(buffer, "replay")])
    used, remove = [0], writer._remove_old

    def look(*args):
        used.append(files.size(tmp_path / "replay"))
        return args and remove(*args)

    monkeypatch.setattr(writer, "_remove_old", look)
    for block in range(1, 801):
        buffer.put(0, (block - 1) * 16 % (SIZE // NUM_ENVS), np.zeros((16, NUM_ENVS, FRAME_BYTES), np.uint8))
        if block % blocks_apart == 0:
            score = 1.0 if with_best and 100 <= block < 100 + blocks_apart else None
            writer.save(writer.folder(block), {"x": np.zeros(1)}, {}, score)
            assert writer.wait() == ""
        look()
    buffer.close()
    options = load.from_keywords(
        algo="dqn",
        num_envs=NUM_ENVS,
        save_every=str(blocks_apart * 16 * NUM_ENVS),
        eval_every=1000 if with_best else 0,
        total_steps=800 * 16 * NUM_ENVS,
    ).options
    estimated = disk.ReplayFiles(options, on_disk, FRAME_BYTES, FRAME_BYTES).num_bytes(SIZE)
    assert max(used) <= 1.01 * estimated, "each block has 4 more bytes"
    assert max(used) >= 0.7 * estimated, "it is no wild guess"
    by_clock = dataclasses.replace(options, save_every="5min")
    assert disk.ReplayFiles(by_clock, on_disk, FRAME_BYTES, FRAME_BYTES).num_bytes(SIZE) >= estimated


def test_files_of_replay_hold_no_more_than_all_steps():
    short = load.from_keywords(algo="dqn", num_envs=NUM_ENVS, total_steps=640, keep_checkpoints=5).options
    assert disk.ReplayFiles(short, False, 50, 50).num_bytes(10**6) == (640 + 7 * 16 * NUM_ENVS) * 50
    assert disk.ReplayFiles(short, False, 50, 5).num_bytes(10**6) == (640 + 7 * 16 * NUM_ENVS) * 5, "compressed"


def test_disk_estimate_counts_files_of_replay_unless_they_are_elsewhere():
    needs, options = MemoryEstimate(12_000, 9_000, 6_000, None, files=10**7), load.from_command_line(["dqn"]).options
    of = lambda options: disk.estimate(needs, SINGLE_DEVICE, options, 1000, 512, Path("not/there/yet"))
    here, elsewhere = of(options), of(dataclasses.replace(options, replay_dir="/other"))
    assert here.total - elsewhere.total == 10**7
    assert " at most 4 · replay at most 10.0 MB · metrics" in str(here) and "replay at" not in str(elsewhere)


def test_full_disk_of_replay_is_one_line_with_file_and_command(tmp_path, monkeypatch, capsys):
    """The file is one of the replay's journal; the error of any other file keeps its own line."""
    made = SimpleNamespace(
        folder=tmp_path / "runs" / "a b",
        place=Path("runs/a b"),
        agent=SimpleNamespace(learning=SimpleNamespace(resources=[SimpleNamespace(name="replay")])),
        shown=lambda path: Path("runs/a b") / path.relative_to(tmp_path / "runs" / "a b"),
    )
    made.folder.mkdir(parents=True)

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    def append(folder):
        files_of = journal.Journal(made.folder / folder, 1)
        files_of.begin(0)
        with startup.advised(made):
            files_of.append(0, [b"block"])

    monkeypatch.setattr(journal, "_write", fail)
    assert cli.run_command(lambda folder: folder, append, "replay") == 1
    assert cli.run_command(lambda folder: folder, append, "other") == 1
    full, other = capsys.readouterr().err.splitlines()
    problem = "00000001.bin: cannot be written (No space left on device)"
    remedy = "make space, then continue from the last checkpoint with python -m jaxrl_fast.train --resume 'runs/a b'"
    assert full == f"error: runs/a b/replay/{problem}; {remedy}"
    assert other == f"error: {made.folder}/other/{problem}"
