"""agents: options and metrics that several algorithms share."""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_fast import agents, loop, networks, replay
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.types import Parallelism
from tests.helpers import probes, slow
from tests.helpers.agents import BOXES, CONTINUOUS, LITTLE, SHORT
from tests.helpers.trees import equations, same_bits

NUM_ENVS, NUM_UPDATES = 4, 6
EPSILON = dict(explore=dict(start=1.0, end=0.1, steps=100, apex_alpha=3.0))
SMALL = {"ppo": SHORT, "pqn": SHORT | EPSILON, "dqn": LITTLE | EPSILON} | dict.fromkeys(CONTINUOUS, LITTLE)
SMALL |= {"reppo": SHORT | {"critic_width": 4}}
each_algorithm = pytest.mark.parametrize("algo", SMALL)


def agent_of(algo, env, **options):
    config = configure(ALGORITHMS[algo], **SMALL[algo] | options)
    return agents.load(algo).make(config, env.spec, NUM_UPDATES, env.parallelism)


def env_of(algo):
    return probes.continuous_action(NUM_ENVS) if algo in BOXES else probes.best_action(NUM_ENVS)


def context_of(algo, **options):
    return agent_of(algo, env_of(algo), **options).explore.args[0]


def test_all_algorithms_are_covered():
    assert SMALL.keys() == ALGORITHMS.keys()


# Options


class Scaled(nn.Module):
    """The observation times a parameter."""

    initial: float = 1.0

    @nn.compact
    def __call__(self, obs):
        return obs * self.param("factor", nn.initializers.constant(self.initial), ())


@each_algorithm
def test_network_options_reach_network(algo):
    env = env_of(algo)
    agent = agent_of(algo, env, network=dict(kind=f"{__name__}:Scaled", options={"initial": 3.0}))
    state = jax.jit(agent.init)(jax.random.key(0))
    factors = [leaf for path, leaf in jax.tree.leaves_with_path(state) if "factor" in jax.tree_util.keystr(path)]
    assert set(np.concatenate([np.ravel(x) for x in factors]).tolist()) == {3.0}


@pytest.mark.parametrize("rewards", ["sign", "raw"])
@each_algorithm
@pytest.mark.slow
def test_rewards_sign_replaces_rewards_by_their_signs(algo, rewards):
    """With signs, rewards scaled by 7 and by 1/2 give bit-identical state and metrics; without them they do not."""
    env = env_of(algo)
    agent = agent_of(algo, env, rewards=rewards)
    state = jax.jit(agent.init)(jax.random.key(0))
    experience = probes.experience(env, agent, state)
    steps = experience.steps._replace(reward=jnp.sign(experience.steps.reward))
    assert set(np.unique(steps.reward)) == {-1, 0, 1}

    def learn(scale):
        scaled = experience._replace(steps=steps._replace(reward=scale * steps.reward))
        return agent.update(state, scaled, jax.random.key(1))

    learned = jax.jit(partial(jax.lax.map, learn))(jnp.float32([1, 7, 0.5]))
    one, seven, half = (jax.tree.map(lambda x, i=i: x[i], learned) for i in range(3))
    assert same_bits(one, seven) == same_bits(one, half) == (rewards == "sign")


@pytest.mark.parametrize(
    ("algo", "max_grad_norm", "clipped"), [("ppo", 0.0, [3, 4]), *((algo, 0.5, [0.3, 0.4]) for algo in SMALL)]
)
def test_max_grad_norm_clips_global_norm(algo, max_grad_norm, clipped):
    """The bound is not per element, and 0 disables it. The optimizer's first moment is 0.1 of the gradient."""
    optimizer = context_of(algo, max_grad_norm=max_grad_norm).optimizer
    optimizer = optimizer.critic if algo in CONTINUOUS else optimizer
    tree = {"a": jnp.float32([3.0]), "b": jnp.float32([4.0])}
    _, state = optimizer.update(tree, optimizer.init(tree), tree)
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "mu"), 0.1 * np.array(clipped), rtol=1e-5)


