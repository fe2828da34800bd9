"""Environments of gymnax keep the contract of `types.TimeStep`. The oracle is gymnax's own functions."""

import copy
import enum
import inspect
import re
import subprocess
import sys
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from gymnax.wrappers.purerl import FlattenObservationWrapper
from jax.experimental import io_callback

import jaxrl_fast
from jaxrl_fast import envs
from jaxrl_fast.envs import spaces as envs_spaces
from jaxrl_fast.envs.gymnax import batch as adapter
from jaxrl_fast.types import Box, Discrete
from jaxrl_fast.utils import arguments
from tests.helpers import slow

REFUSED = {"gymnax/MNISTBandit-bsuite": "downloads"}
# Discrete and continuous actions, observed boards and indices. Each environment takes seconds to compile.
FAST = ("CartPole-v1", "Pendulum-v1", "Catch-bsuite", "FrozenLake-misc")


ENV_IDS = [
    env_id if env_id.partition("/")[2] in FAST else slow(env_id)
    for env_id in envs.registered()
    if env_id not in REFUSED
]
# Module scope groups the tests by environment, so pytest workers need not all run every environment.
each_environment = pytest.mark.parametrize("env_id", ENV_IDS, scope="module")
N, T = 3, 48
LIMIT = 20  # steps in an episode, so every environment ends several episodes within T
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # for programs that run once


@pytest.fixture(autouse=True)
def allow_rank_promotion_for_swimmer(request):
    """Allow rank promotion, which Swimmer relies on."""
    if "Swimmer" in request.node.name:
        request.getfixturevalue("any_ranks")


Direction = enum.Enum("Direction", "LEFT RIGHT")


class Params(NamedTuple):
    limit: int = 100


class Countdown:
    """An environment with gymnax's interface but without its base class. `strange` selects one defect."""

    default_params = Params()

    def __init__(self, start: int = 5, strange: str = ""):
        self.start, self.strange = start, strange

    def action_space(self, params):
        unbounded = spaces.Box(-np.inf, np.inf, (2,))
        several = spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 99_999, (1,), jnp.int32)))
        if self.strange == "fails":
            raise KeyError("nothing")
        swapped, none = spaces.Box(np.float32([3, 1]), np.float32([1, 2]), (2,)), spaces.Discrete(0)
        strange = {"unbounded": unbounded, "several": several, "swapped": swapped, "none": none}
        return strange.get(self.strange, spaces.Discrete(2))

    def reset_env(self, key, params):
        state = {"time": 0, "left": self.start}
        obs = self.observe(state)
        return obs.astype(jnp.uint8) if self.strange == "bytes" else obs, state

    def step_env(self, key, state, action, params):
        state = {"time": state["time"] + 1, "left": state["left"] - 1.0}
        reward = jnp.ones(2 if self.strange == "rewards" else (), jnp.int32)
        obs = self.observe(state)
        obs = jnp.stack([obs, obs]) if self.strange == "grows" else obs
        state = state | {"extra": 0} if self.strange == "state" else state
        return obs, state, reward, state["left"] == 0, {}

    def is_truncated(self, state, params):
        return state["time"] >= params.limit

    def observe(self, state):
        left = jnp.asarray(state["left"], jnp.int32)
        return {"left": left, "flag": jnp.array([True])} if self.strange == "dict" else left


class Pair(Countdown):
    """A Countdown whose observation is a tuple."""

    def observation_space(self, params):
        return spaces.Tuple((spaces.Discrete(12), spaces.Box(-3, 3, (2,))))

    def observe(self, state):
        return super().observe(state), jnp.zeros(0 if self.strange == "empty" else 2)


def test_discrete_part_of_tuple_observation_is_one_hot():
    env = envs.make(Pair(), N)
    first, second = env.spec.obs
    assert (first.shape, second.shape) == ((12,), (2,))
    _, timestep = jax.jit(env.reset, compiler_options=QUICK)(jax.random.key(0))
    np.testing.assert_array_equal(timestep.obs[0], np.eye(12)[[5] * N])


class Hollow(Countdown):
    """A Countdown whose state contains an array without elements."""

    def reset_env(self, key, params):
        obs, state = super().reset_env(key, params)
        return obs, state | {"nothing": jnp.zeros((0, 2))}

    def step_env(self, key, state, action, params):
        obs, after, *others = super().step_env(key, state, action, params)
        return obs, after | {"nothing": state["nothing"] + 1}, *others


def test_empty_array_in_state_does_not_change_time_steps():
    """Run two seeds under vmap, which draws their resets together. The oracle is Countdown."""

    def play(env):
        steps = lambda key: jax.lax.scan(env.step, env.reset(key)[0], jnp.zeros((9, N), jnp.int32))[1]
        return jax.jit(jax.vmap(steps), compiler_options=QUICK)(jax.random.split(jax.random.key(0), 2))

    found, expected = play(envs.make(Hollow(3), N)), play(envs.make(Countdown(3), N))
    assert found.last.any()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class Masked(Countdown):
    """Action 1 is allowed on every second step; none is allowed in the last state."""

    def action_mask(self, state, params):
        odd = state["time"] % 2 == 1
        mask = jnp.array([True, odd]) & (state["left"] > 0)
        return jnp.stack([mask, mask]) if self.strange == "large mask" else mask


def test_action_mask_follows_state_and_reset():
    env = envs.make(Masked(3), N)
    assert env.spec.has_action_mask
    state, first = jax.jit(env.reset, compiler_options=QUICK)(jax.random.key(0))
    _, rows = jax.jit(partial(jax.lax.scan, env.step), compiler_options=QUICK)(state, jnp.zeros((5, N), jnp.int32))
    masks = np.concatenate([first.action_mask[None], rows.action_mask])
    allowed = [[True, False], [True, True], [True, False], [True, True], [True, False], [True, True]]
    np.testing.assert_array_equal(rows.last[:, 0], [False, False, True, False, False])
    np.testing.assert_array_equal(masks, np.repeat(np.array(allowed)[:, None], N, axis=1))


