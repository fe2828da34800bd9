"""Paddles: two players hit a ball past each other, after the arcade game Pong (Atari 1972).

The field is `width` x `height` with the origin in its middle; x points right and y up. A paddle is a vertical line at
one end, of length `paddle`. Each step moves the paddles, then the ball. Where a paddle meets the ball decides how
steeply it returns, so that a player can aim. A missed ball is a point for the other player, and the next ball starts
in the middle, towards either side. A game ends when a player has `points`, or is truncated at its time limit.

A point gives a reward of 1 to one player and -1 to the other. With `cooperative`, both receive 1 for each hit and
-1 for each miss, and the game ends after `points` misses.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs.games import views
from jaxrl_fast.types import Array, Discrete, Key
from jaxrl_fast.utils.arguments import coerce
from jaxrl_fast.utils.parsing import as_schedule, parse_float

PLAYERS = ("left", "right")
STAY, UP, DOWN = range(3)  # actions
OBSERVATIONS = {"vector": views.vector, "board": views.board, "image": views.image}
MAX_SPEED = 4  # the least height: a ball meets one wall in a step
SERVED_WITHIN = 0.5  # share of the height around the middle, and of the speed, that bound the start of a ball


class Params(NamedTuple):
    """Parameters; lengths are in units of the field, speeds in units per step."""

    ball_speed: float = 1.0  # along x; along y at most as much
    paddle: float = 4.0
    paddle_speed: float = 1.0
    opponent_speed: float = 0.5  # of the scripted opponent's paddle
    points: int = 5
    max_steps_in_episode: int = 1000


class State(NamedTuple):
    """The state of one game."""

    ball: Array  # f32 [2]: x, y
    velocity: Array  # f32 [2]
    paddles: Array  # f32 [2]: the y of the middles, left and right
    points: Array  # int32 [2]
    before: Array  # f32 [2]: the ball a step ago
    num_steps: Array  # int32 []


class Moved(NamedTuple):
    """The result of a move."""

    state: State  # if the ball was missed, it lies beyond the paddle
    hit: Array  # bool [2]: which paddle has hit the ball
    missed: Array  # bool [2]


class Paddles:
    """One game, with gymnax's interface.

    Args:
        width: The distance of the paddles, and the number of columns of a board.
        height: The height of the field, and the number of rows of a board.
        observation: "vector" (float32 [9]), "board" (bool [height, width, 4], as in MinAtar) or "image" (gray frames,
            uint8 [84, 84, 1]).
        cooperative: Whether both players are paid for long rallies.
        opponent: "none", or "scripted": a paddle that follows the ball at `opponent_speed` plays against a single
            player.
        side: The side of the single player against a scripted opponent.
        mirror: Whether the right player sees the field mirrored, its own paddle on the left, so that one policy plays
            both sides alike.
    """

    def __init__(
        self,
        width: int = 16,
        height: int = 16,
        observation: str = "vector",
        cooperative: bool = False,
        opponent: str = "none",
        side: str = "left",
        mirror: bool = True,
    ):
        _check_word("observation", observation, OBSERVATIONS)
        _check_word("opponent", opponent, ("none", "scripted"))
        _check_word("side", side, PLAYERS)
        if side != PLAYERS[0] and opponent == "none":
            raise ValueError(f"side: has no effect without a scripted opponent, got {side!r}; add opponent=scripted")
        for name, value in (("width", width), ("height", height)):
            if not 4 <= value <= 84:
                raise ValueError(f"{name}: must be 4 to 84, got {value}")
        self.size = width, height
        self.observation, self.cooperative, self.mirror = observation, cooperative, mirror
        self.own_side = PLAYERS.index(side) if opponent == "scripted" else None
        self.players = () if opponent == "scripted" else PLAYERS

    @property
    def default_params(self) -> Params:
        """Return the parameters."""
        return Params()

    def reset_env(self, key: Key, params: Params) -> tuple[Array, State]:
        """Start a game."""
        zeros = jnp.zeros(2, jnp.float32)
        nothing = State(zeros, zeros, zeros, jnp.zeros(2, jnp.int32), zeros, jnp.int32(0))
        state = serve(self.size, params, key, nothing)
        return self._observe(params, state), state

    def step_env(self, key: Key, state: State, action: Array, params: Params) -> tuple[Any, ...]:
        """Step without a reset. Both players move at the same time."""
        moves = jnp.asarray([0.0, 1.0, -1.0])[action] * params.paddle_speed
        if self.own_side is not None:
            following = jnp.clip(state.ball[1] - state.paddles, -params.opponent_speed, params.opponent_speed)
            moves = following.at[self.own_side].set(moves)
        state, hit, missed = move(self.size, params, state, moves)
        point = missed[::-1].astype(jnp.int32)
        reward = jnp.full(2, hit.any()) - 1.0 * missed.any() if self.cooperative else 1.0 * point - 1.0 * missed
        state = state._replace(points=state.points + point, num_steps=state.num_steps + 1)
        served = serve(self.size, params, key, state)
        state = jax.tree.map(lambda new, old: jnp.where(missed.any(), new, old), served, state)
        total = state.points.sum() if self.cooperative else state.points.max()
        reward = reward if self.own_side is None else reward[self.own_side]
        return self._observe(params, state), state, reward, total >= params.points, {}

    def is_truncated(self, state: State, params: Params) -> Array:
        """Return whether the time limit is reached."""
        return state.num_steps >= params.max_steps_in_episode

    def action_space(self, params: Params) -> Discrete:
        """Return the space of a player's actions: stay, up, down."""
        return Discrete(3)

    def _observe(self, params: Params, state: State) -> Array:
        """Return each player's observation: the whole field, from its own side with `mirror`."""
        see = partial(OBSERVATIONS[self.observation], self.size, params)
        states = state, mirrored(state) if self.mirror else state
        if self.own_side is not None:
            return see(states[self.own_side])
        return jnp.stack([see(state) for state in states])


