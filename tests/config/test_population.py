"""Test populations: members with other seeds and real hyperparameters share a program, and match single runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import agents
from jaxrl_fast.config.population import Member, member_of, real_numbers
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure, options_of, replace, value_of
from jaxrl_fast.parallel import program
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.parallel.population import Varied
from jaxrl_fast.rl.bonuses.bc import Demonstrations
from jaxrl_fast.training import divergence, plan
from jaxrl_fast.training.evaluator import Evaluator
from jaxrl_fast.types import Agent, Decision
from tests.helpers import probes, slow
from tests.helpers.agents import BOXES, CONTINUOUS

NUM_UPDATES, NUM_ENVS = 3, 4
UNTRACED = {  # converted to a fraction (replay_ratio), compared (v_min, v_max), or 1 removes code (noise.theta)
    "dqn": {"replay_ratio", "value.v_min", "value.v_max"},
    "ppo": {"value.v_min", "value.v_max"},
    "reppo": {"value.v_min", "value.v_max"},
} | {algo: {"replay_ratio", "noise.theta", "value.v_min", "value.v_max", "target.momentum"} for algo in CONTINUOUS}
OFF_POLICY = dict(
    rollout_length=8, hidden_sizes=(4,), batch_size=8, learning_starts=8, replay_ratio=0.25,
    replay={"kind": "prioritized", "size": 256},
)  # fmt: skip
SMALL = {
    "ppo": dict(
        rollout_length=8, hidden_sizes=(4,), num_epochs=2, num_minibatches=2, rewards="normalized", target_kl=1.0,
    ),
    "pqn": dict(rollout_length=8, hidden_sizes=(4,), num_epochs=2, num_minibatches=2, explore={"steps": 64}),
    "dqn": OFF_POLICY | dict(interval=16, bonus="munchausen", double=True, explore={"steps": 64}),
    "sac": OFF_POLICY | dict(max_grad_norm=1.0, target_entropy=-2.0, noise={"kind": "ou", "theta": 0.5}),
    "td3": OFF_POLICY | dict(max_grad_norm=1.0, normalize_observations=True),
    "ddpg": OFF_POLICY | dict(max_grad_norm=1.0, noise={"kind": "ou", "theta": 0.5}, target_noise=0.1),
    "reppo": dict(
        rollout_length=8, hidden_sizes=(4,), critic_width=4, num_epochs=2, num_minibatches=2, target_entropy=-1.0,
        schedule="cosine", value={"kind": "hl_gauss", "atoms": 11, "v_min": -2.0, "v_max": 2.0},
    ),
}  # fmt: skip


def env_of(algo):
    if algo in BOXES:
        return probes.continuous_action_of_observation(NUM_ENVS)
    return probes.best_action_of_observation(NUM_ENVS)


def run(algo, config_, seeds, population=(), sequential_seeds=False):
    """Return the agent's state and the metrics after NUM_UPDATES updates, of a population or of one run."""
    env = env_of(algo)
    make = lambda config_: agents.load(algo).make(config_, env.spec, NUM_UPDATES)
    differing = plan.vary(population, make, config_) if population else None
    placement = Placement(len(population) or 1, sequential_seeds=sequential_seeds)
    built = program.build(env, make(config_), NUM_UPDATES, placement, differing)
    state, metrics = built.chunk(built.init(np.int32(seeds)), np.int32(NUM_UPDATES))
    return jax.device_get((state.agent, dict(metrics)))


@pytest.mark.slow
@pytest.mark.parametrize("sequential_seeds", [False, True])
@pytest.mark.parametrize("algo", [algo if algo == "pqn" else slow(algo) for algo in ALGORITHMS])
def test_population_member_matches_its_single_run(algo, sequential_seeds):
    """The second of five members differs in all real hyperparameters, and is compared with its single run."""
    first = configure(ALGORITHMS[algo], **SMALL[algo])
    values = {name: value_of(first, name) for name in real_numbers(first)}
    other = {name: 0.9 * value if value else 0.05 for name, value in values.items()}
    population = (Member(7, values), Member(3, other), *(Member(seed, values) for seed in (5, 6, 7)))
    assert Placement(len(population), sequential_seeds=sequential_seeds).num_padded_seeds == 6, (
        "two on each of three devices"
    )
    together = run(algo, first, [7, 3, 5, 6, 7], population, sequential_seeds)
    alone = run(algo, replace(first, other), 3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=2e-3, atol=2e-5), together, alone)
    learner = jax.tree.leaves(together[0])
    assert any((x[0] != x[1]).any() for x in learner)


