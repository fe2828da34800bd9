"""Test collectives between devices, by XLA and through the shared memory of CPU cores."""

import ctypes
import shutil
import subprocess
import sys
from functools import cache, partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxrl_fast import agents
from jaxrl_fast.config import load
from jaxrl_fast.kernels import build
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.parallel import collectives, program
from jaxrl_fast.parallel.placement import SHARDS, Placement, max_grad_workers, share_cores
from jaxrl_fast.rl.bonuses.bc import Demonstrations
from jaxrl_fast.training import build as training_build
from jaxrl_fast.types import SHARED_MEMORY_AXIS, Parallelism
from tests.helpers import probes, slow

NUM_UPDATES = 4
needs_cores = pytest.mark.skipif(not build.is_available("allreduce"), reason="no C compiler here")


def on_devices(function, num_devices, axis_name=SHARED_MEMORY_AXIS, num_groups=1):
    """Return a function that applies `function` to one row [...] of [groups * devices, ...] on each device."""
    shape, names = (num_groups, num_devices), ("groups", axis_name)
    devices = jax.devices()[: num_groups * num_devices]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 2, devices=devices)
    one = lambda *x: jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], x)))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False))


def in_order(rows):
    """Return the float32 sum [...] of rows [devices, ...], added one after another."""
    whole = rows[0].copy()
    for row in rows[1:]:
        whole += row
    return whole


@needs_cores
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    seed=st.integers(0, 2**31 - 1),
    devices=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]),
    shape=st.sampled_from([(), (1,), (15,), (16,), (17,), (3, 100), (40_000,)]),
)
def test_shared_memory_all_reduce_sums_devices_in_order_bitwise(seed, devices, shape):
    """The sum has the same bits on each device. Two groups of devices have separate sums."""
    num_devices, num_groups = devices
    rows = np.random.default_rng(seed).normal(size=(num_groups * num_devices, *shape)).astype(np.float32)
    found = np.asarray(
        on_devices(lambda x: collectives.all_reduce_sum(x, SHARED_MEMORY_AXIS), num_devices, num_groups=num_groups)(
            rows
        )
    )
    for group in range(num_groups):
        own = slice(group * num_devices, (group + 1) * num_devices)
        np.testing.assert_array_equal(found[own], np.broadcast_to(in_order(rows[own]), found[own].shape))


@needs_cores
@pytest.mark.parametrize("num_devices", [2, 4])
def test_shared_memory_all_reduce_is_correct_in_nested_loops(num_devices):
    """Five runs make thousands of sums of two alternating lengths. Each sum depends on the previous one."""
    start = np.random.default_rng(0).normal(size=(num_devices, 300)).astype(np.float32)

    def program(x):
        def inner(x, _):
            x = collectives.all_reduce_sum(x, SHARED_MEMORY_AXIS) / num_devices + jax.lax.axis_index(
                SHARED_MEMORY_AXIS
            ).astype(jnp.float32)
            return x.at[:7].set(collectives.all_reduce_sum(x[:7], SHARED_MEMORY_AXIS) / num_devices), None

        return jax.lax.fori_loop(0, 20, lambda _, x: jax.lax.scan(inner, x, length=20)[0], x)

    run, x, expected = on_devices(program, num_devices), start, start.astype(np.float64)
    for _ in range(5):
        x = run(x)
        for _ in range(400):
            expected = expected.mean(0) + np.arange(num_devices)[:, None]
            expected[:, :7] = expected[:, :7].mean(0)
    np.testing.assert_allclose(np.asarray(x), expected, rtol=1e-4)


