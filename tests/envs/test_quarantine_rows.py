"""One failed step in quarantine, row by row, where scores and masks differ from what the agent sees."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.envs.wrappers import quarantine
from jaxrl_fast.types import Discrete, Env, EnvSpec, EpisodeScore, TimeStep

NAN, INF = np.nan, np.inf


class Row(NamedTuple):
    """What the environment returns after a step."""

    obs: float
    reward: float = 1.0
    discount: float = 1.0
    last: bool = False
    score: float = 10.0
    game_over: bool = False
    mask: tuple[bool, bool] = (True, False)


RESET = Row(0.0, 0.0, score=0.0)


class State(NamedTuple):
    time: jax.Array  # [] int32: of the environment, which goes on while it waits
    last: jax.Array  # [1] bool


def scripted(rows):
    """Return one environment that returns these rows, except that it resets after a last one."""
    table = Row(*(jnp.asarray(column) for column in zip(*rows, strict=True)))

    def timestep(row):
        one = lambda x, dtype: jnp.asarray(x, dtype)[None]
        score = EpisodeScore(one(row.score, jnp.float32), one(row.game_over, bool))
        numbers = one(row.reward, jnp.float32), one(row.discount, jnp.float32), one(row.last, bool)
        return TimeStep(one(row.obs, jnp.float32)[None], *numbers, score, one(row.mask, bool))

    def reset(key):
        return State(jnp.int32(0), jnp.zeros(1, bool)), timestep(RESET)

    def step(state, action):
        row = jax.tree.map(
            lambda fresh, x: jnp.where(state.last[0], fresh, x[state.time]), Row(*map(jnp.asarray, RESET)), table
        )
        return State(state.time + ~state.last[0], jnp.asarray(row.last)[None]), timestep(row)

    spec = EnvSpec("test", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), 1, has_action_mask=True)
    return Env(reset, step, spec)


def play(rows, num_steps):
    env = quarantine.guard(scripted(rows))

    def run():
        state, _ = env.reset(jax.random.key(0))
        return jax.lax.scan(env.step, state, jnp.zeros((num_steps, 1), jnp.int32))[1]

    return jax.tree.map(lambda x: np.asarray(x)[:, 0], jax.jit(run)())


@pytest.mark.parametrize(
    "failure",
    [
        Row(NAN, 7.0, 0.0, False, 70.0, True, (False, True)),
        Row(3.0, INF, 0.0, False, 70.0, True, (False, True)),
        Row(3.0, 7.0, 0.0, False, INF, True, (False, True)),
    ],
    ids=["observation", "reward", "score"],
)
def test_failed_step_shows_row_before_it_and_scores_nothing(failure):
    """The second step fails. It is neither paid nor terminal, and no game is over; then the environment resets."""
    found = play([Row(1.0), failure, Row(4.0, 2.0, 0.0, True, 20.0, True)], 4)
    np.testing.assert_array_equal(found.obs[:, 0], [1, 1, 0, 4])
    np.testing.assert_array_equal(found.reward, [1, 0, 0, 2])
    np.testing.assert_array_equal(found.discount, [1, 1, 1, 0])
    np.testing.assert_array_equal(found.last, [False, True, False, True])
    np.testing.assert_array_equal(found.failed, [False, True, False, False])
    np.testing.assert_array_equal(found.score.reward, [10, 0, 0, 20])
    np.testing.assert_array_equal(found.score.game_over, [False, False, False, True])
    np.testing.assert_array_equal(found.action_mask, [[True, False]] * 4)
