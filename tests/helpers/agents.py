"""Options of small agents that compile quickly, and replay ratios."""

import hypothesis.strategies as st

from jaxrl_fast import networks

SHORT = dict(rollout_length=4, num_minibatches=2, num_epochs=2, hidden_sizes=(8,))
LITTLE = dict(rollout_length=4, size=64, batch_size=4, learning_starts=8, replay_ratio=0.25, hidden_sizes=(8,))
CONTINUOUS = ("sac", "td3", "ddpg")  # algorithms with actors and critics that learn from a replay buffer
BOXES = (*CONTINUOUS, "reppo")  # algorithms for continuous actions only
RATIOS = st.one_of(
    st.sampled_from([0.001, 0.003, 0.1, 0.25, 1, 1.5, 4, 0.0625]), st.integers(1, 4000).map(lambda x: x / 1000)
)


def network_of(init, apply, noise) -> networks.Network:
    """Return a network without recurrent state from plain functions."""
    unroll = lambda params, obs, carry=(), reset=(), noise=(): (apply(params, obs, noise), carry)
    step = lambda params, obs, carry, noise=(): unroll(params, obs, carry, noise=noise)
    return networks.Network(init, apply, noise, step, unroll)