@pytest.mark.parametrize("axis_name", [SHARDS, pytest.param(SHARED_MEMORY_AXIS, marks=needs_cores)])
@pytest.mark.parametrize("size", [3, 40_000])
def test_collectives_sum_and_gather_each_leaf_of_tree(axis_name, size):
    """In shared memory, small leaves are concatenated to one vector."""
    rows = {"a": np.arange(4 * size, dtype=np.float32).reshape(4, size), "b": np.float32([1, 2, 4, 8])}
    rows["c"] = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    both = lambda x: (collectives.all_reduce_sum(x, axis_name), collectives.all_gather(x, axis_name))
    if axis_name == SHARED_MEMORY_AXIS:  # the sum depends on the gathered tree
        both = lambda x: (
            y := collectives.all_gather(x, SHARED_MEMORY_AXIS),
            collectives.all_reduce_sum(jax.tree.map(lambda y: y[0], y), SHARED_MEMORY_AXIS),
        )[::-1]
    total, gathered = jax.device_get(on_devices(both, 4, axis_name)(rows))
    for name, x in rows.items():
        np.testing.assert_array_equal(gathered[name], np.broadcast_to(x, (4, *x.shape)))
        expected = x.sum(0) if axis_name == SHARDS else 4 * x[0]
        np.testing.assert_array_equal(total[name], np.broadcast_to(expected, x.shape))


@needs_cores
@pytest.mark.parametrize("size", [3, 40_000])
def test_shared_memory_sum_under_vmap_sums_each_member(size):
    """The players of a game learn in one vmapped program. An array that is the same for all is summed once."""
    rows = np.random.default_rng(0).normal(size=(4, 3, size)).astype(np.float32)
    both = lambda x, same: collectives.all_reduce_sum({"a": x, "b": x[:2] * 2, "c": same}, SHARED_MEMORY_AXIS)
    found = on_devices(lambda x: jax.vmap(both, (0, None))(x, x[0, :2]), 4)(rows)
    close = lambda x, expected: np.testing.assert_allclose(x, np.broadcast_to(expected, x.shape), rtol=1e-5, atol=1e-6)
    for name, expected in {"a": rows, "b": rows[:, :, :2] * 2, "c": rows[:, :1, :2]}.items():
        close(np.asarray(found[name]), expected.sum(0))


def test_collectives_keep_values_of_single_device():
    x = {"a": jnp.arange(3.0)}
    assert collectives.all_reduce_sum(x, None) is x and collectives.local_rows(x, 1) is x
    np.testing.assert_array_equal(collectives.all_gather(x, None)["a"], [[0, 1, 2]])


def test_scatter_rows_puts_local_rows_in_place_and_zeros_elsewhere():
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    part_and_place = lambda x: collectives.scatter_rows(collectives.local_rows(x, 4), 4)
    found = np.asarray(on_devices(part_and_place, 4)(np.broadcast_to(rows, (4, 8, 3))))
    np.testing.assert_array_equal(found.sum(0), rows)
    for i in range(4):
        np.testing.assert_array_equal(found[i, 2 * i : 2 * i + 2], rows[2 * i : 2 * i + 2])


def test_shared_memory_all_reduce_rejects_integers():
    with pytest.raises(TypeError, match="sums float32, not int32"):
        on_devices(lambda x: collectives.all_reduce_sum(x, SHARED_MEMORY_AXIS), 2)(np.ones((2, 3), np.int32))


# In a separate process with its own devices, and a timeout of 1 s instead of XLA's

ALONE = """
import ctypes, sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", {num_devices})
from jaxrl_fast.kernels import build
from jaxrl_fast.parallel import collectives
build._load = lambda: ctypes.CDLL({library!r})
assert build.is_available("allreduce")
from tests.parallel.test_collectives import in_order, on_devices
{program}
"""


def alone(tmp_path, program, num_devices):
    library = tmp_path / "allreduce.so"
    build.compile_library(build._compiler(), library, "-DTIMEOUT_S=1")
    code = ALONE.format(num_devices=num_devices, library=str(library), program=program)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@needs_cores
