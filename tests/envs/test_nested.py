"""Actions of several parts: what reaches an environment is in its space, and agents can learn every part."""

import gymnasium
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnax.environments import spaces as gymnax_spaces

import jaxrl_fast
from jaxrl_fast import envs
from jaxrl_fast.envs import nested
from jaxrl_fast.envs.gymnasium import masks
from jaxrl_fast.envs.gymnasium import spaces as our_spaces
from jaxrl_fast.envs.spaces import split_action, to_env_action
from jaxrl_fast.envs.wrappers import previous
from jaxrl_fast.training import random_steps
from jaxrl_fast.types import Box, Discrete, EnvSpec, MultiDiscrete
from jaxrl_fast.types.spaces import Hybrid, mask_size
from tests.helpers import slow

WHOLE = np.int8, np.uint8, np.int32, np.int64
FLOATS = np.float16, np.float32, np.float64


@st.composite
def boxes(draw, dtypes):
    shape, dtype = draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)), draw(st.sampled_from(dtypes))
    low = draw(hnp.arrays(dtype, shape, elements=st.integers(0, 100) if dtype in WHOLE else st.integers(-100, 100)))
    offset = 0 if dtype in WHOLE else dtype(draw(st.sampled_from([0, 0.1])))
    least = 0 if offset == 0 else 1  # no float32 is in the Box from 0.1 to 0.1 of float64
    high = low + draw(hnp.arrays(dtype, shape, elements=st.integers(least, 9)))
    return spaces.Box(low + offset, high + offset, shape, dtype)


leaf_spaces = st.one_of(
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)),
    st.builds(
        lambda n, s: spaces.MultiDiscrete(n, start=[s] * len(n)),
        st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(-2, 2),
    ),
    st.builds(lambda n: spaces.MultiBinary(n), st.one_of(st.integers(1, 3), st.just((2, 2)))),
    boxes(WHOLE),
    boxes(FLOATS),
)  # fmt: skip
nested_spaces = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=5,
).filter(lambda space: isinstance(space, spaces.Dict | spaces.Tuple))


@pytest.mark.parametrize("num", [8, slow(80)])
def test_environment_gets_what_its_space_contains(num):
    """For any action of an agent, in the environment's process and from a loaded policy; entries keep their places."""
    anything = hypothesis.given(nested_spaces, st.integers(0, 2**32 - 1), st.sampled_from([1.0, 50.0, np.nan, np.inf]))
    hypothesis.settings(max_examples=num, deadline=None)(anything(check_contains))()


def check_contains(space, seed, scale):
    action, start, bounds, tree = our_spaces.action_space("test", space)
    assert start == 0
    spec = EnvSpec("test", None, action, 8)
    rng = np.random.default_rng(seed)
    given = rng.normal(size=(8, *action.shape)).astype(np.float32) * np.float32(scale)
    is_whole = isinstance(action, MultiDiscrete)
    given = rng.integers(-2, 7, given.shape).astype(np.int32) if is_whole else given
    flat = np.asarray(to_env_action(spec, bounds, jnp.asarray(given)))
    for row in flat:
        assert space.contains(nested.split(tree, row)), (space, row)
    of_policy = jax.device_get(split_action(tree, jnp.asarray(flat)))
    for i in range(8):
        one = jax.tree.map(lambda x, i=i: np.asarray(x[i]), of_policy)
        assert space.contains(one), (space, one)
    assert space.contains(masks.sample(space, None))
    spread = np.concatenate([np.ravel(x) for x in jax.tree.leaves(nested.split(tree, flat[0]))])
    assert len(spread) == action.shape[0]


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(nested_spaces, st.integers(0, 2**32 - 1))
def test_options_count_from_smallest_choice_and_bounds_are_reached(space, seed):
    """The oracle reads the spaces themselves, in the order of sorted keys."""
    action, _, bounds, tree = our_spaces.action_space("test", space)
    found = list(leaves_of(space))
    discrete = [part for part in found if not is_numbers(part)]
    nums = [num for part in discrete for num in nums_of(part)]
    size = sum(int(np.prod(part.shape)) for part in found if is_numbers(part))
    expected = Hybrid(tuple(nums), size) if nums and size else MultiDiscrete(tuple(nums)) if nums else Box((size,))
    assert action == expected and mask_size(action) == sum(nums)
    for end, name in ((-1.0, "low"), (1.0, "high")):
        choice = np.array([0 if end < 0 else num - 1 for num in nums])
        flat = np.concatenate([choice, np.full(size, end)])
        given = jnp.asarray(flat[None], jnp.int32 if isinstance(action, MultiDiscrete) else jnp.float32)
        row = np.asarray(to_env_action(EnvSpec("test", None, action, 1), bounds, given))[0]
        for part, value in zip(found, jax.tree.leaves(nested.split(tree, row)), strict=True):
            np.testing.assert_allclose(value, end_of(part, name), rtol=1e-3)


