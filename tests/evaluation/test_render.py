"""Test the renderers: positions calculated by hand, and colors."""

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
    """Return the color of an image at (column, row), rounded down."""
    return tuple(int(x) for x in picture[int(pixel[1]), int(pixel[0])])


def is_color(picture, pixel, name):
    return color(picture, pixel) == ImageColor.getrgb(name)


def test_cart_pole_draws_pole_at_length_and_angle():
    """100 pixels per meter from (-3, 1.45): a cart at 0.5 and a pole at 0.3 rad end at (0.5 + sin 0.3, cos 0.3)."""
    picture = classic_control.cart_pole([0.5, 0.0, 0.3, 0.0])
    assert picture.shape == (200, 600, 3) and picture.dtype == np.uint8
    column, row = 100 * (3.5 + 0.29552), 100 * (1.45 - 0.95534)
    assert is_color(picture, (column, row), canvas.ORANGE)
    along = 9 * 0.29552, -9 * 0.95534  # nine pixels on, beyond the round end of 4.5
    assert is_color(picture, (column + along[0], row + along[1]), canvas.BACKGROUND)


@pytest.mark.parametrize(("angle", "side"), [(0.2, 1), (-0.2, -1)])
def test_cart_pole_positive_angle_leans_right(angle, side):
    picture = classic_control.cart_pole([0.0, 0.0, angle, 0.0])
    columns = np.argwhere((picture == ImageColor.getrgb(canvas.ORANGE)).all(-1))[:, 1]
    assert np.sign(columns.mean() - 300) == side


def test_acrobot_draws_links_at_angles():
    """The first link ends at (1, 0), to the right. The second is a quarter turn further and ends at (1, 1)."""
    obs = [0.0, 1.0, 0.0, 1.0]  # cos and sin of both angles, each pi / 2
    joint, tip = classic_control.acrobot_links(*obs)
    np.testing.assert_allclose((joint, tip), [(1, 0), (1, 1)], atol=1e-12)
    picture = classic_control.acrobot([*obs, 0.0, 0.0])  # 90 pixels per meter from (-2.3, 2.3)
    assert is_color(picture, (90 * 2.8, 90 * 2.3), canvas.BLUE)
    assert is_color(picture, (90 * 3.3, 90 * 1.8), canvas.ORANGE)
    assert is_color(picture, (90 * 1.8, 90 * 2.3), canvas.BACKGROUND)


def test_acrobot_tip_height_matches_termination_rule():
    """gymnax ends the episode if -cos a - cos(a + b) > 1, the height of the line."""
    for a, b in np.random.default_rng(0).uniform(-4, 4, (20, 2)):
        _, tip = classic_control.acrobot_links(math.cos(a), math.sin(a), math.cos(b), math.sin(b))
        assert tip[1] == pytest.approx(-math.cos(a) - math.cos(a + b))


def test_mountain_car_draws_car_on_hill():
    """The valley is at -pi / 6, 0.1 high; the slope at 0 is 1.35."""
    assert classic_control.hill(-math.pi / 6) == pytest.approx(0.1)
    picture = classic_control.mountain_car([-math.pi / 6, 0.0], goal=0.5)  # 300 pixels a unit from (-1.2, 1.3)
    column, row = 300 * (1.2 - math.pi / 6), 300 * (1.3 - 0.1)
    assert is_color(picture, (column, row - 15), canvas.BLUE)
    assert not is_color(picture, (column, row + 9), canvas.BLUE)
    along = np.subtract(classic_control.on_hill(0.0, 1.0, 0.0), classic_control.on_hill(0.0, 0.0, 0.0))
    assert along[1] / along[0] == pytest.approx(1.35) and np.hypot(*along) == pytest.approx(1)


@pytest.mark.parametrize(("name", "goal"), [("MountainCar-v0", 0.5), ("MountainCarContinuous-v0", 0.45)])
def test_mountain_car_draws_flag_at_goal(name, goal):
    picture = render.RENDERERS[name].draw([-0.5, 0.0])
    top = 300 * (1.3 - (0.45 * math.sin(3 * goal) + 0.55) - 0.165)  # between the ends of the pole, next to the flag
    assert is_color(picture, (300 * (1.2 + goal) - 8, top), canvas.GREEN)