def test_make_rejects_action_mask_of_wrong_size():
    with pytest.raises(ValueError, match=r"its action_mask must have 2 entries, got shape \(2, 2\)"):
        envs.make(Masked(strange="large mask"), N)


def test_make_rejects_observation_with_empty_part():
    with pytest.raises(ValueError, match=r"a part of its observation is empty, got shape \(0,\)"):
        envs.make(Pair(strange="empty"), N)


class Blind(Countdown):
    """A Countdown with an empty observation."""

    def observe(self, state):
        return {}


def test_make_rejects_empty_observation():
    with pytest.raises(ValueError, match=r"its observation is empty, got "):
        envs.make(Blind(), N)


@pytest.mark.parametrize("env", [(), (Countdown(),), (Countdown(), Params(), 3)])
def test_make_rejects_tuple_other_than_environment_and_params(env):
    with pytest.raises(ValueError, match=r"^env: a tuple must hold an instance and its parameters, got "):
        envs.make(env, N)


class Answer(NamedTuple):
    """The result of gymnax's own step."""

    env: Any  # the next state if the episode continues
    obs: Any  # the final observation if the episode ends
    reward: Any
    terminated: Any
    truncated: Any


class Played(NamedTuple):
    """T random steps of N environments. Some actions are invalid."""

    env: Any
    run: Any  # (key, actions) -> the fields that follow `actions`
    actions: jax.Array  # [T, N, ...]
    first: Any  # the time step of reset [N, ...]
    timesteps: Any  # the time step of each step [T, N, ...]
    answers: Any  # gymnax's result of the same step [T, N, ...]
    states: Any  # the state before each step [T, N, ...]
    keys: Any  # the keys of `step_env` [T, N]

    @property
    def begins(self):
        """Return [T, N] bool: the step follows a last time step."""
        return np.concatenate([np.zeros((1, N), bool), self.timesteps.last[:-1]])


def random_actions(spec, key):
    if isinstance(spec.action, Discrete):
        return jax.random.randint(key, (T, N), 0, spec.action.num)
    return jax.random.uniform(key, (T, N, *spec.action.shape), minval=-1.0, maxval=1.0)


def odd_actions(spec):
    """Return actions far out of range, infinite or NaN [8, N, ...]."""
    if isinstance(spec.action, Discrete):
        return jnp.resize(jnp.array([-(2**31), -1, spec.action.num, 2**31 - 1], jnp.int32), (8, N))
    return jnp.resize(jnp.array([-jnp.inf, jnp.nan, jnp.inf, 1e30], jnp.float32), (8, N, *spec.action.shape))


def play(env, key, actions):
    def body(state, action):
        keys = adapter.step_keys(state)
        answer = jax.vmap(partial(gymnax_step, env.step.args[0]))(keys, state.env, action)
        following, timestep = env.step(state, action)
        return following, (timestep, answer, state, keys)

    state, first = env.reset(key)
    return first, *jax.lax.scan(body, state, actions)[1]


def gymnax_step(single, key, env_state, action):
    """Call gymnax's own `step`, but pass our key to `step_env`, and let its automatic reset return zeros."""
    oracle = copy.copy(single.env)
    oracle.step_env = lambda key_of_oracle, *rest: single.env.step_env(key, *rest)
    obs, _ = jax.eval_shape(single.env.reset_env, key, single.params)
    oracle.reset_env = lambda key, params: (jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), obs), env_state)
    action = envs_spaces.to_env_action(single.spec, single.bounds, action)
    _, following, reward, terminated, truncated, info = oracle.step(key, env_state, action, single.params)
    return Answer(following, info["final_observation"], reward, terminated, truncated)


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile(QUICK)


def timesteps_of(env, actions, key=None):
    key = jax.random.key(0) if key is None else key
    run = lambda key, actions: jax.lax.scan(env.step, env.reset(key)[0], actions)[1]
    return compiled(run, key, actions)(key, actions)


@cache
def random_rollout(env_id):
    env = envs.make(env_id, N, max_steps_in_episode=LIMIT)
    actions = random_actions(env.spec, jax.random.key(1)).at[8:16].set(odd_actions(env.spec))
    run = compiled(partial(play, env), jax.random.key(0), actions)
    return Played(env, run, actions, *run(jax.random.key(0), actions))


def encode_like(raw, obs):
    """Reshape gymnax's observations [..., *] to the shape of ours, or encode indices as one-hot vectors."""
    raw = np.asarray(raw)
    if raw.ndim == obs.ndim - 1 and obs.shape[-1] > 1:
        return np.eye(obs.shape[-1])[raw]
    return raw.reshape(obs.shape)


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def assert_same_bits(a, b):
    bits = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), a, b)


def assert_close(a, b):
    to_float = lambda x: np.asarray(x, np.float64)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(to_float(x), to_float(y), rtol=1e-4, atol=1e-5), a, b)


@pytest.mark.slow
@each_environment
def test_step_matches_gymnax_step_and_final_observation(env_id):
    game = random_rollout(env_id)
    steps, answers, valid = game.timesteps, jax.tree.map(np.asarray, game.answers), ~game.begins
    last = answers.terminated | answers.truncated
    assert last[valid].sum() >= 2 * N
    np.testing.assert_array_equal(steps.last[valid], last[valid])
    np.testing.assert_array_equal(steps.discount[valid], 1.0 - answers.terminated[valid])
    assert_close(steps.reward[valid], answers.reward[valid])
    assert_close(steps.obs[valid], encode_like(answers.obs, steps.obs)[valid])
    goes_on = (valid & ~last)[:-1]
    ours = jax.tree.map(lambda x: x[1:][goes_on], game.states.env)
    assert_close(ours, jax.tree.map(lambda x: x[:-1][goes_on], answers.env))


