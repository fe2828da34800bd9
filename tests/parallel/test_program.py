"""Test parallel.program: the placement of shards and seeds on devices does not change results."""

from functools import cache, partial
from operator import itemgetter

import jax
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.agents import ppo
from jaxrl_fast.config import load
from jaxrl_fast.options.declare import configure
from jaxrl_fast.parallel import program
from jaxrl_fast.parallel.placement import SHARDS, Placement
from jaxrl_fast.training import evaluator, plan
from jaxrl_fast.types import Parallelism
from tests.helpers import probes, slow

NUM_UPDATES = 3


@cache
def build(num_seeds, num_shards, num_envs=16, sequential_seeds=False):
    env = probes.best_action_of_observation(num_envs // num_shards)
    if num_shards > 1:
        env = env._replace(parallelism=Parallelism(SHARDS, num_shards))
    config = configure(
        ppo.Config, rollout_length=8, hidden_sizes=(8,), normalize_observations=True, rewards="normalized"
    )
    agent = ppo.make(config, env.spec, NUM_UPDATES, env.parallelism)
    return program.build(env, agent, NUM_UPDATES, Placement(num_seeds, num_shards, sequential_seeds))


def run(built, seeds):
    state, metrics = built.chunk(built.init(np.int32(seeds)), np.int32(NUM_UPDATES))
    ours = lambda x: x[: len(seeds)] if np.ndim(seeds) else x
    return jax.device_get((built.learner(state).params, jax.tree.map(ours, metrics)))


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5), a, b)


@pytest.mark.slow
def test_shards_on_two_devices_equal_shards_on_one_device(monkeypatch):
    """Compare two shards on two devices with the same two under vmap on one device."""
    spread = run(build(1, 2), 5)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    close(spread, run(build.__wrapped__(1, 2), 5))


@pytest.mark.parametrize("num_shards", [slow(1), 2])
@pytest.mark.parametrize(("num_seeds", "sequential_seeds"), [(5, False), (8, True)])
@pytest.mark.slow
def test_seeds_of_batch_equal_single_runs(num_shards, num_seeds, sequential_seeds):
    """Compare one or more seeds per device, in parallel or sequentially, with runs of one seed."""
    batch = run(build(num_seeds, num_shards, sequential_seeds=sequential_seeds), [*range(3, 3 + num_seeds)])
    for i in range(num_seeds):
        close(jax.tree.map(itemgetter(i), batch), run(build(1, num_shards), 3 + i))


@pytest.mark.slow
def test_default_prng_impl_does_not_change_initial_state():
    """With rbg keys, vmap would reset all environments equally, and batched seeds would differ from single runs."""
    env = envs.make("CartPole-v1", 16)
    agent = ppo.make(configure(ppo.Config, rollout_length=8, hidden_sizes=(8,)), env.spec, NUM_UPDATES)

    def begin():
        return jax.jit(jax.vmap(partial(program.begin, env, lambda _: agent), (0, None)))(np.arange(3), {})

    expected = begin()
    with jax.default_prng_impl("rbg"):
        found = begin()
        evaluated = jax.random.key_impl(evaluator.keys_of(0, 0))
    assert evaluated == jax.random.key_impl(jax.random.key(0, impl="threefry2x32"))
    np.testing.assert_array_equal(jax.random.key_data(found.key), jax.random.key_data(expected.key))
    obs = found.actors.timestep.obs
    np.testing.assert_array_equal(obs, expected.actors.timestep.obs)
    assert len(np.unique(obs.reshape(-1, 4), axis=0)) == 3 * 16


@pytest.mark.slow
@pytest.mark.parametrize(("num_seeds", "num_shards"), [(1, 2), (3, 1)])
def test_empty_arrays_in_env_state_do_not_change_training(num_seeds, num_shards):
    """The state of a custom environment has an array without elements, which stays in the train state."""
    env = probes.best_action_of_observation(4)
    if num_shards > 1:
        env = env._replace(parallelism=Parallelism(SHARDS, num_shards))
    agent = ppo.make(configure(ppo.Config, rollout_length=8, hidden_sizes=(8,)), env.spec, NUM_UPDATES, env.parallelism)

    def reset(key):
        state, timestep = env.reset(key)
        return (state, jax.numpy.zeros((4, 0, 2))), timestep

    def step(state, action):
        after, timestep = env.step(state[0], action)
        return (after, state[1] + 1), timestep

    def trained(env):
        built = program.build(env, agent, NUM_UPDATES, Placement(num_seeds, num_shards))
        seeds = np.arange(num_seeds, dtype=np.int32) if num_seeds > 1 else np.int32(0)
        return built.chunk(built.init(seeds), np.int32(NUM_UPDATES))[0]

    found, expected = trained(env._replace(reset=reset, step=step)), trained(env)
    assert any(x.size == 0 for x in jax.tree.leaves(found.actors))
    jax.tree.map(np.testing.assert_array_equal, found.agent.params, expected.agent.params)


