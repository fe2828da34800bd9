"""Test replay storage: the first one with room is chosen, and the placement on devices does not depend on it."""

import os
import re
import shutil

import pytest

import jaxrl_fast
from jaxrl_fast import train
from jaxrl_fast.config import load
from jaxrl_fast.parallel import team
from jaxrl_fast.replay.host import codec
from jaxrl_fast.runs import replay_dir
from jaxrl_fast.training import disk, memory, plan, replay_storage
from jaxrl_fast.utils.memory import nbytes

pytestmark = pytest.mark.unit
GB = 10**9


@pytest.fixture
def free(monkeypatch):
    """Set the free bytes of the machine's memory and of its disk."""

    def set_free(in_memory, on_disk=100 * GB):
        for module in (memory, replay_storage):
            name = "free_bytes" if module is memory else "host_free_bytes"
            monkeypatch.setattr(module, name, lambda *_: in_memory)
        monkeypatch.setattr(disk, "free_bytes", lambda folder: on_disk)

    return set_free


def planned(env="Breakout-MinAtar", players="auto", **replay):
    replay = {"size": 1_000_000} | replay
    options = dict(env=env, num_envs=8, players=players, learning_starts=64, devices=1)
    settings = load.from_keywords(algo="dqn", replay=replay, **options)
    return plan.validate_plan(settings)


def storage_of(made):
    return made.settings.agent.replay.storage, made.settings.agent.replay.compression