@pytest.mark.slow
@each_environment
def test_reset_matches_gymnax_reset_with_derived_keys(env_id):
    """Each environment's key splits into three: for the reset, for the steps, and for later episodes."""
    game = random_rollout(env_id)
    single = game.env.step.args[0]
    num_episodes = 1 + game.begins.sum(axis=0)  # [N]
    source, begin, stepping = jax.random.split(jax.random.key(0), N), [], []
    for _ in range(num_episodes.max()):
        keys = jax.vmap(partial(jax.random.split, num=3))(source)
        begin.append(keys[:, 0])
        stepping.append(jax.random.key_data(keys[:, 1]))
        source = keys[:, 2]
    begin = jnp.stack(begin).reshape(-1)
    reset = lambda key: single.env.reset(key, single.params)[0]
    first_obs = compiled(jax.vmap(reset), begin)(begin)
    first_obs = np.asarray(first_obs).reshape(-1, N, *first_obs.shape[1:])
    for i in range(N):
        at = np.concatenate([[0], 1 + np.flatnonzero(game.begins[:, i])])  # rows of all observations
        seen = np.concatenate([np.asarray(game.first.obs)[None], game.timesteps.obs])[at, i]
        assert_close(seen, encode_like(first_obs[: len(at), i], seen))
        at = at[at < T]
        used = jax.random.key_data(game.states.key)[at, i]
        np.testing.assert_array_equal(used, np.stack(stepping)[: len(at), i])


@each_environment
def test_step_after_last_has_reward_zero_discount_one_and_is_not_last(env_id):
    game = random_rollout(env_id)
    begins = game.begins
    assert begins.sum() >= 2 * N
    assert (game.timesteps.reward[begins] == 0).all()
    assert (game.timesteps.discount[begins] == 1).all()
    assert not game.timesteps.last[begins].any()


@each_environment
def test_action_of_step_after_last_is_ignored(env_id):
    game = random_rollout(env_id)
    other = random_actions(game.env.spec, jax.random.key(9)).at[0].set(odd_actions(game.env.spec)[0])
    mask = game.begins.reshape(T, N, *[1] * (other.ndim - 2))
    again = Played(game.env, game.run, game.actions, *game.run(jax.random.key(0), jnp.where(mask, other, game.actions)))
    for field in ("first", "timesteps", "states", "keys"):
        assert_same_bits(getattr(again, field), getattr(game, field))


@each_environment
def test_environments_are_independent_of_each_others_actions(env_id):
    game = random_rollout(env_id)
    others = random_actions(game.env.spec, jax.random.key(9)).at[:, 0].set(game.actions[:, 0])
    _, timesteps, _, _, keys = game.run(jax.random.key(0), others)
    of_first = lambda tree: jax.tree.map(lambda x: x[:, 0], tree)
    assert_same_bits(of_first((timesteps, keys)), of_first((game.timesteps, game.keys)))


@each_environment
def test_step_keys_are_unique_across_steps_environments_and_seeds(env_id):
    game = random_rollout(env_id)
    other_seed = game.run(jax.random.key(1), game.actions)[-1]
    data = np.stack([jax.random.key_data(keys) for keys in (game.keys, other_seed)]).reshape(2 * T * N, -1)
    assert len(np.unique(data, axis=0)) == 2 * T * N


@each_environment
def test_invalid_actions_leave_states_and_time_steps_finite(env_id):
    game = random_rollout(env_id)
    finite = lambda x: np.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.floating) else True
    assert all(map(finite, jax.tree.leaves((game.first, game.timesteps, game.states.env))))


@each_environment
def test_reset_and_step_have_equal_shapes_and_dtypes_that_match_spec(env_id):
    env = envs.make(env_id, N)
    assert env.spec.id == env_id and env.spec.num_envs == N and env.on_device
    action = jax.eval_shape(lambda: random_actions(env.spec, jax.random.key(0))[0])
    state, first = jax.eval_shape(env.reset, jax.random.key(0))
    following, timestep = jax.eval_shape(env.step, state, action)
    avals = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
    assert avals((state, first)) == avals((following, timestep))
    assert not any(x.weak_type for x in jax.tree.leaves((state, first)))
    assert (first.obs.shape, first.obs.dtype) == ((N, *env.spec.obs.shape), env.spec.obs.dtype)
    kind = [(first.reward, jnp.float32), (first.discount, jnp.float32), (first.last, jnp.bool_)]
    assert all(x.shape == (N,) and x.dtype == dtype for x, dtype in kind)


@pytest.mark.parametrize("env_id", REFUSED)
def test_make_rejects_unsupported_environment_with_one_line_message(env_id):
    with pytest.raises(ValueError, match=REFUSED[env_id]) as refusal:
        envs.make(env_id, N)
    assert "\n" not in str(refusal.value)


def test_observation_spec_keeps_shapes_and_encodes_indices_as_one_hot():
    see = lambda env_id: envs.make(env_id, 1).spec.obs
    assert see("gymnax/Breakout-MinAtar") == jax.ShapeDtypeStruct((10, 10, 4), jnp.bool_)
    assert see("gymnax/FrozenLake-misc") == jax.ShapeDtypeStruct((16,), jnp.float32)  # one-hot positions
    assert see("gymnax/FourRooms-misc") == jax.ShapeDtypeStruct((4,), jnp.float32)
    assert see("gymnax/Catch-bsuite") == jax.ShapeDtypeStruct((10, 5), jnp.float32)
    expected = {"left": jax.ShapeDtypeStruct((1,), jnp.float32), "flag": jax.ShapeDtypeStruct((1,), jnp.bool_)}
    assert envs.make(Countdown(strange="dict"), 1).spec.obs == expected


