"""Quarantine of environments with nonfinite values, on the device and on the host. The oracle is a plain loop."""

import functools
import operator

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

import jaxrl_fast
from jaxrl_fast import async_rollout, envs, rollout
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers, Wrappers
from jaxrl_fast.envs.wrappers import quarantine, time_limit
from jaxrl_fast.replay import ring
from jaxrl_fast.training import evaluator
from jaxrl_fast.types import Agent, Decision, Discrete, Transition, View
from jaxrl_fast.types.host import HostEnv
from tests.helpers import probes
from tests.helpers.gym_envs import Walk
from tests.helpers.runs import records
from tests.helpers.trees import same_bits

FAIL, LIMIT = 3, 5  # the step of an episode that fails, and its time limit
T, N = 40, 6
MODULE = "tests.envs.test_quarantine"


class Unstable:
    """A fraction `share` of the episodes, marked in the observation, is not finite from step FAIL on.

    All episodes have LIMIT steps, except that marked ones terminate at step FAIL with kind "terminal". With kind
    "reward", only the reward of step FAIL is infinite, and later steps are finite. With kind "reset", the first
    observation is NaN already.
    """

    default_params = ()

    def __init__(self, kind: str = "obs", share: float = 0.5):
        self.kind, self.share = kind, share

    def reset_env(self, key, params):
        state = jnp.array([0.0, jax.random.bernoulli(key, self.share)])
        return self.observe(state), state

    def step_env(self, key, state, action, params):
        state = state + jnp.array([1.0, 0.0])
        bad = (state[0] >= FAIL) & (state[1] == 1)
        reward = jnp.where(bad & (state[0] == FAIL) & (self.kind == "reward"), jnp.inf, 1.0)
        return self.observe(state), state, reward, bad & (self.kind == "terminal"), {}

    def observe(self, state):
        at = {"obs": FAIL, "terminal": FAIL, "reward": LIMIT + 1, "reset": 0}[self.kind]
        return jnp.where((state[0] >= at) & (state[1] == 1), jnp.nan, state)

    def is_truncated(self, state, params):
        return state[0] >= LIMIT

    def action_space(self, params):
        return spaces.Discrete(2)


def make(kind="obs", num_envs=N, on_device=True, share=0.5):
    """Return a guarded environment. If not on_device, it cannot be reset from outside, like a pool of envpool."""
    env = envs.make(Unstable(kind, share), num_envs)
    return quarantine.guard(env if on_device else env._replace(host=HostEnv()))


def counting_agent(num_steps=T):
    """Return an agent whose recurrent state counts the steps since the reset."""
    act = lambda state, inputs, carry, noise: Decision(jnp.zeros(len(carry), jnp.int32), carry + 1, carry)
    return Agent(lambda key: (), act, act, lambda *_: None, num_steps, initial_carry=jnp.int32(0))


def play(env, num_steps=T, seed=0):
    return jax.device_get(jax.jit(lambda key: play_from(env, num_steps, key))(jax.random.key(seed)))


def play_from(env, num_steps, key):
    agent = counting_agent(num_steps)
    actors = rollout.reset(env, agent, key)
    return rollout.collect(env, agent, functools.partial(agent.explore, ()), actors, jnp.zeros(num_steps), num_steps)


def expected(obs, on_device):
    """Return rows (time, last, valid, failed) of one environment. Its observations [T, 2] mark episodes that fail."""
    rows = []
    while len(rows) < len(obs):
        is_bad = obs[len(rows), 1] == 1
        length = FAIL - 1 if is_bad else LIMIT
        rows += [(t, t == length - 1, True, False) for t in range(length)]
        if is_bad:  # agents see the observation before the failed step until a pool's own episode ends at its limit
            num_failed = 1 if on_device else LIMIT - FAIL + 1
            rows += [(length, True, False, True)] * num_failed
        rows += [(length, False, False, False)]  # the reset
    return [np.array(x) for x in zip(*rows[: len(obs)])]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "on_device"), [("obs", True), ("reward", False)])
def test_quarantined_rows_match_plain_loop(kind, on_device):
    """All values in the rollout are finite. The row before a failed step truncates the episode."""
    _, experience, metrics = play(make(kind, on_device=on_device))
    steps = experience.steps
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(experience) if x.dtype == np.float32)
    num_failed, num_ended = 0, 0
    for i in range(N):
        time, last, valid, failed = expected(steps.obs[:, i], on_device)
        np.testing.assert_array_equal(steps.obs[:, i, 0], time)
        np.testing.assert_array_equal(steps.last[:-1, i], last[:-1])  # a failure after the rollout is not known yet
        np.testing.assert_array_equal(steps.valid[:, i], valid)
        np.testing.assert_array_equal(steps.reward[:, i], valid.astype(np.float32))
        np.testing.assert_array_equal(steps.extras[:, i][valid], time[valid])  # the recurrent state is reset
        num_failed += failed.sum()
        num_ended += (time[valid] == LIMIT - 1).sum()
    assert (steps.discount == 1).all()
    assert num_failed > N and num_ended > N
    assert (metrics["quarantined"], metrics["episodes"]) == (num_failed, num_ended)
    assert metrics["return_min"] == metrics["return_max"] == LIMIT  # an interrupted episode has no score
    assert metrics["valid_steps"] == steps.valid.sum()


