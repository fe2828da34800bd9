"""Images of envpool's MuJoCo tasks: loading of OpenGL, the trial in a child process, and one-line errors."""

import ctypes
import os
import subprocess
import sys

import envpool
import numpy as np
import pytest
from PIL import Image

from jaxrl_fast import envs, train
from jaxrl_fast.envs.envpool import opengl, probe, tasks
from jaxrl_fast.evaluation.video import Options, open_run

NAME = "InvertedPendulum-v4"


def result_of_load(monkeypatch, library, preloaded=False, imported=False):
    """Return the message of `load` and its CDLL calls; libEGL may be preloaded, envpool may be imported."""
    cdll, names = ctypes.CDLL, []

    def open_library(name, mode=0):
        names.append((name, mode))
        if name is None:
            return type("Process", (), {"eglGetProcAddress": None} if preloaded else {})
        return cdll(library)

    monkeypatch.setattr(opengl.ctypes, "CDLL", open_library)
    monkeypatch.setattr(opengl.sys, "modules", {"envpool": envpool} if imported else {})
    return opengl.load.__wrapped__(), names[1:]


def test_load_opens_libegl_with_global_symbols(monkeypatch):
    assert result_of_load(monkeypatch, None) == ("", [("libEGL.so.1", ctypes.RTLD_GLOBAL)])


def test_load_does_nothing_when_libegl_is_preloaded(monkeypatch):
    assert result_of_load(monkeypatch, None, preloaded=True, imported=True) == ("", [])


def test_load_reports_envpool_imported_too_early(monkeypatch):
    assert result_of_load(monkeypatch, None, imported=True) == (
        "envpool was imported before jaxrl_fast loaded libEGL.so.1; start Python with LD_PRELOAD=libEGL.so.1",
        [],
    )


def test_load_reports_what_to_install_when_libegl_is_missing(monkeypatch):
    words, _ = result_of_load(monkeypatch, "libmissing.so.1")
    assert words == f"libEGL.so.1 is missing; {opengl.INSTALL}" and "libegl1" in words


def test_opengl_families_are_all_mujoco_families_and_are_rendered():
    families = {tasks.family(name) for name in envpool.list_all_envs()}
    assert {name for name in families if "mujoco" in name} == set(tasks.OPENGL_FAMILIES)
    assert set(tasks.OPENGL_FAMILIES) < set(tasks.RENDERED_FAMILIES) <= families


def test_check_render_tries_task_with_its_options(monkeypatch):
    tried = []
    monkeypatch.setattr(opengl, "load", lambda: "")
    monkeypatch.setattr(probe, "image_failure", lambda *words: tried.append(words) or "")
    env = envs.make(f"envpool/{NAME}", 2, max_episode_steps=7)
    assert not tried, "training needs no image"
    env.host.check_render()
    assert tried == [(NAME, '{"max_episode_steps": 7, "num_threads": 1}')]
    envs.make("envpool/Pong-v5", 1).host.check_render()
    assert len(tried) == 1, "Atari renders without OpenGL"


@pytest.mark.parametrize(
    ("loaded", "failure", "words"),
    [
        ("libEGL.so.1 is missing; install it", None, "libEGL.so.1 is missing; install it"),
        ("", "RuntimeError: failed to initialize EGL", f"RuntimeError: failed to initialize EGL; {opengl.INSTALL}"),
    ],
)
def test_check_render_error_includes_remedy(loaded, failure, words, monkeypatch):
    monkeypatch.setattr(opengl, "load", lambda: loaded)
    monkeypatch.setattr(probe, "image_failure", lambda *_: failure)
    with pytest.raises(ValueError) as refusal:
        envs.make(f"envpool/{NAME}", 1).host.check_render()
    assert str(refusal.value) == f"envpool/{NAME} cannot be drawn: {words}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a run of 32 steps."""
    path = tmp_path_factory.mktemp("opengl") / "run"
    sizes = "--num-envs 2 --total-steps 32 --rollout-length 8 --num-minibatches 1 --hidden-sizes 8"
    assert train.main(["ppo", "--env", NAME, *sizes.split(), "--eval-episodes", "1", "--run-dir", str(path)]) == 0
    return path


@pytest.mark.slow
def test_open_run_checks_rendering_first(folder, monkeypatch):
    monkeypatch.setattr(opengl, "load", lambda: "no OpenGL")
    with pytest.raises(ValueError, match="cannot be drawn: no OpenGL"):
        open_run(folder, Options())
    monkeypatch.setattr(opengl, "load", lambda: "")
    monkeypatch.setattr(probe, "image_failure", lambda *_: "")
    assert open_run(folder, Options())[1].fps == 15


def video(folder, **environment):
    """Run the video command in a child process."""
    command = [sys.executable, "-m", "jaxrl_fast.video", str(folder), "--max-steps", "3", "--out", f"{folder}/a.gif"]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_video_command_without_driver_exits_with_one_line_error(folder, tmp_path):
    """libEGL is pointed to an empty driver folder."""
    ended = video(folder, __EGL_VENDOR_LIBRARY_DIRS=str(tmp_path))
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith(f"error: envpool/{NAME} cannot be drawn: ") and ended.stderr.count("\n") == 1
    assert opengl.INSTALL in ended.stderr and not (folder / "a.gif").exists()


@pytest.mark.slow
def test_video_command_renders_mujoco_when_opengl_is_available(folder):
    ended = video(folder)
    if ended.returncode == 2 and "cannot be drawn" in ended.stderr:
        pytest.skip("OpenGL is not available")
    assert (ended.returncode, ended.stderr) == (0, "")
    with Image.open(folder / "a.gif") as image:
        assert image.n_frames == 4 and image.size == (480, 506)
        first = np.asarray(image.convert("RGB"))[:480]
        image.seek(3)
        last = np.asarray(image.convert("RGB"))[:480]
    assert first.std() > 10 and (first != last).any()