@each_environment
@pytest.mark.usefixtures("any_ranks")  # a Box of gymnax compares a batch with its bounds
def test_actions_are_scaled_and_clipped_to_action_space(env_id):
    game = random_rollout(env_id)
    single = game.env.step.args[0]
    space = single.env.action_space(single.params)
    to_env_action = jax.vmap(partial(envs_spaces.to_env_action, single.spec, single.bounds))
    ours = np.stack([to_env_action(action) for action in game.actions[6:20]])
    if isinstance(space, spaces.Discrete):
        assert ours.dtype == np.int32
        np.testing.assert_array_equal(ours, np.clip(game.actions[6:20], 0, space.n - 1))
    else:
        unit = np.nan_to_num(np.clip(game.actions[6:20], -1, 1), nan=0.0)
        assert ours.dtype == np.float32 and (ours >= space.low).all() and (ours <= space.high).all()
        np.testing.assert_allclose(ours, space.low + (unit + 1) / 2 * (space.high - space.low), rtol=1e-6, atol=1e-7)


def test_actions_are_scaled_to_asymmetric_bounds():
    """An action in [-1, 1] becomes low + (action + 1) / 2 (high - low), for each component separately."""

    class Lopsided(Countdown):
        def action_space(self, params):
            return spaces.Box(np.float32([-1, 0]), np.float32([3, 10]), (2,))

    single = envs.make(Lopsided(), 1).step.args[0]
    actions = jnp.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.5, -0.5], [-9.0, 9.0]])
    scaled = jax.vmap(partial(envs_spaces.to_env_action, single.spec, single.bounds))(actions)
    np.testing.assert_array_equal(scaled, [[-1, 0], [1, 5], [3, 10], [2, 2.5], [-1, 10]])


@pytest.mark.parametrize("env_id, limit", [("gymnax/CartPole-v1", 4)])
def test_time_limit_truncates_episode_with_discount_one(env_id, limit):
    env = envs.make(env_id, N, max_steps_in_episode=limit)
    steps = timesteps_of(env, jnp.ones((13, N), jnp.int32))
    assert (steps.discount == 1).all()
    ends = np.arange(1, 14) % (limit + 1) == limit  # each reset takes one more row
    np.testing.assert_array_equal(steps.last, np.repeat(ends[:, None], N, axis=1))


def test_termination_takes_precedence_over_time_limit_on_same_step():
    """The episode terminates at step 5. A limit of 5 coincides with it; a limit of 4 truncates."""
    for limit, discount in [(5, 0.0), (4, 1.0)]:
        env = envs.make(Countdown(5), 1, limit=limit)
        steps = timesteps_of(env, jnp.zeros((limit, 1), jnp.int32))
        assert steps.last[-1, 0] and steps.discount[-1, 0] == discount
        assert steps.reward.dtype == jnp.float32 and (steps.reward == 1).all()


@pytest.mark.slow
def test_vmapped_seeds_match_single_seeds_bitwise():
    """Results are bitwise equal, although a batch draws its resets at other times than a single run."""
    env = envs.make("gymnax/FrozenLake-misc", N)
    actions = random_actions(env.spec, jax.random.key(1))

    def run(key):
        state, _ = env.reset(key)
        return jax.lax.scan(env.step, state, actions)[1]

    keys = jax.random.split(jax.random.key(2), 6).reshape(2, 3)
    batch = compiled(jax.vmap(jax.vmap(run)), keys)(keys)
    alone = compiled(partial(jax.lax.map, partial(jax.lax.map, run)), keys)(keys)
    assert batch.last.any()
    assert_same_bits(batch, alone)


def test_step_supports_vmap_over_actions_alone():
    env = envs.make("gymnax/CartPole-v1", N)

    def step_both(key, actions):
        state = env.reset(key)[0]._replace(last=jnp.ones(N, bool))
        return jax.vmap(env.step, (None, 0))(state, actions)[1]

    arguments = jax.random.key(0), jnp.stack([jnp.zeros(N, jnp.int32), jnp.ones(N, jnp.int32)])
    timesteps = compiled(step_both, *arguments)(*arguments)
    assert_same_bits(jax.tree.map(lambda x: x[0], timesteps), jax.tree.map(lambda x: x[1], timesteps))


def test_reset_observations_differ_between_environments_and_seeds():
    env = envs.make("gymnax/CartPole-v1", 16)
    obs = jax.jit(jax.vmap(lambda key: env.reset(key)[1].obs))(jax.random.split(jax.random.key(0), 4))
    assert len(np.unique(np.asarray(obs).reshape(64, -1), axis=0)) == 64


def test_reset_output_can_be_donated():
    env = envs.make("gymnax/CartPole-v1", N)
    state, first = env.reset(jax.random.key(0))
    step = lambda state, timestep: env.step(state, jnp.zeros(N, jnp.int32))
    following, _ = jax.jit(step, donate_argnums=(0, 1))(state, first)
    np.testing.assert_array_equal(following.num_steps, np.ones(N))


@pytest.mark.slow
def test_reset_and_step_use_each_key_once(strict_keys):
    env = envs.make("gymnax/FrozenLake-misc", N)

    def run(key):
        state, _ = env.reset(key)
        return jax.lax.scan(env.step, state, jnp.zeros((4, N), jnp.int32))[1].reward

    jax.jit(run)(jax.random.key(0))
    jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(1), 2))


def test_step_counter_wraps_at_uint32_maximum():
    env = envs.make("gymnax/FrozenLake-misc", N)

    def step_at_the_end(key):
        state = env.reset(key)[0]._replace(num_steps=jnp.full(N, 2**32 - 1, jnp.uint32))
        return env.step(state, jnp.zeros(N, jnp.int32))[0].num_steps

    num_steps = compiled(step_at_the_end, jax.random.key(0))(jax.random.key(0))
    np.testing.assert_array_equal(num_steps, np.zeros(N, np.uint32))
    assert num_steps.dtype == jnp.uint32


def test_rbg_keys_are_supported():
    env = envs.make("gymnax/FrozenLake-misc", N)
    assert timesteps_of(env, jnp.zeros((T, N), jnp.int32), jax.random.key(0, impl="rbg")).last.any()