@pytest.mark.parametrize(("angle", "tip"), [(0, (0, 1)), (math.pi / 2, (-1, 0)), (math.pi, (0, -1))])
def test_pendulum_draws_angle(angle, tip):
    picture = classic_control.pendulum([math.cos(angle), math.sin(angle), 0.0])  # 130 pixels per meter from (-1.5, 1.5)
    assert is_color(picture, (130 * (1.5 + tip[0]), 130 * (1.5 - tip[1])), canvas.ORANGE)
    assert not is_color(picture, (130 * (1.5 - 0.5 * tip[0]), 130 * (1.5 + 0.5 * tip[1])), canvas.ORANGE)


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
def test_board_draws_topmost_piece(name):
    pieces = minatar.GAMES[name.removesuffix("-MinAtar")]
    num_channels = envs.make(name, 1).spec.obs.shape[-1]
    bits = np.random.default_rng(0).random((10, 10, num_channels)) < 0.15
    picture = render.RENDERERS[name].draw(bits)
    assert picture.shape == (378, 378, 3)  # 10 cells of 36 pixels, and a quarter of a cell around
    for row in range(10):
        for column in range(10):
            there = [piece.color for channel, piece in pieces if bits[row, column, channel]]
            wanted = there[-1] if there else minatar.EMPTY
            assert is_color(picture, (9 + 36 * column + 18, 9 + 36 * row + 18), wanted), (row, column)


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
def test_board_draws_every_channel(name):
    """Skip the channels of SpaceInvaders that hold the direction of the aliens."""
    shown = {channel for channel, _ in minatar.GAMES[name.removesuffix("-MinAtar")]}
    missing = set(range(envs.make(name, 1).spec.obs.shape[-1])) - shown
    assert missing == ({2, 3} if name.startswith("SpaceInvaders") else set())


@pytest.mark.parametrize("name", [name for name in render.RENDERERS if name in ("Acrobot-v1", "Pendulum-v1", *GAMES)])
@pytest.mark.slow
def test_find_renders_env_observations(name):
    env = envs.make(name, 1)
    obs = np.asarray(env.reset(jax.random.key(0))[1].obs[0])
    renderer = render.find(env.spec.id, env.spec.obs)
    assert renderer == render.find(f"envpool/{name}", env.spec.obs)
    assert renderer.draw(obs).dtype == np.uint8


@pytest.mark.parametrize(
    ("num_channels", "frame_stack", "newest"), [(4, 4, [3] * 3), (3, 0, [0, 1, 2]), (6, 2, [3, 4, 5])]
)
def test_newest_frame_keeps_colors(num_channels, frame_stack, newest):
    image = np.random.default_rng(0).integers(0, 256, (84, 84, num_channels)).astype(np.uint8)
    draw = render.find("envpool/Pong-v5", jax.ShapeDtypeStruct(image.shape, np.uint8), frame_stack).draw
    picture = draw(image)
    assert picture.shape == (336, 336, 3)
    np.testing.assert_array_equal(picture[2::4, 1::4], image[..., newest])


def test_find_raises_with_list_of_renderers():
    with pytest.raises(ValueError, match=r"gymnax/FourRooms-misc has no renderer.*CartPole-v1.*MinAtar") as caught:
        render.find("gymnax/FourRooms-misc", jax.ShapeDtypeStruct((4,), np.float32))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="has no renderer"):  # a custom CartPole may observe anything
        render.find("my_module:CartPole-v1", jax.ShapeDtypeStruct((4,), np.float32))
    assert not frames.is_image(jax.ShapeDtypeStruct((84, 84, 4), np.float32))


def marks(picture, name):
    """Return the smallest and the largest column and row of a color."""
    rows, columns = np.nonzero((picture == ImageColor.getrgb(name)).all(-1))
    return columns.min(), columns.max(), rows.min(), rows.max()


