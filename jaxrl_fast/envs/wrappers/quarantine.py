"""Reset an environment whose numbers are not finite, so that nothing is learned from them.

A simulator that blows up returns NaN or infinity. The step that returned it fails: its row is invalid, and its episode
has no score. Agents see the observation before the failed step until the environment begins another episode. A device
environment resets in the next step. A pool resets when its backend ends the episode; until then its rows are invalid.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs.wrappers.wrapper import Rules, where, wrap
from jaxrl_fast.types import Array, Env, PyTree, TimeStep

INFO = "an environment whose observation or reward is not finite is reset (wrap quarantine)"


class Held(NamedTuple):
    """The memory of n environments between two steps."""

    obs: PyTree  # [n, ...] the last finite observation
    action_mask: Array | None  # [n, num_outputs] bool of that observation, or None
    waiting: Array  # [n] bool: it has failed, and has not begun another episode
    ended: Array  # [n] bool: the next step resets


def guard(env: Env) -> Env:
    """Return the same environments with `failed` time steps where an observation or a reward is not finite.

    The state of a device environment has a field `last`, [N] bool: the next step resets.
    """
    before = _end if env.on_device else lambda state, held: state
    guarded = wrap(env, Rules(_first, partial(_follow, env.on_device), before))
    return guarded._replace(view=guarded.view._replace(info=(*env.view.info, INFO)))


def _end(state: PyTree, held: Held) -> PyTree:
    """End the episodes that have failed, so that the next step resets."""
    return state._replace(last=state.last | held.waiting)


def _first(timestep: TimeStep) -> tuple[Held, TimeStep]:
    """Return the memory after a reset. An episode whose first numbers are not finite ends at once."""
    bad = ~_finite(timestep)
    obs = where(bad, jax.tree.map(jnp.zeros_like, timestep.obs), timestep.obs)
    timestep = timestep._replace(obs=obs, last=timestep.last | bad, failed=jnp.zeros_like(bad))
    return Held(obs, timestep.action_mask, bad, bad), timestep


def _follow(on_device: bool, held: Held, after: TimeStep) -> tuple[Held, TimeStep]:
    """Return the memory after a step of n environments, and their time step."""
    bad = ~_finite(after)
    failed = bad | held.waiting & ~held.ended
    score = after.score
    if score is not None:
        score = score._replace(reward=jnp.where(failed, 0.0, score.reward), game_over=score.game_over & ~failed)
    timestep = TimeStep(
        obs=where(failed, held.obs, after.obs),
        reward=jnp.where(failed, 0.0, after.reward),
        discount=jnp.where(failed, 1.0, after.discount),
        last=after.last | failed,
        score=score,
        action_mask=where(failed, held.action_mask, after.action_mask),
        failed=failed,
    )
    ended = after.last | bad if on_device else after.last
    return Held(timestep.obs, timestep.action_mask, failed, ended), timestep


def _finite(timestep: TimeStep) -> Array:
    """Return whether all numbers of a time step are finite, [n] bool."""
    score = None if timestep.score is None else timestep.score.reward
    parts = jax.tree.leaves((timestep.reward, timestep.obs, score))
    each = [jnp.isfinite(x).reshape(len(x), -1).all(axis=1) for x in parts if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack(each).all(axis=0)