@pytest.mark.parametrize(("algo", "kind"), [("ppo", "radam"), *((algo, "adam") for algo in SMALL)])
def test_optimizer_is_that_of_optax(algo, kind):
    """RAdam has its own second moment from the sixth step on."""
    options = dict(optimizer=dict(kind=kind, epsilon=0.3, beta1=0.8, max_grad_norm=0.0), schedule="constant")
    found = context_of(algo, learning_rate=0.01, **options).optimizer
    found = found.actor if algo in CONTINUOUS else found
    wanted, params = getattr(optax, kind)(0.01, b1=0.8, eps=0.3), jnp.zeros(3)
    states = found.init(params), wanted.init(params)
    for gradient in np.random.default_rng(0).normal(size=(8, 3)):
        (update, state), (expected, other) = (
            rule.update(jnp.float32(gradient), state, params)
            for rule, state in zip((found, wanted), states, strict=True)
        )
        states = state, other
        np.testing.assert_allclose(update, expected, rtol=1e-5)


@pytest.mark.parametrize("algo", ["dqn", *CONTINUOUS])
def test_alpha_is_exponent_of_priorities(algo):
    buffer = context_of(algo, replay=dict(kind="prioritized", size=64, alpha=0.25)).replay
    index = replay.Index(jnp.int32([3]), jnp.array([True]))
    after = buffer.update_priorities(buffer.init(), index, jnp.float32([16.0]))
    np.testing.assert_allclose(after.priorities.levels[0][3], 16.0**0.25, rtol=1e-5)


NETWORKS = [  # each option differs between the two, and from the default in one of them
    dict(kind="mlp", hidden=(7, 5), activation="relu", dtype="bfloat16", layer_norm=True, dueling=True, noisy=True),
    dict(kind="impala", hidden=(6,), activation="tanh", dtype="float32", layer_norm=False, dueling=False, noisy=False),
]
LEARNED = {"ppo": lambda s: s.params["network"], "pqn": lambda s: s.params, "dqn": lambda s: s.learner.params}
LEARNED |= dict.fromkeys(CONTINUOUS, lambda s: s.learner.params.actor)
LEARNED |= {"reppo": lambda s: s.params.actor["network"]}
NOT_OF = {algo: set() if algo == "dqn" else {"dueling", "noisy"} for algo in SMALL}
SAID = {"kind": "network", "hidden": "hidden_sizes", "dtype": "compute_dtype"}  # named differently in a Config


