"""sequences: rollouts are cut into sequences and carries recomputed, against a plain Python loop per environment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import ShapeDtypeStruct

from jaxrl_fast import networks
from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.pqn import PQN
from jaxrl_fast.rl import minibatch, sequences
from jaxrl_fast.types import Discrete, EnvSpec, Rollout, Transition
from tests.helpers import slow

pytestmark = pytest.mark.unit

T, N = 6, 3
SPEC = EnvSpec("test", ShapeDtypeStruct((2,), jnp.float32), Discrete(2), N)
NETWORK = networks.network(SPEC.obs, 2, networks.Options(memory="gru", memory_size=3, hidden=(4,)))
PARAMS = NETWORK.init(jax.random.key(0))
OBS = jax.random.normal(jax.random.key(1), (T + 1, N, 2))
CARRY = (jax.random.normal(jax.random.key(2), (N, 3)),)
STEP = jax.jit(NETWORK.step)


@jax.jit
def unroll(obs, carry, reset):
    return NETWORK.unroll(PARAMS, obs, carry, reset)


def rollout_of(valid):
    none = jnp.zeros((T, N))
    return Rollout(Transition(OBS[:-1], none, none, none, none, jnp.asarray(valid), ()), OBS[-1], CARRY)


def recompute(length):
    return jax.jit(
        lambda valid: sequences.recompute(unroll, rollout_of(valid), OBS[:-1], OBS[-1], lambda obs: obs, length)
    )


RECOMPUTE = {length: recompute(length) for length in (1, 2, 3, T)}


def step_each_environment(valid):
    """Outputs [T + 1, N, 2] and carries before each step [T, N, 3], from a loop over environments and steps."""
    outputs, carries = np.zeros((T + 1, N, 2), np.float32), np.zeros((T, N, 3), np.float32)
    for n in range(N):
        carry = (CARRY[0][None, n],)
        for t in range(T + 1):
            if t < T:
                carries[t, n] = carry[0][0]
            output, carry = STEP(PARAMS, OBS[None, t, n], carry)
            outputs[t, n] = output[0]
            if t < T and not valid[t, n]:
                carry = (NETWORK.initial_carry[0][None],)
    return outputs, carries


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(ends=st.lists(st.integers(0, T * N - 1), max_size=8), length=st.sampled_from([1, 2, 3, T]))
def test_recompute_matches_loop_per_environment_for_any_episode_ends(ends, length):
    valid = np.ones((T, N), bool)
    valid.reshape(-1)[ends] = False
    outputs, before = RECOMPUTE[length](valid)
    expected, carries = step_each_environment(valid)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    starts = carries[::length].reshape(-1, 3)  # sequence c * N + n begins at step c * length of environment n
    np.testing.assert_allclose(before[0], starts, rtol=1e-4, atol=1e-5)
    begins = ~np.concatenate([np.ones((1, N), bool), valid[:-1]])[::length].reshape(-1)
    assert not np.asarray(before[0])[begins].any(), "an episode must start with exactly the initial carry"


def test_flatten_gives_sequences_of_consecutive_steps_of_one_environment():
    steps = jnp.arange(T)[:, None] * 10 + jnp.arange(N)[None]  # 10 t + n
    np.testing.assert_array_equal(minibatch.flatten(steps), [10 * t + n for t in range(T) for n in range(N)])
    expected = [[10 * (2 * c + i) + n for i in range(2)] for c in range(T // 2) for n in range(N)]
    np.testing.assert_array_equal(minibatch.flatten(steps, 2), expected)


def test_burn_in_computes_carry_without_gradient():
    obs, reset = OBS[:-1].swapaxes(0, 1), jnp.zeros((N, T), bool).at[1, 1].set(True).at[2, 3].set(True)
    assert sequences.after_burn_in(unroll, obs, CARRY, reset, 0)[0] is obs
    rest = sequences.after_burn_in(unroll, obs, CARRY, reset, 2)
    np.testing.assert_array_equal(rest[0], obs[:, 2:])
    np.testing.assert_array_equal(rest[2], reset[:, 2:])
    whole = unroll(obs, CARRY, reset)[0]
    np.testing.assert_allclose(unroll(*rest)[0], whole[:, 2:], rtol=1e-5, atol=1e-6)
    assert not np.asarray(rest[1][0][1]).any(), "an episode starts after the burn-in, so its carry must be zero"
    loss = lambda carry: unroll(*sequences.after_burn_in(unroll, obs, carry, reset, 2))[0].sum()
    assert not np.asarray(jax.grad(loss)(CARRY)[0]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sequence_length=4), "memory.sequence_length: must divide rollout_length 6, got 4; use 3"),
        (dict(burn_in=6), "memory.burn_in: must be less than the 6 steps of a sequence, got 6; use 3"),
        (
            dict(num_minibatches=2),
            "num_minibatches: must divide the 3 sequences of 6 steps per update, got 2; use 1 or 3",
        ),
    ],
)
def test_validate_rejects_invalid_sizes(options, message):
    config = configure(PQN, **dict(memory="gru", rollout_length=T, num_minibatches=1) | options)
    with pytest.raises(ValueError, match=message):
        sequences.validate(config, SPEC)


@pytest.mark.parametrize("length", [slow(1), 2, slow(T)])
def test_recompute_carries_sum_over_sequences_up_to_observation_after_rollout(length):
    """The network adds up what it observes, and begins anew after a row without an action."""

    def add_up(obs, carry, reset):
        outputs = []
        for i in range(obs.shape[1]):
            carry = carry + obs[:, i]
            outputs.append(carry)
            carry = jnp.where(reset[:, i], 0, carry)
        return jnp.stack(outputs, axis=1), carry

    numbers = jnp.float32([[1, 10, 100], [2, 20, 200], [3, 30, 300], [4, 40, 400], [5, 50, 500], [6, 60, 600]])
    valid = jnp.ones((T, N), bool).at[1, 0].set(False).at[5, 2].set(False)
    rollout = rollout_of(valid)._replace(carry=jnp.float32([0.5, 0.25, 0]))
    end = jnp.float32([7, 70, 700])
    outputs, before = sequences.recompute(add_up, rollout, numbers, end, lambda obs: obs, length)
    expected = [
        [1.5, 3.5, 3, 7, 12, 18, 25],  # the second row is invalid: the sum begins with the third
        [10.25, 30.25, 60.25, 100.25, 150.25, 210.25, 280.25],
        [100, 300, 600, 1000, 1500, 2100, 700],  # so is the last one
    ]
    np.testing.assert_allclose(outputs, np.transpose(expected))
    carries = [[0.5, 1.5, 0, 3, 7, 12], [0.25, 10.25, 30.25, 60.25, 100.25, 150.25], [0, 100, 300, 600, 1000, 1500]]
    np.testing.assert_allclose(before, np.transpose(carries)[::length].reshape(-1))