@pytest.mark.parametrize(
    ("line", "sequential_seeds"),
    [
        ("ppo --env CartPole-v1 --num-envs 8", False),  # 256 rows in a gradient step
        ("ppo --env CartPole-v1 --num-envs 16", True),
        ("ppo --env Breakout-MinAtar --num-envs 2", True),  # 64 boards
        ("pqn --env Breakout-MinAtar --num-envs 8 --rollout-length 32 --num-minibatches 8", False),
        ("dqn --env CartPole-v1 --num-envs 64 --batch-size 1024", False),  # never, because of its replay buffer
    ],
)
def test_seeds_run_sequentially_when_gradient_steps_are_large(line, sequential_seeds):
    settings = load.from_command_line([*line.split(), "--num-seeds", "2"])
    assert plan.validate_plan(settings).placement.sequential_seeds == sequential_seeds


@pytest.mark.parametrize(("num_seeds", "num_shards", "sequential_seeds", "used", "trained"), [
    (1, 1, False, 1, 1), (1, 4, False, 4, 1),
    (3, 1, False, 3, 3), (5, 1, False, 3, 6), (6, 1, True, 3, 6), (7, 1, True, 4, 8), (8, 2, False, 4, 8),
    (5, 2, True, 4, 6), (6, 2, True, 4, 6), (5, 4, True, 4, 5), (2, 8, True, 2, 2),
])  # fmt: skip
def test_placement_has_expected_devices_and_padded_seeds(num_seeds, num_shards, sequential_seeds, used, trained):
    """Use four devices in the minimum number of rounds. The shards of a sequential seed are on different devices."""
    placement = Placement(num_seeds, num_shards, sequential_seeds)
    assert placement.num_padded_seeds == trained
    spread = program.partitioned(probes.constant_reward(4), lambda _: None, 1, placement)
    assert spread.state.num_devices == placement.num_devices == used


def test_seeds_never_run_sequentially_on_gpu(monkeypatch):
    settings = load.from_command_line(["ppo", "--env", "CartPole-v1", "--num-envs", "64", "--num-seeds", "2"])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not plan.validate_plan(settings).placement.sequential_seeds


@pytest.mark.slow
def test_sequential_seeds_on_one_device_equal_those_on_four(monkeypatch):
    """Compare three seeds of two shards each, on two pairs of devices and all on a single device."""
    spread = run(build(3, 2, sequential_seeds=True), [5, 6, 7])
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    close(spread, run(build.__wrapped__(3, 2, sequential_seeds=True), [5, 6, 7]))


@pytest.mark.slow
def test_sequential_seeds_need_temporary_memory_of_one_seed():
    """In addition to the state, a device needs the memory of one seed, not of four."""
    sequential_seeds, together = (
        build.__wrapped__(16, 1, 256, sequential_seeds=sequential_seeds) for sequential_seeds in (True, False)
    )
    states = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(sequential_seeds.state_spec)) // 4
    assert sequential_seeds.memory - states < 0.5 * (together.memory - states)


@pytest.mark.slow
def test_metrics_count_rows_of_all_shards():
    """Valid rows are those of all shards: 16 environments, 8 steps, minus the reset rows (every second one)."""
    _, metrics = run(build(1, 2), 0)
    np.testing.assert_array_equal(metrics["valid_steps"], 16 * 4)
    np.testing.assert_array_equal(metrics["episodes"], 16 * 4)


@pytest.mark.slow
def test_shards_have_different_episodes_and_equal_parameters():
    state = build(1, 4).init(np.int32(0))
    obs = np.asarray(state.actors.timestep.obs).reshape(4, -1)
    assert len(np.unique(obs, axis=0)) > 1
    params = jax.tree.leaves(state.agent.params)
    for leaf in map(np.asarray, params):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
