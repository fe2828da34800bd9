"""Environments that step ahead of the learner, against the same environments stepped one after another in Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import envs, loop, train
from jaxrl_fast.async_rollout import on_paper
from jaxrl_fast.envs.gymnasium import description, source
from jaxrl_fast.envs.host import env as host_env
from jaxrl_fast.envs.host import pool as host_pool
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers, num_workers_ahead
from jaxrl_fast.envs.host.pool import seeds_of
from jaxrl_fast.runs import files
from jaxrl_fast.types import Agent, Decision
from jaxrl_fast.utils.errors import EnvFault, user_traceback
from tests.helpers import gym_envs
from tests.helpers.ray_clusters import local_ray
from tests.helpers.runs import bits, records, stop_after
from tests.helpers.trees import same_bits

MODULE = "tests.helpers.gym_envs"
SEED = (7, 0, 0)
NUM_ENVS, NUM_STEPS, NUM_UPDATES = 4, 3, 9
DQN: dict = dict(algo="dqn", num_envs=4, ahead=2, workers=2, rollout_length=4, total_steps=640, learning_starts=32)
DQN |= dict(hidden_sizes=(4,), batch_size=8, replay_ratio=0.25, timeout=60, replay={"size": 256})
DQN |= dict(loggers=(), log_level="quiet", log_every=64, eval_every=192, eval_episodes=4, save_every=0)


@pytest.fixture(autouse=True)
def all_pools_are_closed(monkeypatch):
    monkeypatch.setattr(host_pool, "OPEN_POOLS", [])
    yield
    for pool in list(host_pool.OPEN_POOLS):
        pool.close()


def make(ahead=2, num_workers=4, **options):
    config = HostEnvConfig(SEED, num_async_pools=num_workers, ahead=ahead, workers=Workers(1, 60.0))
    return envs.make(f"{MODULE}:Uneven", NUM_ENVS, config, **options)


def acting_agent():
    """Return an agent whose extras are the number of its updates, its noise and its recurrent state.

    Its action depends on them. The recurrent state counts the steps of an episode.
    """

    def explore(state, inputs, carry, noise):
        action = (state["updates"] + noise.astype(jnp.int32) + inputs.obs[:, 1].astype(jnp.int32)) % 2
        extras = {"updates": jnp.full(NUM_ENVS, state["updates"]), "noise": noise, "carry": carry}
        return Decision(action, carry + 1, extras)

    return Agent(
        init=lambda key: {"updates": jnp.int32(0), "unread": jnp.zeros(1000)},
        explore=explore,
        exploit=explore,
        update=lambda state, rollout, key: (state | {"updates": state["updates"] + 1}, {"rollout": rollout}),
        rollout_length=NUM_STEPS,
        sample_noise=lambda key, num_steps, num_envs: 100 * jax.random.uniform(key, (num_steps, num_envs)),
        initial_carry=jnp.int32(0),
    )


def run(env, num_updates=NUM_UPDATES, state=None):
    """Return the state after training, and the metrics of all updates, with their rollouts."""
    agent = acting_agent()
    env.host.open()
    state = jax.jit(partial(loop.init, env, agent))(jax.random.key(3)) if state is None else state
    return jax.block_until_ready(jax.jit(lambda state: loop.train(env, agent, state, num_updates))(state))


def stepped_by_hand(actions):
    """Return observations, rewards, ends and validity of actions [U * T, N], as plain gymnasium gives them."""
    columns = []
    for i, seed in enumerate(seeds_of(SEED, NUM_ENVS)):
        env, rows = gym_envs.Uneven(), []
        obs, ended = env.reset(seed=seed)[0], False
        for action in actions[:, i]:
            if ended:
                after, reward, terminated, truncated = env.reset()[0], 0.0, False, False
            else:
                after, reward, terminated, truncated, _ = env.step(5 + action)
            last = terminated or truncated
            rows.append((obs, reward, 1.0 - terminated, last, not ended, after))
            obs, ended = after, last
        columns.append([np.stack(x) for x in zip(*rows, strict=True)])
    return [np.stack(x, axis=1) for x in zip(*columns, strict=True)]


def assert_same(one, other):
    """Compare records and what was learned. How far environments are ahead at a checkpoint depends on the clock."""
    assert records(one) == records(other)
    learned = [
        {k: x for k, x in bits(run).items() if k.split("/")[0] not in ("actors", "train_envs")} for run in (one, other)
    ]
    assert any("replay" in name for name in learned[0]) and learned[0] == learned[1]


@pytest.fixture(scope="module")
def found():
    """Return the state and metrics of a run in which all steps take no time."""
    env = make()
    result = run(env)
    env.host.close()
    return result


@pytest.mark.slow
def test_rows_are_those_of_environments_stepped_by_hand(found):
    """Check observations, rewards, time limits, reset rows and the observations after each rollout."""
    rollout = found[1]["rollout"]
    steps = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), rollout.steps)
    obs, reward, discount, last, valid, after = stepped_by_hand(steps.action)
    assert (last & (discount == 1)).any() and (discount == 0).any() and not valid.all()
    np.testing.assert_array_equal(steps.obs, obs)
    np.testing.assert_allclose(steps.reward, reward, rtol=1e-6)
    for one, other in ((steps.discount, discount), (steps.last, last), (steps.valid, valid)):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(rollout.next_obs, after[NUM_STEPS - 1 :: NUM_STEPS])
    np.testing.assert_array_equal(rollout.first_obs, obs[::NUM_STEPS])
    np.testing.assert_array_equal(rollout.carry, steps.extras["carry"][::NUM_STEPS])
    np.testing.assert_array_equal(steps.extras["carry"], np.where(valid, obs[..., 1], steps.extras["carry"]))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 3])
def test_parameters_are_exactly_as_old_as_asked(ahead):
    """Check the parameters of each row, and that no random number is used twice."""
    env = make(ahead=ahead)
    _, metrics = run(env)
    env.host.close()
    extras = metrics["rollout"].steps.extras
    expected = np.maximum(np.arange(NUM_UPDATES) - ahead, 0)
    np.testing.assert_array_equal(extras["updates"], np.broadcast_to(expected[:, None, None], extras["updates"].shape))
    assert np.unique(extras["noise"]).size == extras["noise"].size


@pytest.mark.slow
def test_scores_are_those_of_the_rollouts(found):
    """Compare with sums over the games in the rows of all updates: none is counted twice or too early."""
    steps = jax.tree.map(np.asarray, found[1]["rollout"].steps)
    np.testing.assert_array_equal(found[1]["episodes"], steps.last.sum(axis=(1, 2)))
    np.testing.assert_array_equal(found[1]["valid_steps"], steps.valid.sum(axis=(1, 2)))
    flat = jax.tree.map(lambda x: x.reshape(-1, NUM_ENVS), (steps.reward, steps.last))
    returns, total = 0.0, np.zeros(NUM_ENVS)
    for reward, last in zip(*flat, strict=True):
        total += reward
        returns += total[last].sum()
        total[last] = 0
    np.testing.assert_allclose(found[1]["return_sum"].sum(), returns, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [4, 2])
def test_results_depend_neither_on_durations_nor_on_workers(num_workers, found):
    env = make(num_workers=num_workers, sleep=0.01)
    _, metrics = run(env)
    env.host.close()
    assert same_bits(metrics, found[1])


@pytest.mark.slow
def test_fast_environments_do_not_wait_for_a_slow_one():
    """When the slow environment has finished a rollout, the others have finished K more, and none is further."""
    env = make(ahead=2, slow_seed=seeds_of(SEED, NUM_ENVS)[1], slow=0.5)
    state, _ = run(env, num_updates=1)
    env.host.close()
    progress = state.actors.progress
    np.testing.assert_array_equal(progress.rollout, [3, 1, 3, 3])
    np.testing.assert_array_equal(progress.pending, [False, True, False, False])  # it steps during the update


@pytest.mark.slow
def test_state_is_saved_and_restored_with_pending_steps(found):
    env = make(sleep=0.05)
    state, first = run(env, num_updates=4)
    assert state.actors.progress.pending.any()
    saved = env.host.save()
    env.host.close()
    env = make()
    env.host.open()
    env.host.load(saved)
    _, second = run(env, NUM_UPDATES - 4, state)
    env.host.close()
    assert same_bits(jax.tree.map(lambda *x: jnp.concatenate(x), first, second), found[1])


def test_only_leaves_that_the_policy_reads_are_copied():
    env, agent = on_paper(make()), acting_agent()
    state = jax.eval_shape(partial(loop.init, env, agent), jax.random.key(0))
    assert [x.shape for x in state.actors.policies] == [(3,)]  # the number of updates, and not `unread`


@pytest.mark.parametrize(
    "workers, number", [("auto", 6), (4, 0), (3, 3), (64, 6), (0, 0)], ids=["auto", "4", "3", "64", "0"]
)
def test_number_of_workers_divides_environments(workers, number):
    if number:
        assert num_workers_ahead(6, Workers(workers)) == number
        return
    remedy = "use 3" if workers else "use 6"
    with pytest.raises(ValueError, match=rf"^host\.workers: must .*, got {workers}; {remedy}$"):
        num_workers_ahead(6, Workers(workers))


def test_auto_is_a_divisor_of_many_environments():
    assert num_workers_ahead(100, Workers("auto")) == 25


WRONG = [
    (dict(algo="ppo"), "host.ahead: requires an algorithm with a replay, got ppo; use dqn, sac, td3 or ddpg"),
    (dict(algo="pqn"), "host.ahead: requires an algorithm with a replay, got pqn; use dqn, sac, td3 or ddpg"),
    (dict(async_pools=2), "host.ahead: makes a pool of each worker, got async_pools 2; leave it out"),
    (dict(workers=0), "host.workers: must be 1 or more with host.ahead, got 0; use 4"),
    (dict(workers=3), "host.workers: must divide 4 environments with host.ahead, got 3; use 2"),
    (dict(devices=2), "host.ahead: requires one device, got devices 2; use 1"),
    (dict(env="CartPole-v1"), "host.ahead: gymnax/CartPole-v1 has no worker processes, got 2; leave it out"),
]


@pytest.mark.parametrize("given, message", WRONG, ids=[" ".join(map(str, next(iter(w[0].items())))) for w in WRONG])
def test_wrong_options_are_refused_in_one_line(given, message, tmp_path, capsys):
    options = dict(env=f"{MODULE}:Walk", algo="dqn") | given
    algo, env = options.pop("algo"), options.pop("env")
    flags = [f"--{name if name == 'devices' else f'host.{name}'}={value}" for name, value in options.items()]
    flags += ["--num-envs=4", "--host.ahead=2", "--run-dir", str(tmp_path / "run")]
    assert train.main([algo, "--env", env, *flags]) == 2
    assert capsys.readouterr().err.strip().removeprefix("error: ") == message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["dqn", "sac", "td3", "ddpg"])
def test_resume_within_episodes_matches_uninterrupted_run(algo, tmp_path, monkeypatch):
    """Compare records, evaluations and the last checkpoint; also counts of steps and of gradient steps."""
    options = DQN | dict(algo=algo, env=f"{MODULE}:{'Walk' if algo == 'dqn' else 'Slide'}")
    fit = partial(jaxrl_fast.fit, **options)
    whole = fit(run_dir=str(tmp_path / "whole"))
    stop_after(monkeypatch, 128)
    stopped = fit(run_dir=str(tmp_path / "parts")).summary
    assert stopped["status"] == "stopped" and stopped["env_steps"] < 640
    parts = jaxrl_fast.fit(resume=str(tmp_path / "parts"), log_level="quiet")
    assert_same(whole.folder, parts.folder)
    assert whole.summary["evaluations"] == parts.summary["evaluations"]
    assert whole.summary["env_steps"] == 640
    assert [record["gradient_steps"] for record in records(whole.folder)] == [8] + 9 * [16]  # 0.25 a step after 32


@pytest.mark.slow
def test_algorithms_with_memory_n_step_and_replay_on_host_resume_exactly(tmp_path, monkeypatch):
    """Sequences with stored recurrent states, and n-step returns, span rollouts that were acted ahead."""
    options = DQN | dict(
        env=f"{MODULE}:Walk", wrap=("previous",), memory={"kind": "gru", "sequence_length": 8, "burn_in": 2}
    )
    options |= dict(replay={"size": 256, "storage": "host", "n_step": 3}, ahead=1)
    fit = partial(jaxrl_fast.fit, **options)
    whole = fit(run_dir=str(tmp_path / "whole"))
    stop_after(monkeypatch, 128)
    fit(run_dir=str(tmp_path / "parts"))
    parts = jaxrl_fast.fit(resume=str(tmp_path / "parts"), log_level="quiet")
    assert_same(whole.folder, parts.folder)


def faulty(fault, timeout_s=60.0):
    """Return environments whose third step fails. They bypass the trial steps of `make`, which would fail."""
    described = description.describe(source.from_object(gym_envs.Walk, {"fault": ""}, f"{MODULE}:Walk"))
    described = described._replace(source=described.source._replace(arguments={"fault": fault}))
    config = HostEnvConfig(SEED, num_async_pools=4, ahead=2, workers=Workers(1, timeout_s))
    return description.from_description(described, NUM_ENVS, config)


@pytest.mark.slow
def test_exception_of_environment_is_raised_with_its_traceback():
    with pytest.raises(ZeroDivisionError) as raised, host_env.original_errors():
        run(faulty("raise"))
    assert "gym_envs.py" in user_traceback(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("fault, message", [("hang", "no answer of a worker process within 1 s"), ("die", "ended")])
def test_hanging_or_dead_worker_raises_fault(fault, message):
    with pytest.raises(EnvFault, match=message), host_env.original_errors():
        run(faulty(fault, 1.0))


@pytest.mark.slow
def test_failed_run_is_saved_and_resumes_with_new_episodes(tmp_path, capsys):
    """The environment fails in the 60th step of each episode: the resumed run fails later."""
    folder, steps = tmp_path / "run", []
    options = DQN | dict(env=f"{MODULE}:Walk", env_options=dict(fault="raise", fault_at=60, limit=90, size=99))
    options |= dict(total_steps=6400, eval_every=0)
    for given in (options, dict(resume=str(folder), log_level="quiet")):
        with pytest.raises(ZeroDivisionError):
            jaxrl_fast.fit(**given, **({} if "resume" in given else {"run_dir": str(folder)}))
        steps.append(files.read_summary(folder)["env_steps"])
        assert f"saved at step {steps[-1]}, before the environment failed" in capsys.readouterr().err
    assert 0 < steps[0] < steps[1] < 6400


@pytest.mark.slow
def test_resume_with_another_number_of_workers_is_refused(tmp_path, capsys):
    options = DQN | dict(env=f"{MODULE}:Walk", total_steps=64, eval_every=0, eval_episodes=0)
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "run"))
    with pytest.raises(
        ValueError, match=r"^host\.workers: a run with host.ahead keeps its workers, got 4; use 2 or ray:2$"
    ):
        jaxrl_fast.fit(resume=str(tmp_path / "run"), workers=4, total_steps=128)


@pytest.mark.slow
def test_ray_actors_and_processes_give_the_same_bits(tmp_path):
    options = DQN | dict(env=f"{MODULE}:Walk", total_steps=128, eval_every=0, eval_episodes=0)
    ray = local_ray()
    next(ray)
    runs = [jaxrl_fast.fit(**(options | dict(workers=w)), run_dir=str(tmp_path / f"{w}")) for w in (2, "ray:2")]
    next(ray, None)
    assert_same(*(run.folder for run in runs))


@pytest.mark.slow
def test_divergence_ends_the_run_in_one_line(tmp_path):
    options = DQN | dict(env=f"{MODULE}:Walk", learning_rate=1e30, eval_every=0)
    with pytest.raises(FloatingPointError, match=r"is not finite at step .*; try a lower learning rate, unless"):
        jaxrl_fast.fit(**options, run_dir=str(tmp_path / "run"))