def leaves_of(space):
    if isinstance(space, spaces.Dict):
        for name in sorted(space.spaces):
            yield from leaves_of(space[name])
    elif isinstance(space, spaces.Tuple):
        for part in space.spaces:
            yield from leaves_of(part)
    else:
        yield space


def is_numbers(space):
    return isinstance(space, spaces.Box) and space.dtype.kind == "f"


def nums_of(space):
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.reshape(-1).tolist()
    return (space.high.astype(int) - space.low.astype(int) + 1).reshape(-1).tolist()


def end_of(space, name):
    if isinstance(space, spaces.Box):
        return getattr(space, name)
    start = getattr(space, "start", 0)
    return start if name == "low" else start + np.reshape(nums_of(space), space.shape) - 1


def test_mask_of_nested_parts_is_read_in_order_of_sorted_keys():
    mask = {"b": None, "c": (np.array([1, 0]), None), "a": np.array([0, 1, 1])}
    np.testing.assert_array_equal(masks.flat(mask), [0, 1, 1, 1, 0])


def test_random_actions_obey_mask():
    space = spaces.Dict(a=spaces.Discrete(3, start=5), b=spaces.Box(-2.0, 2.0, (2,)), c=spaces.MultiBinary(2))
    mask = {"a": np.array([0, 1, 1]), "b": None, "c": (np.array([1, 0]), np.array([1, 1]))}
    space.seed(0)
    found = [masks.sample(space, mask) for _ in range(50)]
    assert {int(x["a"]) for x in found} == {6, 7} and {int(x["c"][0]) for x in found} == {0}
    assert {int(x["c"][1]) for x in found} == {0, 1} and np.ptp([x["b"] for x in found]) > 2
    spec = EnvSpec("test", None, Hybrid((3, 2, 2), 2), 400)
    noise = jax.random.uniform(jax.random.key(0), (400, 9))
    allowed = jnp.broadcast_to(jnp.array([False, True, True, True, False, True, True]), (400, 7))
    ours = np.asarray(random_steps._random_action(spec, noise, allowed))
    assert set(ours[:, 0]) == {1, 2} and set(ours[:, 1]) == {0} and set(ours[:, 2]) == {0, 1}
    assert ours[:, 3:].min() < -0.9 and ours[:, 3:].max() > 0.9


def test_previous_action_is_one_hot_for_choices_and_clipped_for_numbers():
    found = previous.encode_action(Hybrid((2, 3), 2), jnp.float32([[1, 2, 0.5, -7]]))
    np.testing.assert_array_equal(found, [[0, 1, 0, 0, 1, 0.5, -1]])


# Environments


