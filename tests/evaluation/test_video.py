"""Video files: sizes, durations, and the order of checks. The writer of MP4 files is a stub."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jaxrl_fast.evaluation import episodes, saved_run, video
from jaxrl_fast.evaluation.export import Options as ExportOptions
from jaxrl_fast.evaluation.export import card
from jaxrl_fast.evaluation.video import Frame

pytestmark = pytest.mark.unit


def test_options_have_documented_defaults():
    """The pages of the command line say so."""
    given = video.Options()
    assert (given.max_steps, given.play_seed, given.fps, given.which, given.seed) == (3000, 0, None, "best", None)
    given = episodes.Options()
    assert (given.play_seed, given.which, given.explore, given.against) == (0, "best", False, "")
    assert ExportOptions().which == "best" and not ExportOptions().sampled


def test_mp4_has_even_sides_and_repeats_frames_of_longer_duration(monkeypatch, tmp_path):
    """At 10 frames a second, 0.1 s is one frame and 0.3 s are three; 5 x 7 pixels become 4 x 6."""
    written = []

    def write_frames(path, size, fps, macro_block_size):
        written.append((size, fps))
        while True:
            written.append((yield))

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(write_frames=write_frames))
    images = [np.full((5, 7, 3), i, np.uint8) for i in range(3)]
    count = video.write_mp4(tmp_path / "a.mp4", [Frame(x, s) for x, s in zip(images, (0.1, 0.3, 0.01))], 10)
    assert count == 3 and written[0] == ((6, 4), 10)
    assert [(x.shape, int(x[0, 0, 0])) for x in written[1:]] == [((4, 6, 3), i) for i in (0, 1, 1, 1, 2)]


def test_gif_keeps_durations_in_hundredths(tmp_path):
    """A frame of 0.034 s takes 30 ms, and one of no time 10 ms."""
    images = [np.full((6, 8, 3), 80 * i, np.uint8) for i in range(3)]
    path = tmp_path / "a.gif"
    assert video.write_gif(path, [Frame(x, s) for x, s in zip(images, (0.034, 0.5, 0.0))], 30) == 3
    with Image.open(path) as found:
        shown = []
        for i in range(found.n_frames):
            found.seek(i)
            shown.append((found.info["duration"], found.convert("RGB").getpixel((0, 0))[0], found.size))
    assert shown == [(30, 0, (8, 6)), (500, 80, (8, 6)), (10, 160, (8, 6))]


@pytest.mark.parametrize("known", [False, True])
def test_simulator_is_tried_before_the_run_is_read(known, monkeypatch, tmp_path):
    """An environment that is drawn from its observations does not need its simulator's pictures."""

    def fails():
        raise ValueError("no display")

    host = SimpleNamespace(render=lambda: np.zeros((4, 4, 3), np.uint8), check_render=fails)
    spec = SimpleNamespace(id="CartPole-v1" if known else "my:Env", obs=SimpleNamespace(shape=(4,)), frame_stack=0)
    env = SimpleNamespace(host=host, view=SimpleNamespace(whole_spec=None), spec=spec)
    monkeypatch.setattr(saved_run, "open_env", lambda *given, **named: (None, env))
    monkeypatch.setattr(saved_run, "read_run", lambda *given: SimpleNamespace(seeds=[7]))
    monkeypatch.setattr(saved_run, "select_seed", lambda saved, seed: seed)
    monkeypatch.setattr("jaxrl_fast.evaluation.render.is_known", lambda name: known)
    monkeypatch.setattr("jaxrl_fast.evaluation.render.find", lambda *given: "a renderer")
    if known:
        assert video.open_run(tmp_path, video.Options())[:2] == (7, "a renderer")
        assert video.open_run(tmp_path, video.Options(seed=9))[0] == 9
    else:
        with pytest.raises(ValueError, match="no display"):
            video.open_run(tmp_path, video.Options())


