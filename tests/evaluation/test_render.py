"""Renderers: where things lie, by hand, and what has a color of its own."""

import math

import jax
import numpy as np
import pytest
from PIL import ImageColor

from jaxrl_fast import envs
from jaxrl_fast.evaluation import render
from jaxrl_fast.evaluation.render import canvas, classic_control, frames, minatar

GAMES = [f"{game}-MinAtar" for game in minatar.GAMES]


def color(picture, pixel):
    """Of the picture at (column, row), which are rounded down."""
    return tuple(int(x) for x in picture[int(pixel[1]), int(pixel[0])])


def is_color(picture, pixel, name):
    return color(picture, pixel) == ImageColor.getrgb(name)


def test_the_pole_ends_where_its_length_and_angle_say():
    """100 pixels a metre from (-3, 1.45): a cart at 0.5 with a pole at 0.3 rad ends at (0.5 + sin 0.3, cos 0.3)."""
    picture = classic_control.cart_pole([0.5, 0.0, 0.3, 0.0])
    assert picture.shape == (200, 600, 3) and picture.dtype == np.uint8
    column, row = 100 * (3.5 + 0.29552), 100 * (1.45 - 0.95534)
    assert is_color(picture, (column, row), canvas.ORANGE)
    along = 9 * 0.29552, -9 * 0.95534  # nine pixels on, beyond the round end of 4.5
    assert is_color(picture, (column + along[0], row + along[1]), canvas.PAPER)


@pytest.mark.parametrize(("angle", "side"), [(0.2, 1), (-0.2, -1)])
def test_a_positive_angle_leans_to_the_right(angle, side):
    picture = classic_control.cart_pole([0.0, 0.0, angle, 0.0])
    columns = np.argwhere((picture == ImageColor.getrgb(canvas.ORANGE)).all(-1))[:, 1]
    assert np.sign(columns.mean() - 300) == side


def test_a_quarter_and_half_turn_of_the_acrobot():
    """The first link points to the right, (1, 0); the second, a quarter turn further, up from there to (1, 1)."""
    obs = [0.0, 1.0, 0.0, 1.0]  # cos and sin of both angles, each pi / 2
    joint, tip = classic_control.acrobot_links(*obs)
    np.testing.assert_allclose((joint, tip), [(1, 0), (1, 1)], atol=1e-12)
    picture = classic_control.acrobot([*obs, 0.0, 0.0])  # 90 pixels a metre from (-2.3, 2.3)
    assert is_color(picture, (90 * 2.8, 90 * 2.3), canvas.BLUE)
    assert is_color(picture, (90 * 3.3, 90 * 1.8), canvas.ORANGE)
    assert is_color(picture, (90 * 1.8, 90 * 2.3), canvas.PAPER)


def test_the_acrobots_tip_is_as_high_as_the_rules_say():
    """gymnax ends the episode where -cos a - cos(a + b) > 1, which is where the line is drawn."""
    for a, b in np.random.default_rng(0).uniform(-4, 4, (20, 2)):
        _, tip = classic_control.acrobot_links(math.cos(a), math.sin(a), math.cos(b), math.sin(b))
        assert tip[1] == pytest.approx(-math.cos(a) - math.cos(a + b))


def test_the_car_stands_on_the_hill():
    """The valley is at -pi / 6, 0.1 high; the slope at 0 is 1.35, so the car's nose points up there."""
    assert classic_control.hill(-math.pi / 6) == pytest.approx(0.1)
    picture = classic_control.mountain_car([-math.pi / 6, 0.0], goal=0.5)  # 300 pixels a unit from (-1.2, 1.3)
    column, row = 300 * (1.2 - math.pi / 6), 300 * (1.3 - 0.1)
    assert is_color(picture, (column, row - 15), canvas.BLUE)
    assert not is_color(picture, (column, row + 9), canvas.BLUE)
    along = np.subtract(classic_control.on_hill(0.0, 1.0, 0.0), classic_control.on_hill(0.0, 0.0, 0.0))
    assert along[1] / along[0] == pytest.approx(1.35) and np.hypot(*along) == pytest.approx(1)


@pytest.mark.parametrize(("name", "goal"), [("MountainCar-v0", 0.5), ("MountainCarContinuous-v0", 0.45)])
def test_the_flag_is_at_the_goal(name, goal):
    picture = render.RENDERERS[name].draw([-0.5, 0.0])
    top = 300 * (1.3 - (0.45 * math.sin(3 * goal) + 0.55) - 0.165)  # between the pole's ends, beside the flag
    assert is_color(picture, (300 * (1.2 + goal) - 8, top), canvas.GREEN)