@pytest.mark.parametrize("bad", [jnp.zeros(N), jnp.zeros(N + 1, jnp.int32), jnp.zeros((N, 1), jnp.int32)])
def test_wrong_action_shape_or_dtype_is_rejected_during_tracing(bad):
    env = envs.make("gymnax/CartPole-v1", N)
    state, _ = jax.eval_shape(env.reset, jax.random.key(0))
    with pytest.raises(ValueError, match=r"gymnax/CartPole-v1: actions must be int32\[3\], got "):
        jax.eval_shape(env.step, state, bad)


class Levers:
    """Observes its action, numbers of two axes with bounds of their own."""

    default_params = ()
    low, high = np.float32([[0, 1, 2], [3, 4, 5]]), np.float32([[1, 3, 6], [11, 20, 37]])

    def reset_env(self, key, params):
        return jnp.zeros((2, 3)), jnp.int32(0)

    def step_env(self, key, state, action, params):
        return action, state, jnp.float32(0), jnp.bool_(False), {}

    def is_truncated(self, state, params):
        return jnp.bool_(False)

    def action_space(self, params):
        return spaces.Box(self.low, self.high, (2, 3))


def test_actions_of_two_axes_are_flat_for_agents():
    env = envs.make(Levers, N)
    assert env.spec.action == Box((6,))
    state, _ = env.reset(jax.random.key(0))
    unit = np.linspace(-1, 1, 6 * N, dtype=np.float32).reshape(N, 6)
    expected = Levers.low + (unit.reshape(N, 2, 3) + 1) / 2 * (Levers.high - Levers.low)
    np.testing.assert_allclose(env.step(state, unit)[1].obs, expected, rtol=1e-6)
    np.testing.assert_allclose(env.view.to_env_action(unit), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "env_id, says",
    [
        ("CartPol-v1", r"unknown environment 'CartPol-v1'; did you mean CartPole-v1"),
        ("gymnax/cartpole-v1", "did you mean gymnax/CartPole-v1"),
        ("Breakout", "did you mean Breakout-MinAtar"),
        ("CartPole-v2", "did you mean CartPole-v1"),
        ("gymnx/CartPole-v1", "unknown backend 'gymnx' .*; did you mean gymnax"),
        ("quite else", "give an id such as 'gymnax/CartPole-v1'"),
        ("no_such_module:MyEnv", "importing 'no_such_module' failed"),
        ("jaxrl_fast.envs:mak", "has no 'mak'; did you mean make"),
        ("jaxrl_fast.types:TimeStep", "lacks reset_env, step_env"),
        ("os:makedirs", "env: os:makedirs must be annotated to return a gymnasium.Env, got none; write"),
        ("builtins:len", "env: builtins:len must be a class or an instance with gymnax's interface, got a builtin"),
        ("subprocess:Popen", "lacks reset_env, step_env"),
        ("json:JSONDecoder", "lacks reset_env, step_env"),
    ],
)
def test_make_rejects_unknown_environment_with_one_line_hint(env_id, says):
    with pytest.raises(ValueError, match=says) as refusal:
        envs.make(env_id, N)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("default", "written", "value"),
    [
        (np.int64(3), "7", 7),
        (np.float32(0.5), "7", 7.0),
        (np.bool_(True), "no", False),
        (inspect.Parameter.empty, "5", 5),
        (None, "[4, 7]", [4, 7]),
        (None, "null", None),
        (None, "a word", "a word"),
        ((1, 2), "[3, 4]", (3, 4)),
        ((1, 2), None, None),
        ([1, 2], (3, 4), (3, 4)),
        ({"a": 1}, '{"a": 2}', {"a": 2}),
        ("word", "5", "5"),
        ("word", 5, "5"),
        (True, "off", False),
        (Direction.LEFT, "RIGHT", Direction.RIGHT),
    ],
)
def test_coerce_converts_option_to_type_of_default_or_parses_it(default, written, value):
    found = arguments.coerce("an environment", "x", written, default)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("default", "written"),
    [
        ((1, 2), "3,4"), ((1, 2), 5), ([1], "3"), ({"a": 1}, "[1]"), ("word", True), ("word", [1]),
        (Direction.LEFT, "UP"), (1.0, "1e300"), (1.0, "inf"), (np.zeros(2), "[null, 1]"),
    ],
)  # fmt: skip
def test_coerce_rejects_option_of_wrong_type(default, written):
    with pytest.raises(ValueError, match=r"^x: must be .* for an environment, got .*; for example "):
        arguments.coerce("an environment", "x", written, default)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"max_steps": 5}, "gymnax/DeepSea-bsuite has no option 'max_steps'; did you mean max_steps_in_episode"),
        ({"sise": 5}, "no option 'sise'; did you mean size"),
        ({"max_steps_in_episode": 0}, "max_steps_in_episode: must be at least 1 .*, got 0"),
        ({"max_steps_in_episode": 2**31}, "max_steps_in_episode: .* less than .*, got 2147483648"),
        ({"max_steps_in_episode": 2.5}, "max_steps_in_episode: must be int .*, got 2.5; for example 8"),
        ({"unscaled_move_cost": "much"}, "unscaled_move_cost: must be float .*, got 'much'; for example 0.01"),
        ({"unscaled_move_cost": float("nan")}, "must be float"),
        ({"deterministic": "perhaps"}, "must be bool .*; for example True"),
        ({"size": -1}, "cannot be made with size=-1"),
    ],
)
def test_make_rejects_invalid_option_with_one_line_hint(options, says):
    with pytest.raises(ValueError, match=says) as refusal:
        envs.make("gymnax/DeepSea-bsuite", N, **options)
    assert "\n" not in str(refusal.value)


def with_size(size):
    return Countdown()


@pytest.mark.parametrize("error", [TypeError("size: of a wrong type"), KeyError("a map is missing here"), None])
def test_make_error_suggests_option_only_for_missing_argument(error):
    """One factory lacks an argument. The others fail for reasons that no option could fix."""

    def failing():
        raise error

    with pytest.raises(ValueError, match="cannot be made") as refusal:
        envs.make(failing if error else with_size, N)
    assert str(refusal.value).endswith("; give it as an option of the environment") == (error is None)


