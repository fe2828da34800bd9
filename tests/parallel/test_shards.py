"""Environments on the host dealt to shards: the same games as in one pool, on devices of their own or side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxrl_fast
from jaxrl_fast import agents, async_rollout, envs
from jaxrl_fast.config import load
from jaxrl_fast.envs import host_pool, sharded
from jaxrl_fast.envs.envpool import tasks
from jaxrl_fast.parallel import program
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training import build
from jaxrl_fast.types import HostEnvConfig, Parallelism
from tests.helpers import slow
from tests.helpers.host_envs import AGENTS, SHORT, random_actions, run
from tests.helpers.runs import same, stop_after

SEED = (5, 0, 0)
AXIS = "shards"
NUM_SHARDS = 2


def dealt(name, num_envs, host_config, **options):
    """The environments of `name`, N / NUM_SHARDS in each shard."""
    make = lambda i: envs.make(
        name, num_envs // NUM_SHARDS, host_config._replace(shard=i, num_shards=NUM_SHARDS), **options
    )
    return sharded.join([make(i) for i in range(NUM_SHARDS)], AXIS)


def on_devices(function):
    """[N, ...] to [T, N, ...], a shard on each of several devices."""
    devices = jax.devices()[:NUM_SHARDS]
    mesh = jax.make_mesh((NUM_SHARDS,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    spread = P(None, AXIS)
    return jax.shard_map(function, mesh=mesh, in_specs=spread, out_specs=(P(AXIS), spread), check_vma=False)


def side_by_side(function):
    """The same on one device."""

    def all_shards(actions):
        parts = jnp.stack(jnp.split(actions, NUM_SHARDS, axis=1))
        first, steps = jax.vmap(function, axis_name=AXIS)(parts)
        join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), first), jax.tree.map(join, steps)

    return all_shards


@pytest.mark.parametrize("path", ["ffi", "callback"])
@pytest.mark.parametrize("spread", [on_devices, slow(side_by_side)])
@pytest.mark.slow
def test_the_same_games_as_in_one_pool(spread, path):
    """Row for row: each environment has its own seed wherever it runs, and no shard steps another's."""
    name, num_envs = "envpool/Breakout-v5", 4
    host_config = HostEnvConfig(SEED, "dqn2015", path)
    whole = envs.make(name, num_envs, host_config)
    env = dealt(name, num_envs, host_config)
    assert env.spec == whole.spec._replace(num_envs=2) and env.parallelism == Parallelism(AXIS, 2)
    actions = random_actions(whole.spec, 60)

    def program(actions):
        state, first = env.reset(jax.random.key(0))
        return first, jax.lax.scan(env.step, state, actions)[1]

    expected, got = run(whole, actions), jax.device_get(jax.jit(spread(program))(actions))
    jax.tree.map(np.testing.assert_array_equal, expected, got)
    assert len({frame.tobytes() for frame in np.asarray(expected[1].obs[-1])}) == num_envs, "four games"


@pytest.mark.parametrize("spread", [on_devices, side_by_side])
def test_pools_in_flight_are_the_shards_own(spread):
    """Sent and answered pool by pool, each shard's two play the games that one pool of all plays."""
    name, host_config = "envpool/CartPole-v1", HostEnvConfig(SEED)
    whole, env = envs.make(name, 8, host_config), dealt(name, 8, host_config._replace(num_async_pools=2))
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
def test_shards_play_while_they_learn_if_one_does(overlap):
    host_config = HostEnvConfig(SEED, num_async_pools=1, overlap=overlap)
    assert dealt("envpool/CartPole-v1", 8, host_config).pools.overlap == overlap


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "async_pools", "overlap"), [("ppo", 0, False), ("dqn", 2, False), ("pqn", 2, True)])
def test_a_run_over_several_devices_goes_on_to_the_same_bits(algo, async_pools, overlap, tmp_path, monkeypatch):
    options = dict(
        algo=algo, agent=AGENTS[algo], exact_resume=True, async_pools=async_pools, overlap=overlap, devices=2
    )
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
def test_it_goes_on_where_there_are_fewer_devices(tmp_path, monkeypatch):
    """Side by side then."""
    options = SHORT | dict(algo="ppo", agent=AGENTS["ppo"], devices=2)
    jaxrl_fast.fit(**options | dict(total_steps=320), run_dir=str(tmp_path / "run"))
    monkeypatch.setattr(jax, "local_device_count", lambda *_: 1)
    on = jaxrl_fast.fit(resume=str(tmp_path / "run"), total_steps=480, log_level="quiet").summary
    assert on["status"] == "done" and on["env_steps"] == 480 and on["num_shards"] == 2


def divided(*line):
    settings = load.from_command_line(["ppo", *line])
    return build.build(settings, agents.load("ppo"), num_updates=10)[1:]


def test_images_are_dealt_to_devices_sooner_than_vectors():
    """A gradient of eight images keeps a device busy, one of eight vectors does not."""
    small = ("--num-envs", "4", "--agent.rollout-length", "32", "--agent.num-minibatches", "4")
    assert divided("--env", "envpool/Pong-v5", *small)[2].num_shards == 4
    assert divided("--env", "envpool/CartPole-v1", *small)[2].num_shards == 1


def test_where_pools_in_flight_do_not_divide_there_are_fewer_shards():
    """Left to us; where the devices are given, it is refused, with both numbers."""
    line = ("--env", "envpool/Pong-v5", "--num-envs", "4", "--agent.rollout-length", "32", "--async-pools", "2")
    assert divided(*line)[2].num_shards == 2
    with pytest.raises(ValueError, match=r"--async-pools: 4 environments .* on each of 4 devices, got 2"):
        divided(*line, "--devices", "4")


def test_shards_share_the_cores(monkeypatch):
    """And the threads that are given."""
    monkeypatch.setattr(tasks, "num_cores", lambda: 8)
    threads = lambda num_shards, **options: tasks.describe(
        "CartPole-v1", 16, options, HostEnvConfig(num_shards=num_shards)
    ).config["num_threads"]
    assert [threads(1), threads(2), threads(16), threads(2, num_threads=6)] == [8, 4, 1, 3]


def test_no_pool_is_made_of_shards_on_paper():
    """Shapes of a state, before anything is begun: with pools in flight too."""
    words = ["--env", "envpool/CartPole-v1", "--num-envs", "8", "--devices", "2", "--async-pools", "2"]
    divided(*words)  # the first time, a pool may be made to see how it can be stepped
    held = len(host_pool.OPEN_POOLS)
    like = program.shapes(*divided(*words))
    assert isinstance(like.actors, async_rollout.AsyncActors) and like.actors.pending[0].actors.score.shape == (2, 2)
    assert len(host_pool.OPEN_POOLS) == held