@pytest.mark.parametrize(("angle", "tip"), [(0, (0, 1)), (math.pi / 2, (-1, 0)), (math.pi, (0, -1))])
def test_the_pendulum_stands_up_at_0_and_turns_to_the_left(angle, tip):
    picture = classic_control.pendulum([math.cos(angle), math.sin(angle), 0.0])  # 130 pixels a metre, from -1.5, 1.5
    assert is_color(picture, (130 * (1.5 + tip[0]), 130 * (1.5 - tip[1])), canvas.ORANGE)
    assert not is_color(picture, (130 * (1.5 - 0.5 * tip[0]), 130 * (1.5 + 0.5 * tip[1])), canvas.ORANGE)


@pytest.mark.parametrize("name", GAMES)
def test_a_cell_has_the_color_of_what_lies_on_top(name):
    pieces = minatar.GAMES[name.removesuffix("-MinAtar")]
    num_channels = envs.make(name, 1).spec.obs.shape[-1]
    bits = np.random.default_rng(0).random((10, 10, num_channels)) < 0.15
    picture = render.RENDERERS[name].draw(bits)
    assert picture.shape == (378, 378, 3)  # 10 cells of 36 pixels, and a quarter of a cell around
    for row in range(10):
        for column in range(10):
            there = [piece.color for channel, piece in pieces if bits[row, column, channel]]
            wanted = there[-1] if there else minatar.HOLLOW
            assert is_color(picture, (9 + 36 * column + 18, 9 + 36 * row + 18), wanted), (row, column)


@pytest.mark.parametrize("name", GAMES)
def test_every_channel_is_shown(name):
    """But for those of SpaceInvaders that say again where aliens are, and which way they go."""
    shown = {channel for channel, _ in minatar.GAMES[name.removesuffix("-MinAtar")]}
    missing = set(range(envs.make(name, 1).spec.obs.shape[-1])) - shown
    assert missing == ({2, 3} if name.startswith("SpaceInvaders") else set())


@pytest.mark.parametrize("name", [name for name in render.RENDERERS if name in ("Acrobot-v1", "Pendulum-v1", *GAMES)])
def test_what_the_environment_observes_can_be_drawn(name):
    env = envs.make(name, 1)
    obs = np.asarray(env.reset(jax.random.key(0))[1].obs[0])
    renderer = render.find(env.spec.id, env.spec.obs)
    assert renderer == render.find(f"envpool/{name}", env.spec.obs)
    assert renderer.draw(obs).dtype == np.uint8


@pytest.mark.parametrize(
    ("num_channels", "frame_stack", "newest"), [(4, 4, [3] * 3), (3, 0, [0, 1, 2]), (6, 2, [3, 4, 5])]
)
def test_of_frames_the_newest_is_shown_in_its_colors(num_channels, frame_stack, newest):
    image = np.random.default_rng(0).integers(0, 256, (84, 84, num_channels)).astype(np.uint8)
    draw = render.find("envpool/Pong-v5", jax.ShapeDtypeStruct(image.shape, np.uint8), frame_stack).draw
    picture = draw(image)
    assert picture.shape == (336, 336, 3)
    np.testing.assert_array_equal(picture[2::4, 1::4], image[..., newest])


def test_what_cannot_be_drawn_is_refused_in_one_line_that_lists_what_can():
    with pytest.raises(ValueError, match=r"gymnax/FourRooms-misc cannot be drawn.*CartPole-v1.*MinAtar") as caught:
        render.find("gymnax/FourRooms-misc", jax.ShapeDtypeStruct((4,), np.float32))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be drawn"):  # of somebody else's CartPole nothing is known
        render.find("my_module:CartPole-v1", jax.ShapeDtypeStruct((4,), np.float32))
    assert not frames.are(jax.ShapeDtypeStruct((84, 84, 4), np.float32))


def test_edges_are_smooth():
    """Beside the colors that were drawn there are mixtures of them."""
    picture = classic_control.pendulum([math.cos(0.3), math.sin(0.3), 0.0])
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20


def test_a_caption_lies_below_the_picture():
    picture = minatar.board(minatar.GAMES["Breakout"], np.zeros((10, 10, 4)))
    whole = canvas.captioned(picture, "step 12", "Breakout")
    assert whole.shape == (378 + canvas.CAPTION, 378, 3)
    np.testing.assert_array_equal(whole[:378], picture)
    words = lambda part: (part != ImageColor.getrgb(canvas.PAPER)).any()
    assert words(whole[380:, :60]) and words(whole[380:, -60:]) and not words(whole[380:, 100:250])
