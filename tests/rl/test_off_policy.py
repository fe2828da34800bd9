"""off_policy: gradient step and target update counts against exact fractions, and loops shared by vmapped seeds."""

import re
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrl_fast.rl import exploration, off_policy
from jaxrl_fast.rl.off_policy import ReplayRatio
from jaxrl_fast.types import Parallelism
from jaxrl_fast.utils import target
from tests.helpers.agents import RATIOS

pytestmark = pytest.mark.unit


def as_fraction(ratio):
    """The fraction of the decimal text: 0.1 is 1/10."""
    return Fraction(str(ratio))


def due(schedule, counts, num_updates):
    """Gradient steps after one more update, and the counts."""
    env_steps = exploration.env_steps(schedule.steps_per_update, jnp.int32(num_updates))
    num_steps, counts = off_policy.num_grad_steps_due(schedule, counts, env_steps)
    return int(num_steps), counts


# Gradient steps


@pytest.mark.parametrize("num_envs", [1, 10, 4096])
@settings(max_examples=12)
@given(RATIOS, st.integers(1, 9), st.integers(0, 60_000))
@example(0.1, 1, 0)
@example(0.003, 7, 1)
def test_num_grad_steps_due_follows_replay_ratio_exactly(num_envs, ratio, rollout_length, first_learning):
    """After each update, the total matches exact fractions. No update has more than max_grad_steps."""
    schedule = ReplayRatio(as_fraction(ratio), first_learning, rollout_length * num_envs)
    counts, made = off_policy.init(), []
    for num_updates in range(25):
        num_steps, counts = due(schedule, counts, num_updates)
        made.append(num_steps)
    steps = [(u + 1) * rollout_length * num_envs for u in range(25)]
    expected = [int(as_fraction(ratio) * max(0, s - first_learning)) for s in steps]  # positive: int is floor
    np.testing.assert_array_equal(np.cumsum(made), expected)
    assert max(made) <= off_policy.max_grad_steps(schedule)
    assert counts.steps_since_target_update == 0


@pytest.mark.parametrize("num_updates", [2**20, 2**31 - 2])
def test_num_grad_steps_due_follows_replay_ratio_beyond_int32_step_counts(num_updates):
    """2.5 gradient steps per update alternate between 2 and 3, after any number of environment steps."""
    schedule = ReplayRatio(Fraction("0.0025"), 2000, 1000)
    first, counts = due(schedule, off_policy.init(), num_updates)
    second, counts = due(schedule, counts, num_updates)
    assert (first, second, counts.grad_step_remainder) == (2, 3, 0)


@pytest.mark.parametrize(
    ("ratio", "steps_per_update", "most"), [("1/10", 5, 1), ("1/10", 25, 3), ("4", 8, 32), ("3/2", 3, 5), ("1/2", 4, 2)]
)
def test_max_grad_steps_is_reached(ratio, steps_per_update, most):
    """The largest remainder is one part less than a gradient step: 3/2 * 3 steps and a remainder of 1/2 make 5."""
    schedule = ReplayRatio(Fraction(ratio), 0, steps_per_update)
    largest = off_policy.init()._replace(grad_step_remainder=jnp.int32(schedule.ratio.denominator - 1))
    assert off_policy.max_grad_steps(schedule) == most == due(schedule, largest, 0)[0]


@pytest.mark.parametrize(("platform", "usual", "loops"), [("cpu", 5, False), ("gpu", 5, True), ("gpu", 1, False)])
def test_gradient_steps_runs_number_due_with_unique_keys(platform, usual, loops):
    """At most 5 steps are made. The state is the number of steps so far, and metrics are summed.

    An accelerator makes all 5 and discards those that are not due, unless few usually are.
    """

    def step(i, state, keys):
        assert keys.shape == (2,)
        seen = jnp.zeros((5, 2), jnp.uint32).at[state].set(jax.random.key_data(keys)[:, 1])
        return state + 1, {"state": jnp.float32(i), "seen": seen}

    run = jax.jit(lambda num: off_policy.gradient_steps(num, 5, step, jnp.int32(0), jax.random.key(0), usual))
    with target.tracing_for(platform):
        made = [eqn.primitive.name for eqn in run.trace(jnp.int32(0)).jaxpr.eqns]
    assert ("scan" in made, "while" in made) == (loops, not loops)  # a loop of known length is a scan
    for num_steps in (0, 1, 3, 5):
        state, sums = jax.device_get(run(jnp.int32(num_steps)))
        assert state == num_steps and sums["state"] == sum(range(num_steps))
        assert len(set(sums["seen"][:num_steps].reshape(-1).tolist())) == 2 * num_steps
        assert not sums["seen"][num_steps:].any()


