"""Paddles: physics against a scalar oracle, mirror symmetry, observations, and players as rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_fast import envs
from jaxrl_fast.envs.games.paddles import Moved, Paddles, Params, State, mirrored, move

SIZE, PARAMS = (16, 12), Params()
GAME = Paddles(*SIZE)
moved = jax.jit(lambda state, moves: move(SIZE, PARAMS, state, moves))
stepped = jax.jit(lambda state, action: GAME.step_env(jax.random.key(3), state, action, PARAMS)[1:4])

eighths = lambda low, high: st.integers(8 * low, 8 * high).map(lambda n: n / 8)  # exact in float32
states = st.builds(
    lambda x, y, side, steepness, left, right: State(
        *(jnp.float32(pair) for pair in ([x, y], [side, steepness], [left, right])),
        jnp.int32([1, 2]), jnp.float32([x, y]), jnp.int32(7),
    ),
    eighths(-8, 8), eighths(-6, 6), st.sampled_from([-1.0, 1.0]), eighths(-1, 1), eighths(-4, 4), eighths(-4, 4),
)  # fmt: skip


def oracle(state, moves):
    """Return the ball, its velocity, the paddles, and which player has hit and missed the ball: 0, 1 or None."""
    paddles = [max(-4.0, min(4.0, float(y) + dy)) for y, dy in zip(state.paddles, moves)]  # 6 - 2
    (x, y), (vx, vy) = map(float, state.ball), map(float, state.velocity)
    x, y = x + vx, y + vy
    if y > 6 or y < -6:
        y, vy = (12 if y > 0 else -12) - y, -vy
    hit = missed = None
    for player, reached in ((0, x <= -8), (1, x >= 8)):
        if reached and abs(y - paddles[player]) <= 2:
            hit, x, vx, vy = player, (16 if player else -16) - x, -vx, (y - paddles[player]) / 2
        elif reached:
            missed = player
    return (x, y), (vx, vy), paddles, hit, missed


@given(states, st.tuples(*[st.sampled_from([-1.0, 0.0, 1.0])] * 2))
def test_move_matches_scalar_physics(state, moves):
    ball, velocity, paddles, hit, missed = oracle(state, moves)
    found = moved(state, jnp.float32(moves))
    np.testing.assert_array_equal(found.state.ball, np.float32(ball))
    np.testing.assert_array_equal(found.state.velocity, np.float32(velocity))
    np.testing.assert_array_equal(found.state.paddles, np.float32(paddles))
    np.testing.assert_array_equal(found.hit, [hit == 0, hit == 1])
    np.testing.assert_array_equal(found.missed, [missed == 0, missed == 1])  # never both


@given(states, st.tuples(*[eighths(-1, 1)] * 2))
def test_move_of_mirrored_state_is_mirrored(state, moves):
    moves = jnp.float32(moves)
    found, other = moved(state, moves), moved(mirrored(state), moves[::-1])
    expected = Moved(mirrored(found.state), found.hit[::-1], found.missed[::-1])
    jax.tree.map(np.testing.assert_array_equal, other, expected)


def observer(**options):
    """Functions of a state to what is observed, of each kind."""
    kinds = ("vector", "board", "image")
    return [jax.jit(partial(Paddles(*SIZE, observation=kind, **options)._observe, PARAMS)) for kind in kinds]


BOTH, UNMIRRORED, RIGHT = observer(), observer(mirror=False), observer(opponent="scripted", side="right")


def seen_from_the_right(state):
    """The vector of the right player, written out: its own paddle and points come first."""
    (x, y), (vx, vy) = map(np.asarray, (state.ball, state.velocity))
    (left, right), (points, own_points) = map(np.asarray, (state.paddles, state.points))
    return np.float32([-x / 8, y / 6, -vx, vy, right / 6, left / 6, own_points / 5, points / 5, 4 / 12])


@pytest.mark.slow
@given(states)
def test_each_player_observes_field_from_its_side(state):
    for both, same, right in zip(BOTH, UNMIRRORED, RIGHT, strict=True):
        left_view, right_view = both(state)
        np.testing.assert_array_equal(right_view, both(mirrored(state))[0])
        np.testing.assert_array_equal(right_view, right(state))
        np.testing.assert_array_equal(same(state), [left_view, left_view])
    np.testing.assert_allclose(BOTH[0](state)[1], seen_from_the_right(state), rtol=1e-6)


@given(states, st.tuples(*[st.integers(0, 2)] * 2))
def test_missed_ball_scores_for_other_player_and_serves_new_ball(state, actions):
    *_, missed = oracle(state, [(0.0, 1.0, -1.0)[a] for a in actions])
    after, reward, over = stepped(state, jnp.int32(actions))
    points = [1 + (missed == 1), 2 + (missed == 0)]
    np.testing.assert_array_equal(after.points, points)
    np.testing.assert_array_equal(reward, {None: [0, 0], 0: [-1, 1], 1: [1, -1]}[missed])
    assert not over and after.num_steps == 8
    if missed is not None:  # a new ball is served
        assert after.ball[0] == 0 and abs(after.ball[1]) <= 3 and abs(after.velocity[0]) == 1
        assert abs(after.velocity[1]) <= 0.5


def near(x, y, velocity, points=(0, 0)):
    pair = lambda *numbers: jnp.float32(numbers)
    return State(pair(x, y), pair(*velocity), pair(0, 0), jnp.int32(points), pair(x, y), jnp.int32(0))


@pytest.mark.slow
def test_fifth_point_terminates_episode():
    step = lambda state: GAME.step_env(jax.random.key(0), state, jnp.zeros(2, jnp.int32), PARAMS)[3]
    assert step(near(7.5, 5, (1, 0), (4, 0))) and not step(near(7.5, 5, (1, 0), (3, 4)))


TOGETHER = Paddles(*SIZE, cooperative=True)
together = jax.jit(lambda state, action: TOGETHER.step_env(jax.random.key(3), state, action, PARAMS)[1:4])


@given(states, st.tuples(*[st.integers(0, 2)] * 2), st.integers(0, 3), st.integers(0, 2))
def test_cooperative_players_share_rewards_for_hits_and_misses(state, actions, left, right):
    """A hit pays 1 to both and a miss -1. The episode ends with the fifth miss, whoever missed."""
    state = state._replace(points=jnp.int32([left, right]))
    *_, hit, missed = oracle(state, [(0.0, 1.0, -1.0)[a] for a in actions])
    after, reward, over = together(state, jnp.int32(actions))
    np.testing.assert_array_equal(reward, [(hit is not None) - (missed is not None)] * 2)
    np.testing.assert_array_equal(after.points, [left + (missed == 1), right + (missed == 0)])
    assert over == (left + right + (missed is not None) >= 5)
    assert (after.ball[0] == 0) if missed is not None else (after.points.sum() == left + right)


@pytest.mark.parametrize("side", ["left", "right"])
def test_scripted_opponent_follows_ball_at_its_own_speed(side):
    game = Paddles(*SIZE, opponent="scripted", side=side)
    obs, after, reward, *_ = game.step_env(jax.random.key(0), near(0, 5, (1, 0)), jnp.int32(2), PARAMS)
    assert obs.shape == (9,) and reward.shape == ()
    assert after.paddles.tolist() == ([-1, 0.5] if side == "left" else [0.5, -1])
    *_, reward, _, _ = game.step_env(jax.random.key(0), near(7.5, 5, (1, 0)), jnp.int32(0), PARAMS)
    assert reward == (1 if side == "left" else -1)


@pytest.mark.slow
def test_board_and_image_observations_show_expected_state():
    state = near(-3.9, 2.1, (1, 0))._replace(paddles=jnp.float32([2, -3]), before=jnp.float32([-4.9, 2.1]))
    board, image = (Paddles(*SIZE, observation=kind)._observe(PARAMS, state)[0] for kind in ("board", "image"))
    cells = [np.argwhere(board[..., i]).tolist() for i in range(4)]
    assert cells == [[[2, 0], [3, 0], [4, 0], [5, 0]], [[7, 15], [8, 15], [9, 15], [10, 15]], [[3, 4]], [[3, 3]]]
    assert image.shape == (84, 84, 1) and image.dtype == jnp.uint8
    rows, columns = np.nonzero(np.asarray(image[..., 0]) == 255)
    assert len(rows) == 9 and rows.mean() + 0.5 == pytest.approx((6 - 2.1) * 7, abs=0.5)
    assert columns.mean() + 0.5 == pytest.approx((8 - 3.9) * 84 / 16, abs=0.5)
    rows, columns = np.nonzero(np.asarray(image[..., 0]) == 200)
    assert {*columns.tolist()} == {0, 1, 82, 83} and len(rows) == 4 * 28


@pytest.mark.slow
def test_players_are_rows_with_equal_ends_and_opposite_rewards():
    env = envs.make("games/Paddles", 3, max_steps_in_episode=40, points=2, paddle=2.0)
    assert env.spec.num_envs == 6 and env.spec.num_games == 3 and env.spec.players == ("left", "right")
    state, first = env.reset(jax.random.key(0))
    assert first.obs.shape == (6, 9) and not first.last.any()

    def step(carry, key):
        state, before = carry
        action = jax.random.randint(key, (6,), 0, 3)
        games, (state, timestep) = state.env, env.step(state, action)
        return (state, timestep), (games, before.last, action, timestep)

    _, (games, begins, action, rows) = jax.lax.scan(step, (state, first), jax.random.split(jax.random.key(1), 200))
    np.testing.assert_array_equal(rows.last[:, :3], rows.last[:, 3:])
    np.testing.assert_array_equal(rows.reward[:, :3], -rows.reward[:, 3:])
    np.testing.assert_array_equal(
        rows.obs[:, :3, [0, 4, 5]], np.float32([-1, 1, 1]) * np.asarray(rows.obs)[:, 3:, [0, 5, 4]]
    )
    terminal, truncated = rows.last & (rows.discount == 0), rows.last & (rows.discount == 1)
    assert terminal.any() and truncated.any() and not rows.reward[begins].any()
    paddles = jax.vmap(jax.vmap(lambda y, a: jnp.clip(y + jnp.float32([0, 1, -1])[a], -7, 7)))
    moved = paddles(games.paddles, jnp.stack([action[:, :3], action[:, 3:]], -1))
    np.testing.assert_allclose(rows.obs[:, :3, 4:6][~begins[:, :3]] * 8, moved[~begins[:, :3]], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"observation": "pixels"}, "observation: must be vector or board or image, got 'pixels'"),
        ({"side": "right"}, "side: has no effect without a scripted opponent, got 'right'; add opponent=scripted"),
        ({"opponent": "me"}, "opponent: must be none or scripted, got 'me'"),
        ({"side": "top"}, "side: must be left or right, got 'top'"),
        ({"width": 3}, "width: must be 4 to 84, got 3"),
        ({"points": 0}, "points: must be at least 1, got 0"),
        ({"ball_speed": 0.0}, "ball_speed: must be more than 0 and at most 4, got 0.0"),
        ({"ball_speed": "0.5..5..1@2M"}, "ball_speed: must be more than 0 and at most 4, got 0.5..5..1@2M"),
        ({"points": "0@callback"}, "points: must be at least 1, got 0@callback"),
        ({"paddle": 17}, "paddle: must be more than 0 and at most the height 16, got 17"),
    ],
)
def test_make_rejects_invalid_option_with_one_line_message(options, problem):
    with pytest.raises(ValueError) as error:
        envs.make("Paddles", 2, **options)
    assert problem in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        (dict(opponent_speed="1"), ["opponent_speed"]),
        (dict(opponent_speed=0.5), []),
        (dict(opponent_speed=1, opponent="scripted"), []),
        (dict(mirror="false", opponent="scripted"), ["mirror"]),
        (dict(mirror=False, opponent="scripted", side="right"), []),
        (dict(mirror=False), []),
    ],
)
def test_option_without_effect_is_a_warning(options, idle):
    warnings = envs.make("Paddles", 2, **options).view.warnings
    assert [line.partition(": has no effect; ")[0] for line in warnings] == idle