class Tune(gymnasium.Env):
    """A step pays 1 for the right choice of three, less 4 (x - 0.5 s)^2 for a number, where s is 1 or -1.

    The observation is (choice one-hot, s). The best return of an episode of 4 steps is 4. A wrong choice pays 0.
    """

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Dict(
        pick=spaces.Discrete(3, start=2), amount=spaces.Box(-2.0, 2.0, (1,), np.float64), flags=spaces.MultiBinary(1)
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def observe(self):
        self.right, self.sign = int(self.np_random.integers(3)), int(self.np_random.choice([-1, 1]))
        obs = np.zeros(4, np.float32)
        obs[self.right], obs[3] = 1, self.sign
        return obs, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        reward = float(action["pick"] - 2 == self.right) - 4 * (action["amount"][0] / 2 - 0.5 * self.sign) ** 2
        obs, info = self.observe()
        return obs, float(reward), False, self.t == 4, info


class MaskedTune(Tune):
    """The right choice alone is allowed, and flags must be 0. Others are an error."""

    def observe(self):
        obs, _ = super().observe()
        self.mask = {"pick": np.arange(3) == self.right, "amount": None, "flags": (np.array([True, False]),)}
        return obs, {"action_mask": self.mask}

    def step(self, action):
        assert self.mask["pick"][action["pick"] - 2] and not action["flags"][0], (action, self.mask)
        return super().step(action)


class Both:
    """A device environment: one step pays 1 for choice 1, else -1, less (x - 0.5)^2 for the first number."""

    default_params = ()

    def reset_env(self, key, params):
        return jnp.ones(1), jnp.int32(0)

    def step_env(self, key, state, action, params):
        assert action["move"].dtype == jnp.int32 and action["how"][0].shape == (2,) and action["how"][1].shape == (2,)
        pays = jnp.where(action["move"] == 1, 1.0, -1.0) - (action["how"][0][0] - 0.5) ** 2
        pays += jnp.where(action["how"][1][1] == 12, 0.0, -1.0)
        return jnp.ones(1), state, pays, jnp.bool_(True), {}

    def is_truncated(self, state, params):
        return jnp.bool_(False)

    def action_space(self, params):
        inner = gymnax_spaces.Tuple([gymnax_spaces.Box(-1.0, 1.0, (2,)), gymnax_spaces.Box(10, 12, (2,), jnp.int32)])
        return gymnax_spaces.Dict({"move": gymnax_spaces.Discrete(3), "how": inner})

    def observation_space(self, params):
        return gymnax_spaces.Box(0, 1, (1,))


PPO = dict(
    num_envs=16, rollout_length=16, num_minibatches=2, learning_rate=3e-3, hidden_sizes=(32,), loggers=(), seed=1,
    log_level="quiet", eval_episodes=64, gamma=0.9,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["gaussian", "tanh", "state_dependent"])
def test_ppo_learns_both_parts_of_device_environment(policy, tmp_path):
    """The optimum is 1. The best of choices with a number that does not depend on the reward is at most 0.75."""
    run = jaxrl_fast.fit(algo="ppo", env=Both, total_steps=40_000, policy=policy, run_dir=str(tmp_path / "run"), **PPO)
    assert run.evaluate(episodes=64)["seeds"][0]["eval_return_mean"] > 0.97
    action = jaxrl_fast.load(run.folder, env=Both()).policy(np.ones(1, np.float32))
    assert int(action["move"]) == 1 and int(action["how"][1][1]) == 12 and action["how"][1].dtype == np.int32
    np.testing.assert_allclose(action["how"][0][0], 0.5, atol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("env", [Tune, MaskedTune])
def test_ppo_learns_both_parts_of_gymnasium_environment(env, workers, tmp_path):
    """The optimum is 4. Without masks, the right choice alone with amount 0 returns 0, and a random one with it 1.3."""
    options = dict(num_envs=8, rollout_length=32, workers=workers)
    run = jaxrl_fast.fit(algo="ppo", env=env, total_steps=60_000, run_dir=str(tmp_path / "run"), **PPO | options)
    assert run.evaluate(episodes=64)["seeds"][0]["eval_return_mean"] > 3.5
    policy = jaxrl_fast.load(run.folder, env=env).policy
    mask = (
        {"mask": {"pick": [False, True, False], "amount": None, "flags": ([True, False],)}} if env is MaskedTune else {}
    )
    action = jax.device_get(policy(np.float32([0, 1, 0, -1]), **mask))
    assert env.action_space.contains(action) and action["pick"] == 3
    np.testing.assert_allclose(action["amount"], [-1], atol=0.3)


class Store(gymnasium.Env):
    """An order of 0 to 2 of two goods: the best is (2, 1), which pays 3."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Box(0, 2, (2,), np.int8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def order(self, action):
        assert self.action_space.contains(action), action
        return action

    def step(self, action):
        first, second = (int(x) for x in self.order(action))
        return np.ones(1, np.float32), float(first + (second == 1)), True, False, {}


class Team(Store):
    """The same with an action for each of two players, as in multi-agent packages."""

    action_space = spaces.Tuple([spaces.Discrete(3), spaces.Dict(x=spaces.Discrete(3))])

    def order(self, action):
        assert self.action_space.contains(action), action
        return action[0], action[1]["x"]


@pytest.mark.slow
@pytest.mark.parametrize("env", [Store, Team])
@pytest.mark.parametrize("algo", ["ppo", "dqn", "pqn", "sac"])
def test_discrete_algorithms_learn_whole_numbers_and_containers(env, algo, tmp_path):
    options = dict(PPO, workers=0, total_steps=8_000, num_envs=8)
    options |= dict(learning_rate=1e-2) if algo == "pqn" else {}
    if algo in ("dqn", "sac"):
        options = {k: v for k, v in options.items() if k not in ("rollout_length", "num_minibatches")}
        options |= dict(learning_starts=200, replay_ratio=0.25, batch_size=32, replay=dict(size=4000))
    options |= dict(critic_learning_rate=3e-3, target_entropy_share=0.3) if algo == "sac" else {}
    options = {k: v for k, v in options.items() if algo != "pqn" or k != "num_minibatches"}
    run = jaxrl_fast.fit(algo=algo, env=env, run_dir=str(tmp_path / "run"), **options)
    assert run.evaluate(episodes=8)["seeds"][0]["eval_return_mean"] == 3.0


# Rejected spaces


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), "its parts must be Disc.*, in Dict and Tuple, got Text$"),
        (spaces.Dict(a=spaces.Box(0, np.inf, (1,))), "its bounds must be finite, because"),
        (spaces.Box(0, 65535, (1,), np.int32), r"a Box of whole numbers may have 4,096 options .*, got 65,536; de"),
        (spaces.Dict(a=spaces.Box(-(2**40), 2 - 2**40, (1,), np.int64)), "a Box of whole numbers may have"),
        (spaces.Dict({}), "it must have at least one part$"),
        (spaces.Dict({1: spaces.Discrete(2), "a": spaces.Discrete(2)}), "the keys of a Dict must be of one type"),
    ],
)  # fmt: skip
def test_other_action_spaces_are_refused_in_one_line(space, words):
    with pytest.raises(ValueError, match=rf"^test: unsupported action space, got .*; {words}") as refusal:
        our_spaces.action_space("test", space)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("algo", "others"), [("dqn", "ppo"), ("pqn", "ppo"), ("sac", "ppo"), ("td3", "ppo")])
def test_other_algorithms_refuse_hybrid_actions_in_one_line(algo, others):
    from jaxrl_fast import agents
    from jaxrl_fast.options import ALGORITHMS

    spec = envs.make(Both, 4).spec
    assert spec.action == Hybrid((3, 3, 3), 2)
    with pytest.raises(ValueError, match=rf"^{algo}: requires .*, got Hybrid.*; try {others}$"):
        agents.load(algo).make(ALGORITHMS[algo](), spec, 10)


def test_device_environment_with_one_part_keeps_its_kind():
    class Numbers(Both):
        def action_space(self, params):
            return gymnax_spaces.Box(10, 12, (2,), jnp.int32)

        def step_env(self, key, state, action, params):
            return jnp.ones(1), state, 1.0 * action.sum(), jnp.bool_(True), {}

    env = envs.make(Numbers, 2)
    assert env.spec.action == MultiDiscrete((3, 3)) and Discrete(3) != env.spec.action
    state, _ = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(env.step(state, jnp.int32([[0, 1], [2, 2]]))[1].reward, [21, 24])
