"""Test the loggers: files that other programs can read, and tracking services."""

import dataclasses
import importlib
import json
import sys
import types
from pathlib import Path

import pytest

from jaxrl_fast.config import load
from jaxrl_fast.loggers import jsonl, sinks, tensorboard, trackers
from jaxrl_fast.parallel.placement import SINGLE_DEVICE
from jaxrl_fast.training import run_logger, summary
from jaxrl_fast.utils import locks
from tests.helpers import RECORD

pytestmark = pytest.mark.unit


def test_json_lines_writes_one_strict_object_per_line(tmp_path):
    sink = jsonl.JsonLines(tmp_path / "metrics.jsonl")
    sink.write([RECORD, RECORD | {"seed": 1, "return_mean": None}])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # on disk before it is closed
    assert [json.loads(text)["seed"] for text in lines] == [0, 1]
    assert json.loads(lines[1])["return_mean"] is None
    with pytest.raises(ValueError, match="not JSON compliant"):
        sink.write([RECORD | {"return_mean": float("nan")}])
    sink.close()


def test_json_lines_never_overwrites_file(tmp_path):
    jsonl.JsonLines(tmp_path / "metrics.jsonl").close()
    with pytest.raises(FileExistsError):
        jsonl.JsonLines(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.rename(path.with_name("moved"))])
def test_json_lines_restores_lost_file(lose, tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = jsonl.JsonLines(path)
    sink.write([RECORD])
    assert not sink.restore()
    lose(path)
    sink.write([RECORD | {"seed": 1}])
    assert sink.restore() and not sink.restore()
    sink.write([RECORD | {"seed": 2}])
    sink.close()
    assert [json.loads(text)["seed"] for text in path.read_text().splitlines()] == [0, 1, 2]


def test_tags_are_cleanrl_names_and_seed_means():
    found = sinks.tags([RECORD, RECORD | {"seed": 1, "return_mean": None, "entropy": 0.71}])
    assert found["charts/episodic_return"] == 24.375
    assert found["losses/entropy"] == pytest.approx(0.70)
    assert found["charts/SPS"] == 96_000
    assert found["losses/value_loss"] == 31.5
    assert not any("seed" in tag or "env_steps" in tag.removesuffix("env_steps_per_s") for tag in found)
    of_values = dict(episodes=1, td_loss=1.0, q_value=2.0, epsilon=0.1, clip_fraction=0.2)
    names = {"charts/episodes", "losses/td_loss", "losses/q_values", "charts/epsilon", "losses/clipfrac"}
    assert sinks.tags([of_values]).keys() == names


def test_tensorboard_events_are_readable(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    sink = tensorboard.TensorBoard(tmp_path)
    sink.write([RECORD])
    sink.write([RECORD | {"env_steps": 2**33, "return_mean": None}])
    sink.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    data, events = path.read_bytes(), []
    while data:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    read = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    assert read[12_288, "charts/episodic_return"] == pytest.approx(24.375)
    assert read[2**33, "charts/SPS"] == 96_000
    assert (2**33, "charts/episodic_return") not in read


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_trackers_make_same_calls(service, monkeypatch):
    calls = []
    names = ("init", "log", "finish")
    fake = types.SimpleNamespace(**{n: lambda *a, _n=n, **k: calls.append((_n, a, k)) for n in names})
    monkeypatch.setitem(sys.modules, service, fake)
    assert importlib.import_module(service) is fake
    sink = trackers.Tracker(service, "project", "run", "1a2b", {"seed": 3})
    sink.write([RECORD])
    sink.close()
    assert [name for name, _, _ in calls] == ["init", "log", "finish"]
    who = {"wandb": {"name": "run", "id": "1a2b"}, "trackio": {"name": "run-1a2b"}}[service]
    assert calls[0][2] == {"project": "project", "config": {"seed": 3}, "resume": "allow"} | who
    assert calls[1][1][0]["charts/episodic_return"] == 24.375
    assert calls[1][2] == {"step": 12_288}


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_tracker_resumes_same_run(service, monkeypatch, tmp_path):
    """Include runs that started without the service, or whose config.yaml has no identity."""
    inits = []
    monkeypatch.setitem(sys.modules, service, types.SimpleNamespace(init=lambda **given: inits.append(given)))
    space = lambda **given: types.SimpleNamespace(**given)

    def open_run(name, resume=""):
        line = f"ppo --loggers {service}"
        settings = load.from_command_line(line.split())
        settings = settings._replace(options=dataclasses.replace(settings.options, resume=resume))
        (tmp_path / name).mkdir(exist_ok=True)
        spec = space(id="gymnax/CartPole-v1")
        place = {"folder": tmp_path / name, "placement": SINGLE_DEVICE, "saved": None, "members": (), "decided": ()}
        place["start"] = None
        plan = space(settings=settings, env=space(spec=spec), **place)
        summary.write_config(plan)
        written = run_logger.RunLogger(plan, 0)
        written.lines.close()
        return {k: inits[-1].get(k) for k in ("name", "id", "project", "resume")}

    first, again = open_run("a"), open_run("a", resume="a")
    assert first == again == open_run("a", resume="a") and first["resume"] == "allow"
    assert len({(who["name"], who["id"]) for who in (first, open_run("b"), open_run("c"))}) == 3
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("meta: {num_shards: 1}")
    assert open_run("old", resume="old") == open_run("old", resume="old")


def test_lost_folder_gets_configuration_records_and_lock_at_next_save(tmp_path, capsys):
    space, folder = types.SimpleNamespace, tmp_path / "run"
    folder.mkdir()
    plan = space(
        settings=load.from_command_line(["ppo", "--loggers", "none"]),
        folder=folder,
        agent=space(learning=space(resources=())),
        lock=locks.Lock(folder),
        shown=lambda path: path.relative_to(tmp_path),
    )
    (folder / "config.yaml").write_text("a: 1\n")
    written = run_logger.RunLogger(plan)
    written.write([RECORD])
    size = written.sync()
    folder.rename(tmp_path / "moved")
    written.write([RECORD])
    assert written.sync() == 2 * size and len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert (folder / "config.yaml").read_text() == "a: 1\n"
    warning = "warning: run: the folder was deleted or moved; it is written again, without older checkpoints\n"
    assert capsys.readouterr().err == warning
    with pytest.raises(BlockingIOError):
        locks.Lock(folder)
    locks.Lock(tmp_path / "moved").release()
    (folder / "config.yaml").unlink()
    for _, close in written.closers():
        close()
    assert capsys.readouterr().err == "warning: run/config.yaml: was deleted or moved; written again\n"
    plan.lock.release()