def test_episode_after_one_that_was_cut_begins_with_another_seed(monkeypatch):
    """The first of three episodes ends after 2 steps, the second is cut after 3, and the third has another seed."""
    seeds, moment = [], lambda length, over: SimpleNamespace(obs=length, score=10.0 * length, length=length, over=over)

    def stream(env, agent, learner, seed):
        seeds.append(seed)
        endless = [moment(length, False) for length in range(9)]
        return iter([moment(0, False), moment(1, False), moment(2, True), *endless] if len(seeds) == 1 else endless)

    monkeypatch.setattr("jaxrl_fast.training.evaluator.stream_episodes", stream)
    renderer = SimpleNamespace(draw=lambda obs: np.full((8, 300, 3), obs, np.uint8))
    saved = SimpleNamespace(learners=(), env=SimpleNamespace(spec=SimpleNamespace(id="a/b")), agent=None)
    saved.settings = SimpleNamespace(algo_name="PPO")
    last, options = [], video.Options(episodes=3, max_steps=3, play_seed=40)
    shown = list(video.frames(saved, renderer, options, 10, last))
    assert [int(frame.image[0, 0, 0]) for frame in shown] == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]
    assert [i for i, frame in enumerate(shown) if frame.seconds > 0.1] == [2, 6, 10]
    assert [one.score for one in last] == [20, 30, 30] and seeds[:2] == [40, 42] and len(set(seeds)) == len(seeds)


LABELS = [{"seed": seed, "gamma": gamma} for gamma in (0.9, 0.99) for seed in (0, 1)]


@pytest.mark.parametrize(("member", "indices"), [({"gamma": 0.99}, [2, 3]), ({"gamma": "0.9"}, [0, 1])])
def test_members_are_selected_by_value(member, indices, tmp_path):
    assert saved_run._member_indices(tmp_path, LABELS, member) == indices


@pytest.mark.parametrize(
    ("labels", "member", "words"),
    [
        (LABELS, {"tau": 1}, "members of .* differ in gamma$"),
        ([{"seed": 0}], {"tau": 1}, "has a single member; leave member out$"),
        (LABELS, {"gamma": 1, "members.gamma": 2}, "members?"),
        (LABELS, {"gamma": "big"}, "'big' is not a number$"),
        (LABELS, {}, "gamma"),
        (LABELS, {"gamma": 0.5}, "gamma"),
    ],
)
def test_invalid_member_is_refused_with_names_that_differ(labels, member, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        saved_run._member_indices(tmp_path, labels, member)


@pytest.mark.parametrize(("seeds", "expected"), [([7, 3], [2.0, 5.0]), ([3], [[1.0, 4.0], [2.0, 5.0]])])
def test_selected_seed_has_its_own_learner(seeds, expected, tmp_path):
    """The learners of several seeds have an axis of seeds; that of one seed has none."""
    learners = {"w": np.float32([[1, 4], [2, 5]])}
    saved = saved_run.SavedRun(tmp_path, None, None, None, learners, seeds, tmp_path, 0, [], {})
    found = saved_run.select_seed(saved, 3)
    assert found.seeds == [3] and found.learners["w"].tolist() == expected
    with pytest.raises(ValueError, match=r"^seed: must be "):
        saved_run.select_seed(saved, 4)


def test_card_has_interval_of_mean_of_last_evaluation_in_training(monkeypatch, tmp_path):
    """Nine episodes with mean 10 and deviation 3: the standard error is 1, and 1.96 of these are half the interval."""
    row = dict(env_steps=40, eval_return_mean=10.0, eval_return_std=3.0, eval_episodes=9)
    summary = {"evaluations": [row | {"eval_return_mean": 1.0, "env_steps": 20}, row], "num_seeds": 1}
    monkeypatch.setattr(card.files, "summary_if_any", lambda folder: summary)
    saved = saved_run.SavedRun(tmp_path, None, None, None, (), [0], tmp_path / "last", 40, [], {})
    found = card.evaluation(saved, False)
    assert (found["return_mean"], found["return_std"], found["episodes"]) == (10.0, 3.0, 9)
    assert (found["return_low"], found["return_high"]) == pytest.approx((8.04, 11.96))
    assert card.evaluation(saved, True) is None and card.evaluation(saved._replace(env_steps=30), False) is None
