"""frame_stack: stacks are rebuilt from a rollout of single frames, for all histories in helpers.histories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxrl_fast import agents, envs, loop
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import frame_stack
from jaxrl_fast.types import Learning, Rollout, Transition
from tests.helpers.histories import CASES, STACKED, history, same, seeds

pytestmark = pytest.mark.unit

LENGTH = 8  # of the rollouts that a history is cut into


@functools.partial(jax.jit, static_argnums=0)
def compress_and_decode(stack, obs):
    """The stacks [T, N, ...] of one rollout, decoded from its compressed rows; and its single frames."""
    steps = Transition(jax.vmap(functools.partial(frame_stack.compress, stack))(obs), *[None] * 6)
    first, last = (jax.tree.map(lambda x, i=i: x[i], obs) for i in (0, -1))
    rows, kept = frame_stack.encode_rollout(stack, Rollout(steps, last, (), first))
    return frame_stack.decode(kept, rows), steps.obs.newest


@pytest.mark.parametrize("name", STACKED)
@given(seed=seeds)
def test_stacks_are_rebuilt_from_rollout_of_single_frames(name, seed):
    case = CASES[name]
    obs = jax.tree.map(lambda x: x[0], history(case, seed, num_histories=1).steps.obs)
    for start in range(0, case.num_steps, LENGTH):
        rollout = jax.tree.map(lambda x: x[start : start + LENGTH], obs)  # noqa: B023
        found, newest = compress_and_decode(case.layout.frame_stack, rollout)
        same(found, rollout)
        sizes = [(x.size, y.size) for x, y in zip(*map(jax.tree.leaves, (newest, rollout)), strict=True)]
        assert all(x * case.layout.frame_stack == y for x, y in sizes)


@pytest.mark.parametrize("num_frames", [2, 4])
def test_stack_age_counts_rows_since_stack_start_up_to_num_frames_minus_one(num_frames):
    same = np.random.default_rng(0).random((30, 5)) < 0.2
    before = np.array([0, 1, 1, 0, 1], np.uint8)
    age, expected = before.astype(int), []
    for row in same:
        age = np.array([0 if begins else min(n + 1, num_frames - 1) for n, begins in zip(age, row, strict=True)])
        expected.append(age)
    ages = frame_stack.stack_ages(num_frames, jnp.array(same), jnp.array(before))
    assert ages.dtype == jnp.uint8
    np.testing.assert_array_equal(ages, expected)


@pytest.mark.parametrize("num_frames", [1, 2, 4])
def test_compressor_keeps_newest_frame_of_any_stack(num_frames):
    """Rows are [2, 3, 3, num_frames]; in the second one, all frames are equal."""
    obs = np.stack([np.tile(np.arange(num_frames), (3, 3, 1)), np.full((3, 3, num_frames), 7)]).astype(np.uint8)
    kept = frame_stack.compressor(num_frames)(jnp.array(obs))
    newest = kept if num_frames == 1 else kept.newest
    np.testing.assert_array_equal(newest, obs[..., -1:])
    if num_frames > 1:
        np.testing.assert_array_equal(kept.same, [False, True])


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "async_pools"), [("ppo", 0), ("pqn", 0), ("ppo", 2)])
def test_update_on_single_frames_matches_update_on_full_stacks(algo, async_pools):
    """The oracle is an agent that learns from full stacks of the same Breakout rollout, in which lives are lost.

    The second rollout is used: it starts in the middle of a game, and its first stacks have older frames.
    """
    pytest.importorskip("envpool")
    config = configure(
        ALGORITHMS[algo], rollout_length=80, num_minibatches=2, num_epochs=1, network="mlp", hidden_sizes=(8,)
    )
    options = dict(img_height=36, img_width=36)
    env = envs.make(
        "envpool/Breakout-v5", 4, HostEnvConfig((1, 0, 0), "dqn2015", num_async_pools=async_pools), **options
    )
    agent = agents.load(algo).make(config, env.spec, 4)
    whole = agents.load(algo).make(config, env.spec._replace(frame_stack=0), 4)
    key = jax.random.key(0)
    state = jax.jit(agent.init)(key)

    @jax.jit
    def act(key):
        """The same rollout twice: with single frames, and with full stacks."""
        both = agent._replace(learning=Learning(lambda obs: (agent.learning.compress_obs(obs), obs)))
        key_begin, *keys = jax.random.split(key, 3)
        play = lambda actors, key: loop.act(env, both, state, actors, key)[:2]
        _, rollouts = jax.lax.scan(play, loop.restart_envs(env, both, state, key_begin), jnp.stack(keys))
        rollout = jax.tree.map(lambda x: x[1], rollouts)
        shown = lambda i: rollout._replace(steps=rollout.steps._replace(obs=rollout.steps.obs[i]))
        return shown(0), shown(1)

    kept, shown = act(key)
    assert (np.asarray(shown.steps.last) & (shown.steps.discount == 0)).any(), "the rollout must contain a lost life"
    np.testing.assert_array_equal(kept.first_obs, shown.steps.obs[0])
    assert not (kept.first_obs == kept.first_obs[..., -1:]).all((1, 2, 3)).all(), "a rollout within a game"
    size = lambda rollout: sum(x.size for x in jax.tree.leaves(rollout.steps.obs) if x.dtype == jnp.uint8)
    assert size(kept) * 4 == size(shown)
    after, metrics = jax.jit(agent.update)(state, kept, key)
    expected, expected_metrics = jax.jit(whole.update)(state, shown, key)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (after.params, metrics), (expected.params, expected_metrics))