@pytest.mark.parametrize("num_envs", [0, -1, 2.0, "4", True])
def test_make_rejects_invalid_num_envs(num_envs):
    with pytest.raises(ValueError, match="num_envs: must be a whole number of at least 1, got"):
        envs.make("gymnax/CartPole-v1", num_envs)


def test_options_are_converted_to_type_of_replaced_parameter():
    params = envs.make("CartPole-v1", N, max_steps_in_episode="1e3", gravity=3).step.args[0].params
    assert (params.max_steps_in_episode, params.gravity) == (1000, 3.0)
    assert isinstance(params.max_steps_in_episode, int) and isinstance(params.gravity, float)
    params = envs.make("Acrobot-v1", N, available_torque=[-2, 0, 2]).step.args[0].params
    np.testing.assert_array_equal(params.available_torque, [-2.0, 0.0, 2.0])
    params = envs.make("Acrobot-v1", N, available_torque="[-2, 0, 2.5]").step.args[0].params  # from a command line
    np.testing.assert_array_equal(params.available_torque, [-2.0, 0.0, 2.5])
    for wrong in ("-2,0,2", "[1, 2]", "big"):
        with pytest.raises(ValueError, match=r"available_torque: must be an array of shape \[3\] for .*, got '"):
            envs.make("Acrobot-v1", N, available_torque=wrong)
    assert envs.make("DeepSea-bsuite", N, size=12, deterministic="no").spec.obs.shape == (12, 12)
    assert envs.make("FrozenLake-misc", N, map_name="8x8").spec.obs.shape == (64,)


@pytest.mark.parametrize(
    "strange, says",
    [
        ("unbounded", "bounds must be finite"),
        ("swapped", "lower bounds must not exceed the upper ones"),
        ("none", "its action space must have at least 1 action, got 0"),
        ("several", "a Box of whole numbers may have 4,096 options in all, got 100,000"),
        ("rewards", r"its reward must be one number, got shape \(2,\); add them up with weights"),
        ("grows", r"its observation must not change, got \(1,\) after reset and \(2,\) after step"),
        ("fails", "KeyError: 'nothing'"),
        ("state", r"its state must have the same parts .*, got state\['extra'\] only after step"),
    ],
)
def test_make_rejects_inconsistent_environment_with_one_line_message(strange, says):
    with pytest.raises(ValueError, match=rf":Countdown: .*{says}") as refusal:
        envs.make(Countdown(strange=strange), N)
    assert "\n" not in str(refusal.value)


def step_with(**changes):
    """Return a subclass of Countdown that changes parts of its step: obs, state, reward, terminated or info."""

    class Changed(Countdown):
        def step_env(self, key, state, action, params):
            names = ("obs", "state", "reward", "terminated", "info")
            parts = dict(zip(names, super().step_env(key, state, action, params)))
            return tuple((parts | {name: change(parts[name]) for name, change in changes.items()}).values())

    return Changed


class NoReturn(Countdown):
    def step_env(self, key, state, action, params):
        pass


class NoStart(Countdown):
    def reset_env(self, key, params):
        pass


class NoLimit(Countdown):
    def is_truncated(self, state, params):
        pass


class NoTimeLimit:
    default_params, action_space = (), Countdown.action_space
    reset_env, step_env = Countdown.reset_env, Countdown.step_env


class Lists(Countdown):
    """Its state is a list after reset and a tuple after step."""

    def reset_env(self, key, params):
        return jnp.zeros(2), [jnp.zeros(2), 0]

    def step_env(self, key, state, action, params):
        return jnp.zeros(2), tuple(state), 0.0, False, {}

    def is_truncated(self, state, params):
        return False


class Remembers(Countdown):
    """A Countdown that keeps its position in an attribute instead of the state."""

    def step_env(self, key, state, action, params):
        self.position = action
        return super().step_env(key, state, action, params)


class Counts(Countdown):
    """A Countdown that keeps its time in an attribute instead of the state."""

    def reset_env(self, key, params):
        self.time = 0
        return super().reset_env(key, params)

    def step_env(self, key, state, action, params):
        self.time += 1
        return super().step_env(key, state, action, params)


class Draws(Countdown):
    """A Countdown that keeps what reset_env draws in an attribute, for its steps to read."""

    def reset_env(self, key, params):
        self.goal = jax.random.uniform(key)
        return super().reset_env(key, params)

    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, reward - self.goal, terminated, info


class Defaults(Countdown):
    @property
    def default_params(self):
        raise OSError("no file")


def ordered(obs):
    return io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.int32), obs, ordered=True)


def not_vmapped(obs):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.int32), obs)


@pytest.mark.parametrize(
    "source, says",
    [
        (step_with(reward=lambda x: None), "its reward must be one number, got None; return it"),
        (step_with(reward=lambda x: (x, x)), "its reward must be one number, got a tuple"),
        (step_with(reward=lambda x: "1"), "its reward must be one number, got a str"),
        (step_with(reward=lambda x: x + 1j), "its reward must be a real number, got complex64"),
        (step_with(terminated=lambda x: None), "its terminated must be one number, got None; return it"),
        (step_with(terminated=lambda x: jnp.array([x, x])), "its terminated must be one number, got shape (2,)"),
        (NoLimit, "its is_truncated must be one number, got None; return it"),
        (NoTimeLimit, "lacks is_truncated(state, params) of gymnax's interface; add it in a subclass"),
        (NoReturn, "step_env must return (obs, state, reward, terminated, info), got None; return it"),
        (NoStart, "reset_env must return (obs, state), got None; return it"),
        (Lists, "the containers of its state must not change, got [*, *] after reset and (*, *) after step"),
        (step_with(obs=ordered), "tracing it failed with ValueError: Cannot"),
        (step_with(obs=not_vmapped), "tracing it failed with NotImplementedError: "),
        (Remembers, "its attribute position changes in reset_env or step_env; keep it in the state"),
        (Counts, "its attribute time changes in reset_env or step_env; keep it in the state"),
        (Draws, "its attribute goal changes in reset_env or step_env; keep it in the state"),
        (Defaults, "its default_params failed with OSError: no file (test_gymnax.py:"),
    ],
)
def test_make_rejects_environment_that_breaks_interface_in_one_line(source, says):
    with pytest.raises(ValueError) as refusal:
        envs.make(source, N)
    assert "\n" not in str(refusal.value)
    assert says in str(refusal.value), refusal.value