def test_nonfinite_terminal_observation_is_not_quarantined():
    _, experience, metrics = play(make("terminal"))
    assert metrics["quarantined"] == 0 and np.isfinite(experience.steps.obs).all()
    assert metrics["return_min"] == FAIL and metrics["return_max"] == LIMIT


@pytest.mark.parametrize("on_device", [True, False])
def test_episode_with_nan_first_observation_has_no_valid_rows(on_device):
    """Its rows are all invalid. Its observation is 0 or the last one of the previous episode."""
    _, experience, metrics = play(make("reset", on_device=on_device))
    steps = experience.steps
    assert np.isfinite(steps.obs).all() and not steps.obs[0, :, 1].any()
    assert not steps.valid[0].all() and steps.valid[0].any()
    assert (steps.obs[steps.valid][:, 1] == 0).all()
    assert metrics["return_min"] == metrics["return_max"] == LIMIT


@pytest.mark.slow
def test_rollout_length_does_not_change_quarantined_rows():
    """`last` is excluded: it may differ before a failure in the next rollout, where the bootstrap value is the same."""
    env, agent = make(), counting_agent(7)
    policy, whole = functools.partial(agent.explore, ()), play(make(), 21)[1]
    collect = jax.jit(lambda actors: rollout.collect(env, agent, policy, actors, jnp.zeros(7), 7)[:2])
    actors, parts = rollout.reset(env, agent, jax.random.key(0)), []
    for _ in range(3):
        actors, part = collect(actors)
        parts.append(part.steps._replace(last=()))
    assert same_bits(jax.tree.map(lambda *x: jnp.concatenate(x), *parts), whole.steps._replace(last=()))


@pytest.mark.slow
def test_vmapped_seeds_match_single_seed_in_quarantine():
    env, keys = make(), jax.vmap(jax.random.key)(jnp.arange(2))
    both = jax.jit(jax.vmap(functools.partial(play_from, env, T)))(keys)[1:]
    assert same_bits(jax.tree.map(lambda x: x[1], both), play(env, seed=1)[1:])


