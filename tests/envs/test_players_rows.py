"""Rows of players, of two games with two players each: what each row holds, worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.envs.wrappers import players
from jaxrl_fast.types import Discrete, Env, EnvSpec, EpisodeScore, TimeStep, View

PER_GAME = np.array([[1, 2], [3, 4]])  # [games, players]
ROWS = [1, 3, 2, 4]  # the left player of both games, then the right one


def games(separate_ends):
    """Return two games whose numbers are PER_GAME times different factors. A step returns its joint actions."""

    def timestep(obs):
        last = jnp.asarray([[False, True], [True, False]]) if separate_ends else jnp.asarray([False, True])
        discount = jnp.where(last, 0.0, 1.0)
        score = EpisodeScore(jnp.float32(30 * PER_GAME), jnp.asarray(PER_GAME == 3)) if separate_ends else None
        mask = jnp.asarray(PER_GAME[..., None] == np.arange(1, 5))
        return TimeStep({"own": obs[..., None]}, jnp.float32(10 * PER_GAME), discount, last, score, mask)

    spec = EnvSpec(
        "test", {"own": jax.ShapeDtypeStruct((2, 1), jnp.float32)}, Discrete(4), 2, 0, True, ("left", "right")
    )
    reset = lambda key: ((), timestep(jnp.float32(100 * PER_GAME)))
    return Env(
        reset, lambda state, action: (state, timestep(action.astype(jnp.float32))), spec, view=View(raw_obs=spec.obs)
    )


@pytest.mark.parametrize("separate_ends", [False, True])
def test_rows_are_first_players_of_all_games_then_second_ones(separate_ends):
    env = players.as_rows(games(separate_ends))
    assert (env.spec.num_envs, env.spec.num_games, env.spec.obs["own"].shape) == (4, 2, (1,))
    _, first = env.reset(None)
    np.testing.assert_array_equal(first.obs["own"][:, 0], 100 * np.array(ROWS))
    _, after = env.step((), jnp.int32([0, 1, 2, 3]))
    np.testing.assert_array_equal(after.obs["own"][:, 0], [0, 1, 2, 3], "each game gets its players' actions")
    np.testing.assert_array_equal(after.reward, 10 * np.array(ROWS))
    np.testing.assert_array_equal(after.action_mask, np.eye(4, dtype=bool)[np.array(ROWS) - 1])
    last = [False, True, True, False] if separate_ends else [False, True, False, True]
    np.testing.assert_array_equal(after.last, last)
    np.testing.assert_array_equal(after.discount, 1 - np.array(last))
    if separate_ends:
        np.testing.assert_array_equal(after.score.reward, 30 * np.array(ROWS))
        np.testing.assert_array_equal(after.score.game_over, [False, True, False, False])


def test_joint_action_has_actions_of_players_of_one_game():
    taken = []
    env = games(False)
    watched = env._replace(step=lambda state, action: taken.append(action) or env.step(state, action))
    players.as_rows(watched).step((), jnp.int32([0, 1, 2, 3]))
    np.testing.assert_array_equal(taken[0], [[0, 2], [1, 3]])