@pytest.mark.slow
def test_all_reduce_of_6_devices_equals_ordered_sum(tmp_path):
    """With 6 devices, each sums a slice instead of the whole array. Slices are whole, short and empty."""
    program = """
halve = lambda tree: jax.tree.map(lambda x: x / 2, tree)
for size in (1, 95, 96, 97, 1000, 40_000):
    rows = {name: np.random.default_rng(size).normal(size=(6, size)).astype(np.float32) for name in "ab"}
    twice = lambda x: collectives.all_reduce_sum(halve(collectives.all_reduce_sum(x, "cores")), "cores")
    for name, found in on_devices(twice, 6)(rows).items():
        expected = in_order(np.stack([in_order(rows[name]) / 2] * 6))
        np.testing.assert_array_equal(np.asarray(found), np.broadcast_to(expected, found.shape))
print("right")
"""
    ended = alone(tmp_path, program, 6)
    assert ended.stdout == "right\n", ended.stderr


@needs_cores
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("x", "another device's program has failed"),
        ("collectives.all_reduce_sum(x[:2], 'cores')[0] + x", "devices sum different arrays"),
    ],
)
@pytest.mark.slow
def test_all_reduce_raises_when_other_device_is_missing_or_sums_other_shape(tmp_path, other, words):
    """Either the other device never sums, as if its program had failed, or it sums an array of another length."""
    program = f"""
here = lambda x: collectives.all_reduce_sum(x, "cores")
there = lambda x: {other}
either = on_devices(lambda x: jax.lax.cond(jax.lax.axis_index("cores") == 0, here, there, x), 2)
try:
    jax.block_until_ready(either(np.ones((2, 3), np.float32)))
except jax.errors.JaxRuntimeError as error:
    print(error)
sys.stdout.flush()
import os; os._exit(0)
"""
    assert words in alone(tmp_path, program, 2).stdout