def test_evaluation_uses_hyperparameters_of_each_member():
    """The action of the agent is a hyperparameter, and the reward is the action."""

    def make(values):
        act = lambda state, inputs, carry, noise: Decision(jnp.full(NUM_ENVS, values["action"], jnp.int32))
        return Agent(None, act, act, None, rollout_length=4)

    def step(state, action):
        state, timestep = env.step(state, action)
        return state, timestep._replace(reward=jnp.float32(action))

    env = probes.constant_reward(NUM_ENVS)
    differing = Varied({"action": np.float32([0, 1])}, make)
    evaluator = Evaluator(env._replace(step=step), None, [0, 0], NUM_ENVS, differing)
    each, _ = evaluator(jnp.zeros(2), 0)
    assert each[0]["eval_return_mean"] == 0 < each[1]["eval_return_mean"]


@pytest.mark.slow
@pytest.mark.parametrize("algo", [slow(algo) if algo in UNTRACED else algo for algo in ALGORITHMS])
def test_every_real_hyperparameter_can_be_traced(algo):
    """Trace them one by one, so that a failure names one; enable every switch that reads one."""
    switches = {"dqn": [{}, {"value": "c51"}, {"value": "quantile", "noisy": True, "schedule": "linear"}]}
    switches["ppo"] = [{}, {"value": "hl_gauss"}]
    switches["sac"] = [
        {},
        {"network": "flash", "value": "hl_gauss", "rewards": "scaled", "target_entropy": None, "target_sigma": 0.15}
        | {"noise": "held", "schedule": "cosine", "std_bounds": "tanh"},
    ]
    env = env_of(algo)
    if algo in ("ppo", "sac", "td3"):
        data = Demonstrations(np.zeros((3, *env.spec.obs.shape), np.float32), np.asarray(env.spec.action.zeros(3)))
        switches[algo] = [*switches.get(algo, [{}]), {"bonus": {"kind": "bc", "data": data, "anneal": 100}}]
    for more in switches.get(algo, [{}]):
        one = configure(ALGORITHMS[algo], **SMALL[algo] | more)
        make = lambda config_: agents.load(algo).make(config_, env.spec, NUM_UPDATES)
        for name in real_numbers(one):
            pair = tuple(Member(0, {name: value}) for value in (value_of(one, name), 0.0321))
            differing = plan.vary(pair, make, one)
            one_member = {k: x[0] for k, x in differing.values.items()}
            state = jax.eval_shape(partial(program.begin, env, differing.make, 0), one_member)
            jax.eval_shape(partial(program.chunk, env, differing.make, 4), state, one_member, (1, {}))


def test_real_numbers_excludes_values_that_change_the_program():
    """A value that removes code, or that must be exact, gives another program."""
    ppo, dqn = ALGORITHMS["ppo"], ALGORITHMS["dqn"]
    names = real_numbers(ppo())
    assert {"learning_rate", "gamma", "clip_coef", "gae_lambda", "entropy_coef", "optimizer.max_grad_norm"} <= set(
        names
    )
    assert not {"target_kl", "rollout_length", "schedule", "network.hidden_sizes"} & set(names)
    assert "target_kl" in real_numbers(ppo(target_kl=0.01))
    assert "optimizer.max_grad_norm" not in real_numbers(configure(ppo, max_grad_norm=0.0))
    assert "schedule.target" in real_numbers(configure(ppo, schedule="kl"))
    assert not {"replay_ratio", "value.v_min", "value.v_max"} & set(real_numbers(configure(dqn, value="c51")))
    for algo, kind in ALGORITHMS.items():  # every float is declared as traced, or is an exception
        options = list(options_of(kind).items())
        for path, choice in options_of(kind).items():
            for part in choice.parts.values():
                options += [(f"{path}.{name}", option) for name, option in options_of(part).items()]
        floats = {name: option.traced for name, option in options if option.kind in (float, float | None)}
        assert {name for name, traced in floats.items() if not traced} == UNTRACED.get(algo, set())


def test_vary_returns_none_when_only_seeds_differ():
    assert plan.vary((Member(1, {"gamma": 0.9}), Member(5, {"gamma": 0.9})), None, None) is None


def test_member_of_reads_member_label_from_record():
    member = Member(3, {"learning_rate": 1e-3})
    assert member.label == {"seed": 3, "option.learning_rate": 1e-3}
    record = member.label | {"env_steps": 10, "learning_rate": 5e-4}
    assert member_of(record) == (("seed", 3), ("option.learning_rate", 1e-3))


def test_message_about_a_diverged_member_has_the_option_without_a_prefix():
    member = Member(3, {"learning_rate": 1e-3})
    said = divergence.describe(member.label, "loss is not finite", 64_000)
    assert said == "seed 3, learning_rate 0.001: loss is not finite at step 64k"