def test_same_for_all_seeds_keeps_loop_condition_scalar_under_vmap():
    """Under vmap, a loop that uses it has one scalar condition, and each seed gets the correct result."""
    run = lambda num, x: jax.lax.fori_loop(0, off_policy.same_for_all_seeds(num), lambda i, x: 2 * x, x)
    found = jax.vmap(run)(jnp.int32([3, 3]), jnp.float32([1, 5]))
    np.testing.assert_array_equal(found, [8, 40])
    condition = jax.make_jaxpr(jax.vmap(run))(jnp.int32([3, 3]), jnp.float32([1, 5])).eqns[-1].params["cond_jaxpr"]
    assert [x.aval.shape for x in condition.jaxpr.invars[:2]] == [(), ()]
    assert off_policy.same_for_all_seeds(jnp.int32(3)) == 3


# The target


@partial(jax.jit, static_argnames="period")
def target_history(numerator, denominator, period):
    """After each of 200 gradient steps: the step whose parameters the target has. Ratios share one program."""
    schedule = SimpleNamespace(ratio=SimpleNamespace(numerator=numerator, denominator=denominator))

    def step(carry, params):
        target, counts = off_policy.update_target(schedule, period, 1.0, params, *carry)
        return (target, counts), target

    return jax.lax.scan(step, (jnp.float32(0), off_policy.init()), jnp.arange(1, 201, dtype=jnp.float32))[1]


@settings(max_examples=100)
@given(RATIOS, st.sampled_from([1, 2, 3, 10, 25, 300, 500, 2999]))
@example(0.1, 10)
@example(0.1, 25)
@example(0.003, 300)
@example(4, 2)
@example(1.5, 500)
def test_update_target_copies_after_each_period_of_environment_steps(ratio, period):
    """After step g, at g / ratio environment steps, there are floor(g / ratio / period) copies.

    If one gradient step takes more environment steps than a period, or the period is 1, each step copies.
    """
    ratio = as_fraction(ratio)
    found = np.asarray(target_history(ratio.numerator, ratio.denominator, period))
    periods = [int(g / ratio / period) for g in range(201)]
    often = 1 / ratio > period or period == 1
    expected, latest = [], 0
    for g in range(1, 201):
        latest = g if often or periods[g] > periods[g - 1] else latest
        expected.append(latest)
    np.testing.assert_array_equal(found, expected)
    num_moves = int((np.diff(found, prepend=0) > 0).sum())
    assert num_moves == (200 if often else periods[200])


@pytest.mark.parametrize("ratio", [0.5, 1, 1.5, 2, 20])
def test_update_target_with_period_1_moves_after_every_gradient_step(ratio):
    ratio = as_fraction(ratio)
    np.testing.assert_array_equal(target_history(ratio.numerator, ratio.denominator, 1), range(1, 201))


@pytest.mark.parametrize(("ratio", "num_moves"), [(0.5, 100), (1, 50), (1.5, 33), (2, 25), (20, 2)])
def test_update_target_with_period_4_moves_every_4_environment_steps(ratio, num_moves):
    """200 gradient steps are 200 / ratio environment steps."""
    ratio = as_fraction(ratio)
    found = np.asarray(target_history(ratio.numerator, ratio.denominator, 4))
    assert (np.diff(found, prepend=0) > 0).sum() == num_moves


def test_update_target_with_tau_below_1_is_moving_average():
    # 3/4 * 8 + 1/4 * 4 = 7, then 3/4 * 7 + 1/4 * 4 = 6.25
    schedule, counts = ReplayRatio(Fraction(1), 0, 1), off_policy.init()
    once, counts = off_policy.update_target(schedule, 1, 0.25, jnp.float32(4), jnp.float32(8), counts)
    twice, _ = off_policy.update_target(schedule, 1, 0.25, jnp.float32(4), once, counts)
    assert (float(once), float(twice)) == (7, 6.25)