@pytest.mark.slow
def test_without_compiler_there_is_one_grad_worker(monkeypatch, tmp_path):
    """Also if the compiler fails or its library cannot be loaded. Shards are still possible, with the sums of XLA."""
    line = ["ppo", "--env", "CartPole-v1", "--num-envs", "64", "--num-minibatches"]
    divided = lambda minibatches: training_build.build(
        load.from_command_line([*line, minibatches]), agents.load("ppo"), num_updates=10
    )[3]
    monkeypatch.setattr("jaxrl_fast.utils.devices.num_cores", lambda: 4)
    if build.is_available("allreduce"):
        assert divided("32") == Placement(num_grad_workers=4) and divided("2") == Placement(
            1, 4, True, axis_name=SHARED_MEMORY_AXIS
        )
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    refuse = lambda _: (_ for _ in ()).throw(OSError("no room for it"))
    monkeypatch.setattr(build, "CACHE", str(tmp_path))
    for module, name, value in (
        (shutil, "which", lambda _: None),
        (shutil, "which", lambda _: str(broken)),
        (ctypes, "CDLL", refuse),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            patched.setattr(build, "_register", build._register.__wrapped__)
            assert max_grad_workers() == 1
            assert divided("32") == Placement() and divided("2") == Placement(1, 4, True)


# Training


LINES = (  # few rows in a gradient step
    "ppo --env CartPole-v1 --num-envs 4",
    "pqn --env CartPole-v1 --num-envs 4",
    "dqn --env gymnasium/CartPole-v1 --num-envs 2",  # stepped by one of them
    "sac --env Pendulum-v1 --num-envs 1",
)


@pytest.mark.slow
@needs_cores
@pytest.mark.parametrize("line", LINES)
def test_small_gradient_steps_are_split_over_grad_workers(line, monkeypatch):
    monkeypatch.setattr("jaxrl_fast.utils.devices.num_cores", lambda: 2)

    def divided(*more, before=None):
        """Return the environment and the placement."""
        settings = load.from_command_line([*line.split(), *more])
        return training_build.build(settings, agents.load(line[:3]), 10, before)[1::2]

    env, placement = divided()
    assert placement == Placement(num_grad_workers=2) and placement.num_devices == 2
    assert env.parallelism.num_grad_workers == 2
    assert divided("--devices", "1")[1] == Placement()
    if env.on_device:
        assert divided("--num-seeds", "2")[1].num_grad_workers == 1, "each seed has its own core"
    else:  # an environment that fails must release the others
        for option in ("--async-pools 2", "--exact-resume", "--host.bridge callback"):
            assert divided(*option.split())[1] == Placement(), option
        with monkeypatch.context() as patched:
            patched.setenv(build.VARIABLE, "allreduce")
            assert divided()[1] == Placement(), "it is called by JAX"
    assert divided(before={"num_shards": 1, "num_grad_workers": 1})[1] == Placement()
    assert divided("--hidden-sizes", "512", "512")[1] == Placement(), "its gradient is too large to sum"
    for name in ("MAX_REPEATED", "MAX_LEARNED"):
        with monkeypatch.context() as patched:
            patched.setattr(training_build, name, 1000)
            assert divided()[1] == Placement()
    share_cores(2)  # workers of a sweep
    assert divided()[1] == Placement()
    share_cores(1)


@needs_cores
def test_algorithm_without_replay_has_no_grad_workers_for_host_environments(monkeypatch):
    monkeypatch.setattr("jaxrl_fast.utils.devices.num_cores", lambda: 2)
    settings = load.from_command_line(["ppo", "--env", "gymnasium/CartPole-v1", "--num-envs", "4"])
    assert training_build.build(settings, agents.load("ppo"), 10)[-1] == Placement()


VARIANTS = {
    "ppo": ("ppo", {}),
    "ppo_all": ("ppo", dict(normalize_observations=True, rewards="normalized", target_kl=0.01)),
    "ppo_kl": ("ppo", dict(target_kl=2e-3, learning_rate=0.01, schedule="constant")),  # which ends updates early
    "ppo_rnd": ("ppo", dict(bonus="rnd", normalize_observations=True, rewards="normalized")),
    "dqn": ("dqn", dict(batch_size=8, size=256, learning_starts=32)),
    "dqn_all": (
        "dqn",
        dict(batch_size=8, size=256, learning_starts=32, replay="prioritized", noisy=True, dueling=True, n_step=3),
    ),
    "pqn": ("pqn", {}),
}


@cache
def trained(variant, placement, num_envs=4):
    """Return the state on each device, the metrics and the learner after NUM_UPDATES updates."""
    algo, options = VARIANTS[variant]
    rollout = {} if algo == "dqn" else dict(num_minibatches=2, num_epochs=2)
    env = probes.best_action_of_observation(num_envs // placement.num_shards)
    axis_name = placement.axis_name if placement.num_shards > 1 else None
    env = env._replace(parallelism=Parallelism(axis_name, placement.num_shards, placement.num_grad_workers))
    agent_config = configure(ALGORITHMS[algo], rollout_length=16, hidden_sizes=(8,), **rollout, **options)
    agent = agents.load(algo).make(agent_config, env.spec, NUM_UPDATES, env.parallelism)
    built = program.build(env, agent, NUM_UPDATES, placement)
    state, metrics = built.chunk(built.init(np.int32(3)), np.int32(NUM_UPDATES))
    on_each = [jax.tree.map(lambda x, i=i: np.asarray(x.addressable_shards[i].data), unkeyed(state))
               for i in range(placement.num_devices)]  # fmt: skip
    return on_each, jax.device_get(metrics), jax.device_get(unkeyed(built.learner(state)))


def unkeyed(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@needs_cores
@pytest.mark.parametrize("num_grad_workers", [2, slow(4)])
@pytest.mark.parametrize("variant", [slow(name) if name.startswith("ppo_") else name for name in VARIANTS])
@pytest.mark.slow
def test_grad_workers_train_like_single_device(variant, num_grad_workers):
    """Results are equal up to rounding, and all workers have the same bits."""
    on_each, metrics, learner = trained(variant, Placement(num_grad_workers=num_grad_workers))
    for other in on_each[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, on_each[0])
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    alone, expected, learner_alone = trained(variant, Placement())
    jax.tree.map(close, metrics, expected)
    jax.tree.map(close, learner, learner_alone)
    jax.tree.map(close, on_each[0], alone[0])
    assert not np.allclose(jax.tree.leaves(learner)[0], 0)


@needs_cores
@pytest.mark.parametrize("variant", [name if name in ("ppo_all", "dqn_all") else slow(name) for name in VARIANTS])
@pytest.mark.slow
def test_shards_with_shared_memory_sums_train_like_xla_bitwise(variant):
    """With two shards the bits are equal, since a sum of two has only one order."""
    by_xla, by_memory = (trained(variant, Placement(1, 2, axis_name=name)) for name in (SHARDS, SHARED_MEMORY_AXIS))
    jax.tree.map(np.testing.assert_array_equal, by_memory, by_xla)


INLINED = ("jit", "pjit", "closed_call", "custom_vmap_call", "custom_jvp_call", "custom_vjp_call", "remat", "shard_map")


def inner(equation):
    """The programs that an operation calls."""
    found = [x for value in equation.params.values() for x in (value if isinstance(value, tuple | list) else [value])]
    return [getattr(x, "jaxpr", x) for x in found if hasattr(getattr(x, "jaxpr", x), "eqns")]


def num_ordered_sums(program, before=None, start=0):
    """The number of sums over cores in a program. Raise AssertionError if one does not depend on the previous one.

    `before` numbers the last sum that each variable depends on. A loop or branch with sums counts as one.
    """
    last, count = dict(before or {}), start
    level = lambda variables: max([last.get(x, 0) for x in variables if isinstance(x, jax.extend.core.Var)], default=0)
    for equation in program.eqns:
        programs, name = inner(equation), equation.primitive.name
        if name in INLINED and len(programs) == 1:
            (one,) = programs
            given = dict(zip(one.invars, [level([x]) for x in equation.invars], strict=True))
            count, of_inner = num_ordered_sums(one, given, count)
            last |= {
                x: (of_inner.get(y, 0) if isinstance(y, jax.extend.core.Var) else 0)
                for x, y in zip(equation.outvars, one.outvars, strict=True)
            }
            continue
        here = level(equation.invars)
        is_sum = "sum_over_cores" in str(equation.params.get("target_name", ""))
        if is_sum or any([num_ordered_sums(one)[0] for one in programs]):
            assert here == count, f"sum {count + 1} depends on sum {here} only"
            here = count = count + 1
        last |= dict.fromkeys(equation.outvars, here)
    return count, last


VARIANTS_IN_ORDER = {
    **VARIANTS,
    "bc": ("ppo", dict(bonus=dict(kind="bc", data=Demonstrations(np.zeros((3, 1)), np.zeros(3, int))))),
    "reppo": ("reppo", {}),
    "sac": ("sac", dict(batch_size=8, size=256, learning_starts=32)),
}


@pytest.mark.parametrize("parallelism", [Parallelism("cores", 2), Parallelism(None, 1, 2)], ids=["shards", "workers"])
@pytest.mark.parametrize("variant", [slow(name) if name != "ppo_rnd" else name for name in VARIANTS_IN_ORDER])
def test_each_sum_depends_on_the_previous_one(variant, parallelism):
    """Otherwise two cores may begin with different sums, and wait for each other."""
    algo, options = VARIANTS_IN_ORDER[variant]
    is_box = algo in ("sac", "reppo")
    env = (probes.continuous_action_of_observation if is_box else probes.best_action_of_observation)(4)
    rollout = dict(num_minibatches=2, num_epochs=2) if algo in ("ppo", "pqn", "reppo") else {}
    config = configure(ALGORITHMS[algo], rollout_length=16, hidden_sizes=(8,), **rollout, **options)
    alone, agent = (agents.load(algo).make(config, env.spec, 4, *own) for own in ((), (parallelism,)))
    state = jax.eval_shape(alone.init, jax.random.key(0))
    experience = jax.eval_shape(partial(probes.experience, env, alone), state)
    update = jax.make_jaxpr(agent.update, axis_env=[("cores", 2)])(state, experience, jax.random.key(0))
    assert num_ordered_sums(update.jaxpr)[0] > 0