def test_quarantined_rows_of_async_pools_match_plain_loop():
    """Use two pools, each with half of the environments. The policy ignores observations, so its lag has no effect."""
    parts = [probes.pooled(envs.make(Unstable(), N // 2)) for _ in range(2)]

    def reset(key):
        states, timesteps = zip(*(part.reset(k) for part, k in zip(parts, jax.random.split(key))))
        return (states, jnp.uint8(0)), jax.tree.map(lambda *x: jnp.concatenate(x), *timesteps)

    def send(i, state, action):
        states = list(state[0])
        states[i] = parts[i].pools.send(0, states[i], action)
        return tuple(states), state[1]

    def receive(i, state):
        states = list(state[0])
        states[i], timestep = parts[i].pools.receive(0, states[i])
        return (tuple(states), state[1]), timestep

    first = parts[0]
    host = HostEnv(pools=first.pools._replace(num=2, send=send, receive=receive))
    env = quarantine.guard(first._replace(reset=reset, spec=first.spec._replace(num_envs=N), host=host, view=View()))
    agent = counting_agent()

    @jax.jit
    def run(key):
        policy = functools.partial(agent.explore, ())
        return async_rollout.collect(env, agent, policy, async_rollout.begin(env, agent, policy, key), key)[1:3]

    experience, metrics = jax.device_get(run(jax.random.key(3)))
    for i in range(N):
        time, last, valid, _ = expected(experience.steps.obs[:, i], False)
        np.testing.assert_array_equal(experience.steps.obs[:, i, 0], time)
        np.testing.assert_array_equal(experience.steps.last[:-1, i], last[:-1])
        np.testing.assert_array_equal(experience.steps.valid[:, i], valid)
    assert metrics["quarantined"] > 0


def test_n_step_target_stops_before_failed_row_of_next_rollout():
    """Rewards are 1, 2 | 0, 4, ... The first row of the second rollout failed, so the target of reward 2 is only 2."""
    config = ring.ReplayConfig(num_rows=8, num_envs=1, n_step=3)
    numbers = jnp.arange(8, dtype=jnp.float32)[:, None]
    row = Transition(
        obs=numbers[..., None], action=jnp.zeros((8, 1), jnp.int32), reward=1 + numbers, discount=jnp.ones((8, 1)),
        last=numbers == 2, valid=numbers != 2, extras=(),
    )  # fmt: skip
    made = ring.init(config, jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2))
    for part in (slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)):
        made = ring.add(config, made, jax.tree.map(operator.itemgetter(part), row))
    sample = ring.read(config, made, jnp.array([0, 1, 3]), jnp.zeros(3, jnp.int32), 0.5)
    assert sample.reward.tolist() == [1 + 0.5 * 2, 2, 4 + 0.5 * 5 + 0.25 * 6]
    assert sample.discount.tolist() == [0.25, 0.5, 0.125]
    assert sample.next_obs[:, 0].tolist() == [2, 2, 6]


def test_resize_and_terminating_time_limit_keep_quarantine():
    env = time_limit.terminating(make()).view.resize(3, HostEnvConfig())
    _, experience, metrics = play(env)
    assert metrics["quarantined"] > 0 and experience.steps.obs.shape == (T, 3, 2)
    assert np.isfinite(experience.steps.obs).all()


@pytest.mark.parametrize(("fault", "num_workers"), [("nan", 0), ("nan", 2), ("reward nan", 0), ("reward huge", 0)])
def test_gymnasium_pool_resets_after_failed_step(fault, num_workers):
    """Step 3 of each episode fails. Each episode gives two valid rows, the failed row, and the reset row."""
    config = HostEnvConfig(seed=(0,), workers=Workers(num_workers), wrappers=Wrappers(quarantine=True))
    env = envs.make(Walk, 2, config, size=9.0, fault=fault, fault_at=3)
    try:
        _, experience, metrics = play(env, 12)
    finally:
        env.host.close()
    steps = experience.steps
    np.testing.assert_array_equal(steps.obs[..., 1], np.tile([[0, 1, 2, 2]], 3).T.repeat(2, 1))
    np.testing.assert_array_equal(steps.valid, np.tile([[True, True, False, False]], 3).T.repeat(2, 1))
    np.testing.assert_array_equal(steps.last, np.tile([[False, True, True, False]], 3).T.repeat(2, 1))
    assert np.isfinite(steps.reward).all() and metrics["quarantined"] == 6 and metrics["episodes"] == 0


def test_evaluation_stops_at_step_limit_when_environment_always_fails(monkeypatch):
    monkeypatch.setattr(evaluator, "MAX_STEPS", 20)
    env = make(share=1.0, num_envs=2)
    run = evaluator.Evaluator(env, counting_agent(), [0], 4)
    score, _, ended = run.episodes((), 0)
    assert score.shape == (1, 4) and not ended.any()


def test_is_physics_is_true_for_physics_tasks_alone():
    found = {env: envs.is_physics(env) for env in ("envpool/Ant-v4", "envpool/WalkerWalk-v1", "gymnasium/Hopper-v5")}
    assert found == dict.fromkeys(found, True)
    others = ["envpool/Pong-v5", "gymnasium/CartPole-v1", "CartPole-v1", f"{MODULE}:Unstable", Unstable, gymnasium.Env]
    assert not any(map(envs.is_physics, others))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "options"), [("ppo", {}), ("dqn", dict(replay={"size": 512, "n_step": 3}, learning_starts=64))]
)
def test_training_counts_quarantined_rows_and_warns(algo, options, tmp_path, capsys):
    """About 1 of 100 episodes fails, which is fewer than 1% of the rows."""
    run = jaxrl_fast.fit(
        algo=algo, env=Unstable, env_options={"share": 0.01}, wrap=["quarantine"], num_envs=8, total_steps=4096,
        hidden_sizes=(8,), eval_episodes=8, run_dir=tmp_path / algo, loggers=(), **options,
    )  # fmt: skip
    assert run.summary["status"] == "done"
    assert sum(record["quarantined"] for record in records(tmp_path / algo)) > 0
    assert "returned NaN or infinity by step" in capsys.readouterr().err


@pytest.mark.slow
def test_training_stops_when_too_many_rows_are_quarantined(tmp_path):
    problem = f"seed 0: more than 1% of its steps are in quarantine at step .*; {MODULE}:Unstable returns NaN"
    with pytest.raises(FloatingPointError, match=problem):
        jaxrl_fast.fit(
            algo="ppo", env=Unstable, wrap=["quarantine"], num_envs=8, total_steps=8192, run_dir=tmp_path / "run",
            loggers=(), log_level="quiet", hidden_sizes=(8,),
        )  # fmt: skip