def test_fixed_parts_of_classic_control_are_in_place():
    """In pixels from the upper left corner: a joint in the middle, the line at height 1, the ends of the track."""
    pendulum = classic_control.pendulum([1.0, 0.0, 0.0])
    assert pendulum.shape == (390, 390, 3)
    np.testing.assert_allclose(marks(pendulum, canvas.INK), [189, 201, 189, 201], atol=2)  # radius 0.05 of 130 pixels
    np.testing.assert_allclose(marks(pendulum, canvas.GREEN), [191, 199, 29, 36], atol=2)  # at height 1.25
    acrobot = classic_control.acrobot([1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert acrobot.shape == (414, 414, 3)
    np.testing.assert_allclose(marks(acrobot, canvas.GREEN), [0, 413, 116, 118], atol=1)  # 90 * 1.3 = 117
    np.testing.assert_allclose(marks(acrobot, canvas.BLUE), [200, 214, 200, 290], atol=3)  # from the middle down
    np.testing.assert_allclose(marks(acrobot, canvas.ORANGE), [200, 214, 290, 394], atol=3)
    assert is_color(acrobot, (207, 207), "#ffffff") and is_color(acrobot, (207, 297), "#ffffff")
    cart_pole = classic_control.cart_pole([0.5, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(marks(cart_pole, canvas.INK), [320, 379, 135, 154], atol=2)  # 0.6 x 0.2 around 0.5
    np.testing.assert_allclose(marks(cart_pole, canvas.ORANGE), [345, 354, 40, 141], atol=3)
    for end in (-2.4, 2.4):
        assert is_color(cart_pole, (100 * (end + 3), 152), canvas.SHADE)
    assert is_color(cart_pole, (350 - 17, 155), canvas.SHADE) and is_color(cart_pole, (350 + 17, 155), canvas.SHADE)


def test_mountain_car_has_its_shape_at_the_bottom():
    """300 pixels a unit: from 0.03 to 0.1 above the valley, and 0.085 to both sides. Wheels are 0.045 to both sides."""
    picture = classic_control.mountain_car([-math.pi / 6, 0.0], goal=0.5)
    column, row = 300 * (1.2 - math.pi / 6), 300 * (1.3 - 0.1)
    expected = [column - 25.5, column + 25.5, row - 30, row - 9]
    np.testing.assert_allclose(marks(picture, canvas.BLUE), expected, atol=2.5)
    for side in (-0.045, 0.045):
        assert is_color(picture, (column + 300 * side, row - 5), canvas.INK)


def test_paddles_field_has_ball_paddles_and_points_in_place():
    """420 pixels for 2.2: the ball at (0.5, -0.2), paddles at heights 0.4 and -0.6, half of one player's points."""
    obs = [0.5, -0.2, 0.0, 0.0, 0.4, -0.6, 0.5, 0.0, 0.2]
    picture = render.find("games/Paddles", jax.ShapeDtypeStruct((9,), np.float32)).draw(np.float32(obs))
    scale = 420 / 2.2
    at = lambda x, y: (scale * (x + 1.1), scale * (1.1 - y))
    ball = at(0.5, -0.2)
    np.testing.assert_allclose(marks(picture, canvas.INK)[::2], [ball[0] - 8, ball[1] - 8], atol=2)
    assert is_color(picture, at(-1.02, 0.4), canvas.BLUE) and is_color(picture, at(-1.02, 0.55), canvas.BLUE)
    assert is_color(picture, at(1.02, -0.6), canvas.ORANGE) and is_color(picture, at(1.02, -0.75), canvas.ORANGE)
    assert is_color(picture, at(-1.02, 0.65), canvas.BACKGROUND)
    assert is_color(picture, at(-0.6, -1.07), canvas.BLUE) and is_color(picture, at(-0.3, -1.07), canvas.BACKGROUND)


def test_canvas_edges_are_antialiased():
    """Count the colors: mixtures of the drawn ones must occur."""
    picture = classic_control.pendulum([math.cos(0.3), math.sin(0.3), 0.0])
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20


def test_add_caption_extends_image_below():
    picture = minatar.board(minatar.GAMES["Breakout"], np.zeros((10, 10, 4)))
    whole = canvas.add_caption(picture, "step 12", "Breakout")
    assert whole.shape == (378 + canvas.CAPTION_HEIGHT, 378, 3)
    np.testing.assert_array_equal(whole[:378], picture)
    words = lambda part: (part != ImageColor.getrgb(canvas.BACKGROUND)).any()
    assert words(whole[380:, :60]) and words(whole[380:, -60:]) and not words(whole[380:, 100:250])