@pytest.mark.slow
@pytest.mark.parametrize("options", NETWORKS, ids=["mlp", "impala"])
@each_algorithm
def test_network_config_options_reach_network(algo, options):
    """The oracle is a network made directly from the options: equal parameter names, shapes and traced operations."""
    env, options = env_of(algo), {k: v for k, v in options.items() if k not in NOT_OF[algo]}
    board = env._replace(spec=env.spec._replace(obs=jax.ShapeDtypeStruct((5, 5, 2), jnp.bool_)))
    agent = agent_of(algo, board, **{SAID.get(name, name): x for name, x in options.items()})
    make = networks.actor_critic if algo == "ppo" else networks.network
    num_outputs = board.spec.action.num_outputs * (2 if algo in ("sac", "reppo") else 1)
    wanted = make(board.spec.obs, num_outputs, networks.Options(**options | dict(dtype=jnp.dtype(options["dtype"]))))
    params = jax.eval_shape(wanted.init, jax.random.key(0))
    assert LEARNED[algo](jax.eval_shape(agent.init, jax.random.key(0))) == params

    def computed(network):
        apply = network.both if algo == "ppo" else network.apply
        found = equations(jax.make_jaxpr(apply)(params, board.spec.obs))
        return [(e.primitive.name, *(x.aval for x in e.outvars)) for e in found]

    context = agent.explore.args[0]
    network = context.policy.network if algo == "ppo" else context.actor if algo in BOXES else context.network
    assert computed(network) == computed(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_algorithm
def test_compute_dtype_sets_product_dtype_and_state_stays_float32(algo, dtype):
    """Heads compute in float32 for both options."""
    env, key = env_of(algo), jax.random.key(0)
    agent = agent_of(algo, env, compute_dtype=dtype)
    state = jax.eval_shape(agent.init, key)
    rollout = jax.eval_shape(partial(probes.experience, env, agent), state)
    update, (after, metrics) = jax.make_jaxpr(agent.update, return_shape=True)(state, rollout, key)
    products = [e for e in equations(update) if e.primitive.name in ("dot_general", "ffi_call")]
    assert {x.aval.dtype.name for e in products for x in e.invars} == {"float32", dtype}
    kept = {x.dtype.name for x in jax.tree.leaves((after, metrics)) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert kept == {"float32"}


# Metrics


@cache
def metrics_of_run(algo, num_shards=1):
    """Metrics [NUM_UPDATES] of a training run with NUM_ENVS environments on each of `num_shards` shards."""
    env = env_of(algo)
    if num_shards > 1:
        env = env._replace(parallelism=Parallelism("shards", num_shards))
    agent = agent_of(algo, env, schedule="linear", learning_rate=0.01)
    run = lambda key: loop.train(env, agent, loop.init(env, agent, key), NUM_UPDATES)[1]
    if num_shards == 1:
        return jax.device_get(jax.jit(run)(jax.random.key(0)))
    spread = jax.vmap(run, in_axes=None, axis_size=num_shards, axis_name="shards")
    metrics = jax.device_get(jax.jit(spread)(jax.random.key(0)))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[1]), metrics)
    return {name: x[0] for name, x in metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize("algo", [slow(algo) if algo in CONTINUOUS else algo for algo in SMALL])
def test_annealed_learning_rate_is_linear_in_gradient_steps(algo):
    metrics = metrics_of_run(algo)
    taken = np.cumsum(metrics.get("gradient_steps", [4] * NUM_UPDATES))  # 2 epochs of 2 minibatches
    from_replay = "gradient_steps" in metrics
    assert taken[-1] == ((NUM_UPDATES * 4 * NUM_ENVS - 8) // 4 if from_replay else 4 * NUM_UPDATES)
    np.testing.assert_allclose(metrics["learning_rate"], 0.01 * (1 - taken / taken[-1]), rtol=1e-5, atol=1e-9)


@each_algorithm
def test_learning_rate_is_constant_without_annealing(algo):
    learning_rate = context_of(algo, schedule="constant", learning_rate=0.01).learning_rate
    learning_rate = learning_rate.actor if algo in CONTINUOUS else learning_rate
    np.testing.assert_allclose([learning_rate(taken) for taken in (0, 1, 10, 10**6)], 0.01, rtol=1e-6)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("algo", ["dqn", "pqn"])
@pytest.mark.slow
def test_epsilon_metric_is_mean_over_all_environments(algo, num_shards):
    """Epsilon falls from 1 to .1 over 100 environment steps; each environment takes a power of it from 1 to 4."""
    num_envs = num_shards * NUM_ENVS
    env_steps = 4 * num_envs * np.arange(1, NUM_UPDATES + 1)
    now = 1 - 0.9 * np.minimum(env_steps / 100, 1)
    expected = (now[:, None] ** np.linspace(1, 4, num_envs)).mean(1)
    np.testing.assert_allclose(metrics_of_run(algo, num_shards)["epsilon"], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, slow(2)])
def test_replay_size_metric_counts_all_shards(num_shards):
    """Each shard adds 16 steps per update, until the buffer holds 64 steps over all shards."""
    expected = np.minimum(16 * num_shards * np.arange(1, NUM_UPDATES + 1), 64)
    np.testing.assert_array_equal(metrics_of_run("dqn", num_shards)["replay_size"], expected)


@pytest.mark.parametrize("algo", ["ppo", "pqn"])
def test_rollouts_of_on_policy_agents_store_newest_frame_of_stack(algo):
    """Observations are stacks of two frames of 3 numbers; those of other environments are stored whole."""
    env = env_of(algo)
    obs = jax.ShapeDtypeStruct((6,), jnp.float32)
    stacked = env._replace(spec=env.spec._replace(obs=obs, frame_stack=2))
    rows = jnp.arange(6.0 * NUM_ENVS).reshape(NUM_ENVS, 6)
    np.testing.assert_array_equal(agent_of(algo, stacked).learning.compress_obs(rows).newest, rows[:, 3:])
    assert agent_of(algo, env).learning.compress_obs(rows) is rows
