"""The accelerator's version of a program against the CPU's: both run here, on a CPU, and give the same numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import loop
from jaxrl_fast.config import load
from jaxrl_fast.training import build
from jaxrl_fast.utils import target

ON_POLICY = "--num-envs 4 --rollout-length 16 --num-minibatches 2 --num-epochs 2 --hidden-sizes 8"
OFF_POLICY = "--num-envs 4 --rollout-length 4 --learning-starts 20 --batch-size 8 --size 64 --hidden-sizes 8"
CARTPOLE = "--env CartPole-v1 --env-option max_steps_in_episode=9"
PENDULUM = "--env Pendulum-v1 --env-option max_steps_in_episode=9"
MEMORY = "--sequence-length 8"
RAINBOW = "--replay prioritized --n-step 3 --value c51 --dueling true --double true --noisy true"
slow = partial(pytest.param, marks=pytest.mark.slow)
LINES = [
    slow(f"ppo {CARTPOLE} {ON_POLICY}"),
    slow(f"ppo {CARTPOLE} {ON_POLICY} --memory gru {MEMORY}"),
    slow(f"ppo {CARTPOLE} {ON_POLICY} --memory lstm {MEMORY}"),
    slow(f"ppo {CARTPOLE} {ON_POLICY} --memory lru {MEMORY}"),
    f"ppo {PENDULUM} {ON_POLICY} --rewards normalized --normalize-observations true --target-kl 0.01",
    slow(f"ppo {PENDULUM} {ON_POLICY} --policy gsde --sample-freq 4"),
    slow(f"ppo --env Breakout-MinAtar {ON_POLICY}"),
    slow(f"pqn {CARTPOLE} {ON_POLICY}"),
    slow(f"pqn --env Breakout-MinAtar {ON_POLICY}"),
    f"dqn {CARTPOLE} {OFF_POLICY} --replay-ratio 0.3 --target.interval 24",
    slow(f"dqn {CARTPOLE} {OFF_POLICY} --replay-ratio 1 {RAINBOW}"),
    slow(f"sac {PENDULUM} {OFF_POLICY} --replay-ratio 1"),
    slow(f"sac {PENDULUM} {OFF_POLICY} --replay-ratio 0.5 --policy-delay 2 --target none"),
    slow(f"sac {PENDULUM} {OFF_POLICY} --replay-ratio 1 --policy-delay 2 --network flash --value c51 --noise held"),
    slow(f"reppo {PENDULUM} {ON_POLICY} --critic-width 8"),
    slow(f"td3 {PENDULUM} {OFF_POLICY} --replay-ratio 1"),
]


def trained(line, platform, num_updates=5):
    """Return the state and the metrics after some updates of a program that is traced for a platform."""
    with target.tracing_for(platform):
        settings = load.from_command_line(line.split())
        settings, env, agent, _ = build.build(settings, build.load_algorithm(settings), 10)
        run = lambda key: loop.train(env, agent, loop.init(env, agent, key), num_updates)
        return jax.device_get(jax.jit(run)(jax.random.key(3)))


@pytest.mark.parametrize("line", LINES)
def test_versions_for_cpu_and_accelerator_learn_the_same(line):
    """Episodes end and begin in these updates, and the first updates of off-policy algorithms make no gradient step."""
    (one, one_metrics), (other, other_metrics) = trained(line, "cpu"), trained(line, "gpu")
    assert one_metrics["episodes"].sum() > 4
    assert jax.tree.structure(one) == jax.tree.structure(other)  # a checkpoint fits both
    for name, x in one_metrics.items():
        np.testing.assert_allclose(x, other_metrics[name], rtol=2e-3, atol=2e-4, err_msg=name)
    close = partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4)
    floats = lambda tree: [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    jax.tree.map(close, floats(one.agent), floats(other.agent))
    np.testing.assert_array_equal(one.actors.length, other.actors.length)
