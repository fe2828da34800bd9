"""The previous action and reward in an observation. The oracle is a plain loop over the same environments' steps."""

from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import envs
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers, Wrappers
from jaxrl_fast.envs.wrappers import previous
from jaxrl_fast.types import MultiDiscrete
from tests.helpers import probes
from tests.helpers.gym_envs import Mixed
from tests.helpers.host_envs import random_actions, run

T, N = 24, 4


class Drive(gymnasium.Env):
    """An environment with asymmetric action bounds and random images. Episodes have 3 to 6 steps."""

    action_space = gymnasium.spaces.Box(np.float32([0, -3]), np.float32([5, 3]))
    observation_space = gymnasium.spaces.Box(0, 255, (20, 20, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 7))
        return self.image(), {}

    def image(self):
        return self.np_random.integers(256, size=(20, 20, 3)).astype(np.uint8)

    def step(self, action):
        self.left -= 1
        return self.image(), float(action.sum()), False, self.left == 0, {}


def make(env_id, observes, num_pools=0, num_envs=N, **options):
    wrappers = Wrappers(previous=observes)
    config = HostEnvConfig((3, 0, 0), num_async_pools=num_pools, workers=Workers(0), wrappers=wrappers)
    return envs.make(env_id, num_envs, config, **options)


def play(env, actions):
    try:
        first, steps = run(env, actions)
    finally:
        if env.host:
            env.host.close()
    return jax.tree.map(lambda a, b: np.concatenate([a[None], b]), first.obs, steps.obs), steps


def expected_previous(steps, seen):
    """Return action [T + 1, N, A] and reward [T + 1, N, 1] before each observation, 0 after a reset."""
    action, reward = np.zeros((T + 1, N, seen.shape[-1])), np.zeros((T + 1, N, 1))
    for t in range(T):
        for i in range(N):
            if t == 0 or not steps.last[t - 1, i]:
                action[t + 1, i], reward[t + 1, i] = seen[t, i], steps.reward[t, i]
    return action, reward


def one_hot(choices, num):
    return np.eye(num)[choices]


@pytest.mark.parametrize(
    ("env_id", "options", "num_pools"),
    [
        ("CartPole-v1", dict(max_steps_in_episode=9), 0),
        ("envpool/CartPole-v1", dict(max_episode_steps=9), 2),
        ("gymnasium/CartPole-v1", dict(max_episode_steps=9), 0),
    ],
)
def test_previous_action_and_reward_are_appended_to_vector(env_id, options, num_pools):
    env = make(env_id, True, num_pools, **options)
    assert env.spec.obs == jax.ShapeDtypeStruct((7,), jnp.float32)
    actions = random_actions(env.spec, T)
    plain, steps = play(make(env_id, False, num_pools, **options), actions)
    found, others = play(env, actions)
    assert (steps.last.sum(0) > 1).all() and len(np.unique(actions)) == 2
    expected = np.concatenate([plain, *expected_previous(steps, one_hot(actions, 2))], axis=-1)
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, others._replace(obs=()), steps._replace(obs=()))


def test_previous_action_and_reward_are_separate_parts_beside_image():
    """Frames are stacked. Previous actions are the executed ones: clipped to [-1, 1], and 0 for NaN."""
    env = make(Drive, True, frame_stack=2)
    assert [x.shape for x in env.spec.obs] == [(20, 20, 6), (2,), (1,)] and env.spec.frame_stack == 0
    actions = 2 * random_actions(env.spec, T)
    actions[5, :, 0] = np.nan
    plain, steps = play(make(Drive, False, frame_stack=2), actions)
    found, _ = play(env, actions)
    action, reward = expected_previous(steps, np.clip(np.nan_to_num(actions), -1, 1))
    assert (steps.last.sum(0) > 1).all() and (np.abs(action) == 1).any() and (np.abs(reward) > 1).any()
    for one, other in zip(found, (plain, action, reward), strict=True):
        np.testing.assert_array_equal(one, other.astype(one.dtype))


def test_previous_multi_discrete_action_is_one_hot_in_nested_observation():
    actions = np.random.default_rng(0).integers(0, [2, 3, 4], (T, N, 3)).astype(np.int32)
    env = make(Mixed, True)
    assert env.spec.action == MultiDiscrete((2, 3, 4)) and set(env.spec.obs[0]) == set(make(Mixed, False).spec.obs)
    (_, action, reward), steps = play(env, actions)
    seen = np.concatenate([one_hot(actions[..., i], num) for i, num in enumerate((2, 3, 4))], axis=-1)
    for one, other in zip((action, reward), expected_previous(steps, seen), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_discrete_observation_is_encoded_from_index_with_previous(tmp_path):
    """DQN replays the parts. `encode_obs` and the exported policy take the raw index; its encoding is one-hot."""
    given = dict(env="gymnasium/FrozenLake-v1", num_envs=2, total_steps=32, loggers=(), log_level="quiet")
    given |= dict(hidden_sizes=(4,), replay={"size": 64}, batch_size=4, learning_starts=8)
    fit = partial(jaxrl_fast.fit, algo="dqn", eval_episodes=2, eval_envs=2, **given)
    run = fit(wrap=["previous"], run_dir=str(tmp_path / "run"))
    trained = jaxrl_fast.load(run.folder)
    assert [x.shape for x in trained.env.spec.obs] == [(16,), (4,), (1,)]
    assert [x.shape for x in trained.env.view.raw_obs] == [(), (4,), (1,)]
    own = np.array([0, 5]), np.eye(4)[:2].astype(np.float32), np.zeros((2, 1), np.float32)
    encoded = trained.env.view.encode_obs(own)
    np.testing.assert_array_equal(encoded[0], one_hot([0, 5], 16))
    assert run.export(to="stablehlo").is_dir()  # export checks its result against the policy


def test_async_pools_observe_actions_that_were_sent():
    env = previous.observe(probes.pooled(probes.constant_reward(N)))
    state, first = env.reset(jax.random.key(0))
    action = jnp.arange(N, dtype=jnp.int32) % env.spec.action.num
    state, timestep = env.pools.receive(0, env.pools.send(0, state, action))
    size = env.spec.action.num
    assert not first.obs[:, -size - 1 :].any()
    np.testing.assert_array_equal(timestep.obs[:, -size - 1 : -1], np.eye(size)[np.asarray(action)])
    np.testing.assert_array_equal(timestep.obs[:, -1], timestep.reward)