@pytest.mark.slow
def test_auto_replay_storage_is_first_with_enough_room(free):
    """Store a million boards of 400 bytes.

    The CPU device needs them twice, and host memory an eighth of them if compressed. Of each row, 14 bytes stay on the
    device.
    """
    free(GB)
    made = planned()
    assert storage_of(made) == ("device", "auto") and not made.agent.learning.resources and not made.replay_note
    on_device = nbytes(memory.program.abstract(made.env, lambda env: made.agent.init(memory.key_of_seed(0))).replay)
    assert made.needs.replay == on_device
    free(GB // 5)
    made = planned()
    assert storage_of(made) == ("host", "zstd") and len(made.agent.learning.resources) == 1
    assert made.needs.replay == on_device - 400 * 1_000_000 + 8
    assert "in the host memory" in made.replay_note and "400.0 MB as they are" in made.replay_note
    assert storage_of(planned(compression="none")) == ("disk", "none")
    free(GB // 5, on_disk=GB // 100)
    proposed = r"\d+ \(device\) or \d+ \(host\) or \d+ \(disk\)$"
    with pytest.raises(ValueError, match=rf"does not fit in any storage, got 1000000; use at most {proposed}"):
        planned(compression="none")


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["host", "disk"])
def test_proposed_buffer_size_fits_and_2_percent_more_does_not(storage, free):
    free(GB // 5, GB // 5)
    with pytest.raises(
        ValueError, match=rf"^replay\.size: .* with replay\.storage {storage}, got 10000000; "
    ) as refused:
        planned(size=10**7, storage=storage, compression="none")
    proposed = int(re.search(rf"(\d+) \({storage}\)", str(refused.value))[1])
    assert storage_of(planned(size=proposed, storage=storage, compression="none"))[0] == storage
    with pytest.raises(ValueError, match="does not fit"):
        planned(size=int(1.02 * proposed), storage=storage, compression="none")


def test_replay_compression_applies_to_byte_observations_only(free, monkeypatch, capsys):
    free(100 * GB)
    assert storage_of(planned("CartPole-v1", storage="host")) == ("host", "none")
    assert storage_of(planned("CartPole-v1", storage="host", compression="zstd")) == ("host", "none")
    assert "observations are not bytes, got zstd; none is used" in capsys.readouterr().err
    monkeypatch.setattr(codec, "is_installed", lambda: False)
    assert storage_of(planned(storage="host")) == ("host", "none")
    with pytest.raises(ValueError, match="zstandard is not installed, got zstd; use none or pip install "):
        planned(storage="host", compression="zstd")


@pytest.mark.parametrize("storage", ["device", "host"])
def test_placement_does_not_depend_on_replay_storage(storage, free):
    """The number of gradient workers determines the order in which gradients are summed."""
    free(100 * GB)
    settings = load.from_keywords(algo="dqn", batch_size=256, replay={"storage": storage})
    assert (
        plan.validate_plan(settings).placement
        == plan.validate_plan(load.from_keywords(algo="dqn", batch_size=256)).placement
    )


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_independent_players_require_device_replay_storage(storage, free):
    free(100 * GB)
    game = dict(env="games/Paddles", players="independent", size=4096)
    with pytest.raises(ValueError, match=rf"^replay\.storage: must be device for independent players, got {storage}"):
        planned(storage=storage, **game)
    assert storage_of(planned(**game))[0] == "device"


def test_replay_whose_checkpoints_do_not_fit_on_disk_is_refused(free):
    """40,000 boards of 400 bytes are 16 MB. Two kept checkpoints may hold others, and so may the one being written."""
    free(100 * GB, on_disk=40 * 10**6)
    for storage in ("host", "disk"):
        with pytest.raises(
            ValueError,
            match=r"^replay\.size: .*, 6\d\.\d MB on disk with keep_checkpoints 2 and save_every 5min, does not fit "
            rf"with replay\.storage {storage}, got 40000; use at most \d+ \(device\) or",
        ):
            planned(size=40_000, storage=storage, compression="none")
    free(100 * GB, on_disk=100 * 10**6)
    made = planned(size=40_000, storage="host", compression="none")
    assert 48 * 10**6 < made.needs.files < 70 * 10**6 and "all checkpoints at most 6" in made.replay_note


# --replay-dir

RUN = ["dqn", "--env", "CartPole-v1", "--learning-starts", "64", "--replay.size", "192"]
ON_DISK = [*RUN, "--replay.storage", "disk"]
SHORT = ["--total-steps", "256", "--eval-episodes", "1", "--loggers", "none"]
SHORT += ["--hidden-sizes", "8", "--batch-size", "16"]


def refused(capsys, *arguments):
    """The line on standard error of a command that fails."""
    assert train.main([*arguments]) == 2
    line, empty = capsys.readouterr().err.removeprefix("error: ").split("\n")
    assert not empty
    return line


def test_invalid_replay_dir_is_rejected_in_one_line(tmp_path, monkeypatch, capsys):
    """In one line, with nothing written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / replay_dir.OWNER).write_text("/a/run\n")
    before = sorted(tmp_path.rglob("*"))
    folder = lambda name: ["--replay-dir", str(tmp_path / name)]
    assert "replay_dir: must be a folder" in refused(capsys, *ON_DISK, *folder("file"))
    assert "replay_dir: must be new or empty" in refused(capsys, *ON_DISK, *folder("full"))
    assert "replay_dir: has the replay of another run, /a/run" in refused(capsys, *ON_DISK, *folder("other"))
    assert "replay_dir: requires replay.storage host or disk, which ppo does not have" in refused(
        capsys, "ppo", *folder("new")
    )
    assert "host or disk, got device" in refused(capsys, *RUN, "--replay.storage", "device", *folder("new"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert f"replay_dir: {tmp_path} cannot be written" in refused(capsys, *ON_DISK, *folder("new"))
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000 if "new" in str(path) else 10 * GB)
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert re.search(r"use at most \d+ \(device\) or ", refused(capsys, *ON_DISK, *folder("new")))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_replay_dir_holds_files_of_one_run(tmp_path, capsys):
    """A copy of the run may not use them. Once the run is done they are deleted, if that is asked for."""
    run, folder, aside = tmp_path / "run", tmp_path / "replay_of_run", tmp_path / "aside"
    assert train.main([*ON_DISK, *SHORT, "--run-dir", str(run), "--replay-dir", str(folder)]) == 0
    assert [*(folder / "replay").glob("*.bin")] and (run / "replay").is_symlink()
    shutil.copytree(run, tmp_path / "copy", symlinks=True)
    assert "has the replay of another run" in refused(capsys, "--resume", str(tmp_path / "copy"))
    line = refused(capsys, "--resume", str(run), "--replay-dir", str(folder))
    assert line.startswith("replay_dir: cannot be combined with resume, which")
    folder.rename(aside)
    assert f"there is no {folder / 'replay'}; move the files back" in refused(capsys, "--resume", str(run))
    aside.rename(folder)
    assert train.main(["--resume", str(run), "--total-steps", "320", "--no-keep-replay"]) == 0
    assert "deleted the files of the replay" in capsys.readouterr().out
    assert [*folder.iterdir()] == [] and not (run / "replay").is_symlink()
    assert jaxrl_fast.load(run, which="last").env_steps == 320


def test_process_with_the_least_memory_decides(free, monkeypatch):
    """Another process has a fifth of this one's memory, in which the replay does not fit as it is."""

    class WithAnother(team.Team):
        def gather(self, value, topic="main"):
            return [value, False if value is True else value / 5]

    free(GB)
    monkeypatch.setattr(team, "CURRENT", [WithAnother()])
    assert storage_of(planned()) == ("host", "zstd")