def test_update_target_keeps_gradient_step_remainder():
    counts = off_policy.Counts(jnp.int32(5), jnp.int32(0))
    _, after = off_policy.update_target(ReplayRatio(Fraction("0.3"), 0, 1), 7, 1.0, jnp.ones(2), jnp.zeros(2), counts)
    assert after == (5, 10)  # a gradient step is 10/3 environment steps of 7, counted in thirds


# Ratios that cannot be counted exactly


@pytest.mark.parametrize(
    ("ratio", "steps", "target_update_interval"),
    [
        (1 / 3, 4, 1000),
        (4e-11, 4, 1000),
        (1.5, 4, 2**29),
        (0.3333333333, 4, 2**29),
        (1.23456, 4, 2**22),
        (3.5, 2**29, 1),
    ],
)
def test_check_rejects_uncountable_ratio_and_suggests_near_countable_one(ratio, steps, target_update_interval):
    asked = as_fraction(ratio)
    words = rf"^replay_ratio: cannot be counted exactly with {steps} steps per update and target.interval "
    with pytest.raises(
        ValueError, match=rf"{words}{target_update_interval}, got {re.escape(str(ratio))}; use "
    ) as refusal:
        off_policy.check(ReplayRatio(asked, 0, steps), target_update_interval)
    nearest = as_fraction(str(refusal.value).split()[-1])
    assert abs(nearest - asked) < max(asked / 2, 2**-30)
    off_policy.check(ReplayRatio(nearest, 0, steps), target_update_interval)


@pytest.mark.parametrize("ratio", [0.1, 1, 4, 0.0025])
def test_check_accepts_common_ratios(ratio):
    off_policy.check(ReplayRatio(as_fraction(ratio), 0, 8 * 4096), 10_000)


def test_batches_read_ahead_are_those_that_steps_draw():
    """On each of two shards, each of four steps draws by the key with which its batch was read, and by no other's."""
    ratio = ReplayRatio(Fraction(1, 2), 0, 4, 2)
    read_ahead = lambda buffer, draws, batch_size: lambda i: buffer + jax.random.key_data(draws.keys[i])

    def step(buffer, num_updates, keys, learner, counts):
        drawn = jax.random.key_data(keys[0])
        learner = jnp.roll(learner, -1, axis=0).at[-1].set(jnp.stack([buffer, drawn]))
        return learner, None, counts, {"weight": jnp.ones(1)}

    context = SimpleNamespace(
        ratio=ratio,
        config=SimpleNamespace(batch_size=8),
        parallelism=Parallelism("shards", 2),
        replay=SimpleNamespace(read_ahead=read_ahead, update_priorities=None),
    )

    def learn(shard):
        state = off_policy.init_state(jnp.zeros((4, 2, 2), jnp.uint32), jnp.zeros(2, jnp.uint32))
        key = jax.random.fold_in(jax.random.key(0), shard)
        return off_policy.learn(context, step, state, key)[0].learner

    read, drawn = np.moveaxis(jax.jit(jax.vmap(learn, axis_name="shards"))(jnp.arange(2)), 2, 0)
    np.testing.assert_array_equal(read, drawn)
    assert len(np.unique(drawn.reshape(8, 2), axis=0)) == 8


def test_metrics_are_weighted_means_times_number_of_steps():
    """Two steps are due: rows 1 and 5 with weights 1 and 3, then 1 with weight 0 and 4. The mean is (16 + 16) / 8."""

    def step(buffer, num_updates, keys, learner, counts):
        weight = jnp.where(learner == 0, jnp.float32([1, 3]), jnp.float32([0, 4]))
        rows = jnp.where(learner == 0, jnp.float32([1, 5]), jnp.float32([1, 4]))
        return learner + 1, None, counts, {"loss": weight * rows, "weight": weight}

    context = SimpleNamespace(
        ratio=ReplayRatio(Fraction(1, 2), 0, 4, 1),
        parallelism=Parallelism(),
        replay=SimpleNamespace(read_ahead=None, update_priorities=None),
    )
    state, metrics = off_policy.learn(context, step, off_policy.init_state(jnp.int32(0), ()), jax.random.key(0))
    assert (state.learner, state.num_updates, metrics["gradient_steps"]) == (2, 1, 2)
    assert float(metrics["loss_sum"]) == pytest.approx(2 * 32 / 8)
