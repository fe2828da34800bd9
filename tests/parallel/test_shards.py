"""Test host environments in shards: the same steps as in one pool, on several devices or under vmap on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxrl_fast
from jaxrl_fast import agents, async_rollout, envs
from jaxrl_fast.config import load
from jaxrl_fast.envs.envpool import tasks
from jaxrl_fast.envs.host import pool as host_pool
from jaxrl_fast.envs.host import sharded
from jaxrl_fast.envs.host.config import HostEnvConfig, Shard
from jaxrl_fast.parallel import program
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training import build
from jaxrl_fast.types import Parallelism
from tests.helpers import slow
from tests.helpers.host_envs import AGENTS, SHORT, random_actions, run
from tests.helpers.runs import same, stop_after

SEED = (5, 0, 0)
AXIS = "shards"
NUM_SHARDS = 2


def sharded_env(name, num_envs, host_config, **options):
    """Return the environments of `name` with N / NUM_SHARDS of them in each shard."""
    make = lambda i: envs.make(
        name, num_envs // NUM_SHARDS, host_config._replace(shard=Shard(i, NUM_SHARDS)), **options
    )
    return sharded.join([make(i) for i in range(NUM_SHARDS)], AXIS)


def on_devices(function):
    """Map actions [T, N, ...] to steps [T, N, ...] with a shard on each of several devices."""
    devices = jax.devices()[:NUM_SHARDS]
    mesh = jax.make_mesh((NUM_SHARDS,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    spread = P(None, AXIS)
    return jax.shard_map(function, mesh=mesh, in_specs=spread, out_specs=(P(AXIS), spread), check_vma=False)


def side_by_side(function):
    """Do the same with all shards under vmap on one device."""

    def all_shards(actions):
        parts = jnp.stack(jnp.split(actions, NUM_SHARDS, axis=1))
        first, steps = jax.vmap(function, axis_name=AXIS)(parts)
        join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), first), jax.tree.map(join, steps)

    return all_shards


@pytest.mark.parametrize("path", ["ffi", "callback"])
@pytest.mark.parametrize("spread", [on_devices, slow(side_by_side)])
@pytest.mark.slow
def test_sharded_pools_return_same_steps_as_one_pool(spread, path):
    """The seed of an environment does not depend on its shard, and no shard steps the environments of another."""
    name, num_envs = "envpool/Breakout-v5", 4
    host_config = HostEnvConfig(SEED, "dqn2015", path)
    whole = envs.make(name, num_envs, host_config)
    env = sharded_env(name, num_envs, host_config)
    assert env.spec == whole.spec._replace(num_envs=2) and env.parallelism == Parallelism(AXIS, 2)
    actions = random_actions(whole.spec, 60)

    def program(actions):
        state, first = env.reset(jax.random.key(0))
        return first, jax.lax.scan(env.step, state, actions)[1]

    expected, got = run(whole, actions), jax.device_get(jax.jit(spread(program))(actions))
    jax.tree.map(np.testing.assert_array_equal, expected, got)
    assert len({frame.tobytes() for frame in np.asarray(expected[1].obs[-1])}) == num_envs, "equal environments"


@pytest.mark.parametrize("spread", [on_devices, side_by_side])
def test_async_pools_of_shards_return_same_steps_as_one_pool(spread):
    """Each shard sends to and receives from its two pools in turn. Compare with one pool of all environments."""
    name, host_config = "envpool/CartPole-v1", HostEnvConfig(SEED)
    whole, env = envs.make(name, 8, host_config), sharded_env(name, 8, host_config._replace(num_async_pools=2))
    actions = random_actions(whole.spec, 40)

    def program(actions):
        def step(state, action):
            for i, part in enumerate(jnp.split(action, env.pools.num)):
                state = env.pools.send(i, state, part)
            rows = []
            for i in range(env.pools.num):
                state, row = env.pools.receive(i, state)
                rows.append(row)
            return state, jax.tree.map(lambda *x: jnp.concatenate(x), *rows)

        state, first = env.reset(jax.random.key(0))
        return first, jax.lax.scan(step, state, actions)[1]

    expected, got = run(whole, actions), jax.device_get(jax.jit(spread(program))(actions))
    jax.tree.map(np.testing.assert_array_equal, expected, got)
    assert expected[1].last.any() and len(np.unique(expected[1].obs[-1], axis=0)) == 8


@pytest.mark.parametrize("overlap", [False, True])
def test_joined_shards_keep_overlap_option(overlap):
    host_config = HostEnvConfig(SEED, num_async_pools=1, overlap=overlap)
    assert sharded_env("envpool/CartPole-v1", 8, host_config).pools.overlap == overlap


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "async_pools", "overlap"), [("ppo", 0, False), ("dqn", 2, False), ("pqn", 2, True)])
def test_resumed_run_on_two_devices_equals_uninterrupted_run_bitwise(algo, async_pools, overlap, tmp_path, monkeypatch):
    options = dict(algo=algo, **AGENTS[algo], exact_resume=True, async_pools=async_pools, overlap=overlap, devices=2)
    options |= SHORT
    whole = jaxrl_fast.fit(**options, run_dir=str(tmp_path / "whole"))
    assert whole.summary["num_shards"] == 2
    saved, _ = checkpoint.newest(tmp_path / "whole" / "checkpoints")
    assert any(name.startswith("rollout/") for name in saved.arrays) == overlap
    stop_after(monkeypatch, 200)
    assert jaxrl_fast.fit(**options, run_dir=str(tmp_path / "parts")).summary["status"] == "stopped"
    jaxrl_fast.fit(resume=str(tmp_path / "parts"), log_level="quiet")
    same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_run_of_two_devices_resumes_on_one_device(tmp_path, monkeypatch):
    """Both shards run on the single device."""
    options = SHORT | dict(algo="ppo", **AGENTS["ppo"], devices=2)
    jaxrl_fast.fit(**options | dict(total_steps=320), run_dir=str(tmp_path / "run"))
    monkeypatch.setattr(jax, "local_device_count", lambda *_: 1)
    on = jaxrl_fast.fit(resume=str(tmp_path / "run"), total_steps=480, log_level="quiet").summary
    assert on["status"] == "done" and on["env_steps"] == 480 and on["num_shards"] == 2


def divided(*line):
    settings = load.from_command_line(["ppo", *line])
    return build.build(settings, agents.load("ppo"), num_updates=10)[1:]


@pytest.mark.slow
def test_image_envs_are_sharded_at_smaller_batches_than_vector_envs():
    """A gradient step of eight images per device is large enough for shards, one of eight vectors is not."""
    small = ("--num-envs", "4", "--rollout-length", "32", "--num-minibatches", "4")
    assert divided("--env", "envpool/Pong-v5", *small)[2].num_shards == 4
    assert divided("--env", "envpool/CartPole-v1", *small)[2].num_shards == 1


def test_async_pools_reduce_default_shards_and_reject_indivisible_devices():
    """By default there are fewer shards. An explicit `devices` is rejected with both numbers in the message."""
    line = ("--env", "envpool/Pong-v5", "--num-envs", "4", "--rollout-length", "32", "--async-pools", "2")
    assert divided(*line)[2].num_shards == 2
    with pytest.raises(ValueError, match=r"host.async_pools: 4 environments .* on each of 4 devices, got 2"):
        divided(*line, "--devices", "4")


def test_shards_divide_cores_and_pool_threads(monkeypatch):
    """Cores and an explicit num_threads are divided by the number of shards."""
    monkeypatch.setattr(tasks, "num_cores", lambda: 8)
    threads = lambda num_shards, **options: tasks.describe(
        "CartPole-v1", 16, options, HostEnvConfig(shard=Shard(num=num_shards))
    ).config["num_threads"]
    assert [threads(1), threads(2), threads(16), threads(2, num_threads=6)] == [8, 4, 1, 3]


def test_program_shapes_create_no_pool():
    """Compute the shapes of the state before training, with asynchronous pools."""
    words = ["--env", "envpool/CartPole-v1", "--num-envs", "8", "--devices", "2", "--async-pools", "2"]
    divided(*words)  # the first call may create a pool to find out how it can be stepped
    held = len(host_pool.OPEN_POOLS)
    like = program.shapes(*divided(*words))
    assert isinstance(like.actors, async_rollout.AsyncActors) and like.actors.pending[0].actors.score.shape == (2, 2)
    assert len(host_pool.OPEN_POOLS) == held