def mirrored(state: State) -> State:
    """Return the state with left and right exchanged."""
    flip = jnp.asarray([-1.0, 1.0])
    return state._replace(
        ball=state.ball * flip,
        velocity=state.velocity * flip,
        paddles=state.paddles[::-1],
        points=state.points[::-1],
        before=state.before * flip,
    )


def serve(size: tuple[int, int], params: Params, key: Key, state: State) -> State:
    """Return the state with a ball in the middle, at a random height and towards a random side."""
    key_height, key_side, key_steepness = jax.random.split(key, 3)
    within = lambda key: SERVED_WITHIN * jax.random.uniform(key, (), minval=-1.0, maxval=1.0)
    side = jnp.where(jax.random.bernoulli(key_side), 1.0, -1.0)
    ball = jnp.stack([jnp.float32(0), within(key_height) * size[1] / 2])
    velocity = params.ball_speed * jnp.stack([side, within(key_steepness)])
    return state._replace(ball=ball, velocity=velocity.astype(jnp.float32), before=ball)


def move(size: tuple[int, int], params: Params, state: State, moves: Array) -> Moved:
    """Move the paddles by `moves`, f32 [2], then the ball; walls and paddles reflect it. Nothing is random.

    A paddle at y that meets the ball at height h returns it with the vertical speed
    ball_speed * (h - y) / (paddle / 2).
    """
    right, top = size[0] / 2, size[1] / 2
    reach = params.paddle / 2
    paddles = jnp.clip(state.paddles + moves, reach - top, top - reach)
    ball, velocity = state.ball + state.velocity, state.velocity
    outside = jnp.abs(ball[1]) > top
    height = jnp.where(outside, jnp.sign(ball[1]) * 2 * top - ball[1], ball[1])
    velocity = velocity.at[1].multiply(jnp.where(outside, -1.0, 1.0))
    arrives = jnp.stack([ball[0] <= -right, ball[0] >= right])
    offset = height - paddles
    hit = arrives & (jnp.abs(offset) <= reach)
    x = jnp.where(hit.any(), jnp.sign(ball[0]) * 2 * right - ball[0], ball[0])
    steepness = (jnp.where(hit, offset, 0.0) / reach).sum()
    returned = jnp.stack([-velocity[0], params.ball_speed * steepness])
    velocity = jnp.where(hit.any(), returned, velocity)
    state = state._replace(ball=jnp.stack([x, height]), velocity=velocity, paddles=paddles, before=state.ball)
    return Moved(state, hit, arrives & ~hit)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter that is not possible, or a range or schedule with such a value."""
    height = options.get("height", 16)
    for name, (most, at_most) in {
        "ball_speed": (MAX_SPEED, str(MAX_SPEED)),
        "paddle": (float(height), f"the height {height}"),
        "paddle_speed": (math.inf, ""),
        "points": (math.inf, ""),
    }.items():
        for value in _numbers(options.get(name)):
            if name == "points" and value < 1:
                raise ValueError(f"points: must be at least 1, got {options[name]}")
            if not 0 < value <= most:
                limit = f" and at most {at_most}" if at_most else ""
                raise ValueError(f"{name}: must be more than 0{limit}, got {options[name]}")


def unused(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a warning for each option that differs from its default and has no effect; all values are valid."""
    opponent, side = options.get("opponent", "none"), options.get("side", PLAYERS[0])
    default = Params().opponent_speed
    has_speed = _numbers(options.get("opponent_speed", default)) != [default]
    is_mirrored = coerce("games/Paddles", "mirror", options.get("mirror", True), True)
    found = ["opponent_speed: has no effect; opponent is none"] * (has_speed and opponent == "none")
    if not is_mirrored and opponent != "none" and side == PLAYERS[0]:
        found += ["mirror: has no effect; the left player never sees the field mirrored"]
    return tuple(found)


def _numbers(value: Any) -> list[float]:
    """Return the number, the ends of a range or the points of a schedule; [] for others, which `adapt` refuses."""
    schedule = as_schedule(value)
    parts, read = (schedule[0], parse_float) if schedule else (str(value), float)
    try:
        return [read(part) for part in parts.split("..")]
    except ValueError:
        return []


def _check_word(name: str, value: Any, known: Any) -> None:
    if value not in known:
        raise ValueError(f"{name}: must be {' or '.join(known)}, got {value!r}")