@pytest.mark.parametrize(
    "shape, high, has_hint", [((9, 9), 255, True), ((9, 9, 3), 255, True), ((9, 9), 1, False), ((9,), 255, False)]
)
def test_info_advises_image_option_for_float_shades(shape, high, has_hint):
    class Shades(Countdown):
        def observation_space(self, params):
            return spaces.Box(0, high, shape)

        def reset_env(self, key, params):
            return jnp.zeros(shape), super().reset_env(key, params)[1]

        def step_env(self, key, state, action, params):
            return jnp.zeros(shape), *super().step_env(key, state, action, params)[1:]

    hint = "observations are floats from 0 to 255: network.observations image divides them by 255"
    assert (hint in envs.make(Shades(), N).view.info) == has_hint


def test_discrete_space_of_other_library_is_accepted_if_it_starts_at_0():
    class Foreign(Countdown):
        def action_space(self, params):
            return SimpleNamespace(n=np.int64(3), shape=(), start=0)

        def observation_space(self, params):
            return SimpleNamespace(n=8, shape=())

    env = envs.make(Foreign(), N)
    assert env.spec.action == Discrete(3) and env.spec.obs.shape == (8,)

    class Shifted(Countdown):
        def action_space(self, params):
            return SimpleNamespace(n=3, shape=(), start=1)

    with pytest.raises(ValueError, match="unsupported action space"):
        envs.make(Shifted(), N)


def test_tracing_error_names_file_line_and_method():
    class Failing(Countdown):
        def step_env(self, key, state, action, params):
            return {}[self.strange]

    line = inspect.getsourcelines(Failing)[1] + 2
    with pytest.raises(ValueError, match=rf"KeyError: '' \(test_gymnax.py:{line}, in step_env\)$"):
        envs.make(Failing, N)


def test_observation_dtype_is_common_type_of_reset_and_step():
    env = envs.make(Countdown(strange="bytes", start=3), N)
    assert env.spec.obs == jax.ShapeDtypeStruct((1,), "float32")
    steps = timesteps_of(env, jnp.zeros((5, N), jnp.int32))  # a scan requires a constant carry type
    np.testing.assert_array_equal(steps.obs[:, 0, 0], [2, 1, 0, 3, 2])


class Tokens:
    """Each step removes a random token of three. It draws until it finds one, so it is undefined for an empty state."""

    default_params = Params()

    def __init__(self):
        self.left_when_stepped = []

    def action_space(self, params):
        return spaces.Discrete(2)

    def reset_env(self, key, params):
        left = jnp.ones(3, bool)
        return left, left

    def step_env(self, key, left, action, params):
        jax.debug.callback(lambda left: self.left_when_stepped.append(int(left.sum())), left)
        draw = lambda carry: (jax.random.fold_in(carry[0], 1), jax.random.randint(carry[0], (), 0, 3))
        # The loop is bounded, so a step after the end is reported and does not hang.
        tries, choice = jnp.int32(0), jnp.int32(0)
        missed = lambda carry: ~left[carry[1][1]] & (carry[0] < 1000)
        _, (_, choice) = jax.lax.while_loop(missed, lambda c: (c[0] + 1, draw(c[1])), (tries, (key, choice)))
        left = left.at[choice].set(False)
        return left, left, 1.0, ~left.any(), {}

    def is_truncated(self, state, params):
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("num_seeds", "num_envs"), [(1, 1), (2, 5)])
def test_terminal_state_is_never_stepped(num_envs, num_seeds):
    source = Tokens()
    env = envs.make(source, num_envs)

    def run(key):
        return jax.lax.scan(env.step, env.reset(key)[0], jnp.zeros((12, num_envs), jnp.int32))[1].last

    last = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), num_seeds))
    jax.effects_barrier()
    np.testing.assert_array_equal(last, np.broadcast_to(np.arange(12)[:, None] % 4 == 2, last.shape))
    assert len(source.left_when_stepped) == 12 * num_envs * num_seeds
    assert min(source.left_when_stepped) == 1


@pytest.mark.slow
def test_terminal_state_is_never_stepped_in_training_and_evaluation(tmp_path):
    source = Tokens()
    options = dict(num_envs=8, num_seeds=2, total_steps=512, eval_episodes=4, run_dir=str(tmp_path / "run"))
    run = jaxrl_fast.fit(algo="ppo", env=source, rollout_length=16, hidden_sizes=(8,), **options)
    jax.effects_barrier()
    assert run.summary["eval_return_mean"] == 3
    assert min(source.left_when_stepped) == 1


@pytest.mark.parametrize("steps", [9, 20])
def test_state_that_becomes_float_after_several_steps_is_not_rounded(steps):
    """v becomes a float in step 1, x in step 2. The oracle is the environment's own step: x sums 0, 0.25, 0.5, ..."""

    class Moving(Countdown):
        def reset_env(self, key, params):
            state = {"x": 0, "v": 0, "moved": False, "far": False}
            return self.observe(state), state

        def step_env(self, key, state, action, params):
            x, v = state["x"] + state["v"], state["v"] + 0.25
            state = {"x": x, "v": v, "moved": state["moved"] + 1, "far": state["moved"]}
            return self.observe(state), state, x, False, {}

        def is_truncated(self, state, params):
            return False

        def observe(self, state):
            return jnp.stack([jnp.asarray(state[name]) for name in ("x", "far")])

    env = envs.make(Moving(), 1)
    timesteps = timesteps_of(env, jnp.zeros((steps, 1), jnp.int32))
    state, xs, far = Moving().reset_env(None, None)[1], [], []
    for _ in range(steps):
        _, state, *_ = Moving().step_env(None, state, 0, None)
        xs.append(float(state["x"]))
        far.append(float(state["far"]))
    assert steps != 9 or xs[7] == 7.0
    np.testing.assert_array_equal(timesteps.reward[:, 0], xs)
    np.testing.assert_array_equal(timesteps.obs[:, 0], np.transpose([xs, far]))


def test_make_rejects_wrapper_without_step_env():
    wrapped = FlattenObservationWrapper(envs.make("Catch-bsuite", 1).step.args[0].env)
    with pytest.raises(ValueError, match=r"lacks .*step_env.* of gymnax's interface"):
        envs.make(wrapped, N)


def test_make_accepts_classes_instances_factories_and_pairs():
    sources = [Countdown, Countdown(), lambda: Countdown(), lambda: (Countdown(), Params()), (Countdown(), Params())]
    for source in sources:
        assert envs.make(source, N, limit=7).step.args[0].params.limit == 7
    assert envs.make(Countdown, N, start="9").step.args[0].env.start == 9
    assert envs.make(Countdown(), N).spec.id.endswith("test_gymnax:Countdown")


class Unset(Countdown):
    """A Countdown without parameters."""

    default_params = None

    def is_truncated(self, state, params):
        return state["time"] >= 3


class Late:
    """An environment whose instances set default_params."""

    def __init__(self, limit: int = 3):
        self.start, self.strange, self.default_params = 5, "", Params(limit)

    action_space, observe = Countdown.action_space, Countdown.observe
    reset_env, step_env, is_truncated = Countdown.reset_env, Countdown.step_env, Countdown.is_truncated


@pytest.mark.parametrize("source", [Unset, Late])
def test_default_params_may_be_none_or_set_by_instance(source):
    """The time limit of 3 steps ends the episode before the countdown from 5."""
    by_name = f"{source.__module__}:{source.__name__}"
    for given in (source, by_name, source()):
        env = envs.make(given, N)
        assert env.spec.id == by_name
        steps = timesteps_of(env, jnp.zeros((6, N), jnp.int32))
        np.testing.assert_array_equal(steps.last[:, 0], [0, 0, 1, 0, 0, 0])


class Bursting(Countdown):
    """Its observation contains NaN, infinity and -3e38 when `left` is 0 or `also_at`."""

    def __init__(self, start: int = 5, also_at: int = -1):
        super().__init__(start)
        self.also_at = also_at

    def observe(self, state):
        left = jnp.float32(state["left"])
        wrong = (left == 0) | (left == self.also_at)
        return jnp.stack([left, *(jnp.where(wrong, x, 1.0) for x in (jnp.nan, jnp.inf, -3e38))])


def test_nonfinite_or_huge_observation_becomes_zero_only_when_terminated():
    actions = jnp.zeros((5, N), jnp.int32)
    env = envs.make(Bursting(5, 2), N)
    steps = timesteps_of(env, actions)
    np.testing.assert_array_equal(steps.last[:, 0], [0, 0, 0, 0, 1])
    wrong, right = np.float32([2, np.nan, np.inf, -3e38]), [[4, 1, 1, 1], [3, 1, 1, 1]]
    np.testing.assert_array_equal(steps.obs[:, 0], [*right, wrong, [1, 1, 1, 1], [0, 0, 0, 0]])
    out_of_time = timesteps_of(envs.make(Bursting(5, 2), N, limit=3), actions)
    assert out_of_time.last[2].all() and out_of_time.discount[2].all()
    np.testing.assert_array_equal(out_of_time.obs[2, 0], wrong)  # its value is used, so it is not replaced


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_losses_stay_finite_when_terminal_observations_are_not(algo, tmp_path):
    options = {
        "ppo": {"rollout_length": 16, "activation": "relu"},  # unlike tanh, it does not bound huge inputs
        "dqn": {"learning_starts": 64, "replay": {"size": 256}, "batch_size": 16},
    }[algo]
    run = jaxrl_fast.fit(
        algo=algo, env=Bursting, num_envs=4, total_steps=640, eval_every=0, hidden_sizes=[8],
        run_dir=str(tmp_path / "run"), loggers=(), log_level="quiet", **options,
    )  # fmt: skip
    loss = "value_loss" if algo == "ppo" else "td_loss"
    losses = [record[loss] for record in run.metrics if record[loss] is not None]
    assert losses and np.isfinite(losses).all() and run.summary["status"] == "done"


def test_module_id_is_imported_from_current_directory(tmp_path, monkeypatch):
    imports = "import jax.numpy as jnp\nimport numpy as np\nfrom typing import NamedTuple\n"
    imports += "from gymnax.environments import spaces\n\n"
    (tmp_path / "my_own_envs.py").write_text(imports + inspect.getsource(Params) + inspect.getsource(Countdown))
    (tmp_path / "my_broken_envs.py").write_text("import no_such_thing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    env = envs.make("my_own_envs:Countdown", N, start=3, limit=50)
    assert env.spec.id == "my_own_envs:Countdown"
    steps = timesteps_of(env, jnp.zeros((9, N), jnp.int32))
    np.testing.assert_array_equal(steps.last[:, 0], [0, 0, 1, 0, 0, 0, 1, 0, 0])
    with pytest.raises(ValueError, match=r"failed with ModuleNotFoundError: .* \(my_broken_envs.py:1, in <module>\)$"):
        envs.make("my_broken_envs:Anything", N)


@pytest.mark.parametrize("env", [None, 5, True, ["CartPole-v1"], {"a": 1}])
def test_make_rejects_argument_that_is_neither_id_nor_environment(env):
    with pytest.raises(ValueError, match=f"^env: must be an id, .*, got {re.escape(repr(env))}$"):
        envs.make(env, N)


def test_import_of_envs_does_not_import_backends():
    code = "import sys, jaxrl_fast.envs; sys.exit(any(name in sys.modules for name in ('gymnax', 'envpool')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
