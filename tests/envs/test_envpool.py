"""Environments of envpool: each row matches envpool's own Python API, and no input crashes the process.

Episodic lives, time limits and sticky actions come from envpool itself. The oracle interprets envpool's results by the
rules of `types.TimeStep`.
"""

import functools
import itertools
import platform
import re
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any, NamedTuple

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageSequence

import jaxrl_fast
from jaxrl_fast import envs, evaluate, loop, train, video
from jaxrl_fast.agents import ppo
from jaxrl_fast.config import load, resume
from jaxrl_fast.envs.envpool import pool as adapter
from jaxrl_fast.envs.envpool import tasks
from jaxrl_fast.envs.host import pool as host_pool
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.evaluation import saved_run
from jaxrl_fast.loggers import terminal
from jaxrl_fast.options.declare import configure
from jaxrl_fast.parallel import program
from jaxrl_fast.replay.ring import ReplayConfig, add, init, read
from jaxrl_fast.rollout import collect
from jaxrl_fast.runs import checkpoint, files
from jaxrl_fast.training import console, memory, plan, trainer
from jaxrl_fast.training import evaluator as evaluation
from jaxrl_fast.types import Agent, Box, Decision, Discrete, Learning, PolicyInput, Transition
from jaxrl_fast.utils.importing import install
from jaxrl_fast.utils.memory import nbytes
from tests.helpers import slow
from tests.helpers.host_envs import AGENTS, SHORT, random_actions, run
from tests.helpers.runs import same, stop_after

SEED = (3, 0, 0)
NUM_ENVS = 2
HAS_QT = platform.machine() == "x86_64"  # other architectures have no Qt package
CASES = {  # id, options, protocol, steps
    "lives": ("Breakout-v5", {}, "dqn2015", 200),
    "sticky": ("Breakout-v5", {}, "machado2018", 200),
    "time limit": ("Breakout-v5", {"max_episode_steps": 25}, "machado2018", 80),
    "lives and time limit": ("Breakout-v5", {"max_episode_steps": 40}, "dqn2015", 120),
    "vector": ("CartPole-v1", {}, "", 60),
    "continuous": ("Pendulum-v1", {"max_episode_steps": 20}, "", 50),
    "64 bits": ("Ant-v4", {"max_episode_steps": 30}, "", 70),
    "a tree, one-hot, text": ("MiniGrid-Empty-5x5-v0", {"max_episode_steps": 25}, "", 60),
    "a number": ("FrozenLake-v1", {}, "", 60),
    "box2d": ("LunarLander-v3", {}, "", 150),
    "dm_control": ("CartpoleBalance-v1", {"max_episode_steps": 20}, "", 50),
    **({"procgen": ("BossfightEasy-v0", {"num_levels": 3}, "", 120)} if HAS_QT else {}),
    "one part with a name": ("PandaPickCubeCartesian-v1", {"max_episode_steps": 20}, "", 50),
}


FAST = ("lives", "lives and time limit", "vector", "continuous", "a tree, one-hot, text", "dm_control")
each_case = pytest.mark.parametrize("case", [case if case in FAST else slow(case) for case in CASES])


class Game(NamedTuple):
    """A sequence of actions and the time steps that followed."""

    env: Any
    actions: np.ndarray  # [T, N, ...]
    first: Any  # TimeStep [N]
    steps: Any  # TimeStep [T, N]


@functools.cache
def play(case, path):
    name, options, protocol, num_steps = CASES[case]
    env = envs.make(f"envpool/{name}", NUM_ENVS, HostEnvConfig(SEED, protocol, path), **options)
    actions = random_actions(env.spec, num_steps)
    return Game(env, actions, *run(env, actions))


def envpool_rows(case):
    """Return the rows of envpool's own Python API: [T + 1] observations, and [T] rewards, end flags and infos."""
    name, options, protocol, num_steps = CASES[case]
    rules = {
        "dqn2015": dict(episodic_life=True, noop_max=30, use_fire_reset=True),
        "machado2018": dict(repeat_action_probability=0.25, noop_max=1, use_fire_reset=False),
        "": {},
    }[protocol]
    seed = host_pool.seeds_of(SEED, NUM_ENVS)
    pool = envpool.make_gymnasium(name, num_envs=NUM_ENVS, seed=seed, **rules, **options)
    actions = random_actions(envs.make(f"envpool/{name}", NUM_ENVS, **options).spec, num_steps)
    space = pool.action_space
    if not np.issubdtype(space.dtype, np.integer):
        actions = (0.5 * (space.low + space.high) + actions * (0.5 * (space.high - space.low))).astype(space.dtype)
    rows, obs = [], [pool.reset()[0]]
    for action in actions:
        after, *row = pool.step(action)
        obs.append(after)
        rows.append(row)
    return obs, rows


def without_denormals(x):
    """Replace subnormal numbers by 0, as compiled programs do."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, 0, x) if x.dtype.kind == "f" else x


@pytest.mark.parametrize("path", ["ffi", slow("callback")])
@each_case
def test_rows_match_envpool_gymnasium_api(case, path):
    game, (obs, rows) = play(case, path), envpool_rows(case)
    stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)
    ours = jax.tree.map(lambda a, b: np.concatenate([a[None], b]), game.first.obs, game.steps.obs)
    theirs = stack(obs)
    if case == "a tree, one-hot, text":
        theirs |= {"direction": np.eye(4)[theirs["direction"]], "mission": theirs["mission"] / 256}
    elif case == "a number":
        theirs = np.eye(16)[theirs]
    elif game.env.spec.frame_stack or case == "procgen":
        theirs = np.moveaxis(theirs, 2, -1)
    compared = lambda a, b: np.testing.assert_array_equal(a, without_denormals(b.astype(a.dtype)))
    jax.tree.map(compared, ours, theirs)
    reward, terminated, truncated = (np.stack([row[i] for row in rows]) for i in range(3))
    over = np.stack([row[3].get("terminated", np.zeros(NUM_ENVS)) for row in rows]) > 0
    if case == "dm_control":  # it returns a reward with the first observation of an episode
        assert (reward[1:][truncated[:-1]] > 0).all()
        reward[1:][truncated[:-1]] = 0
    np.testing.assert_array_equal(game.steps.reward, reward.astype(np.float32))
    np.testing.assert_array_equal(game.steps.last, terminated | truncated | over)
    np.testing.assert_array_equal(game.steps.discount, 1.0 - (terminated | over))
    if game.steps.score:
        np.testing.assert_array_equal(game.steps.score.game_over, over | truncated)
        np.testing.assert_array_equal(game.steps.score.reward, reward)


@each_case
def test_step_after_last_has_reward_zero_and_does_not_end(case):
    steps = play(case, "ffi").steps
    assert steps.last.any(), "the test needs episode ends"
    begins = steps.last[:-1]
    assert (steps.reward[1:][begins] == 0).all() and (steps.discount[1:][begins] == 1).all()
    assert not steps.last[1:][begins].any()


def test_life_loss_terminates_episode_but_not_game():
    steps = play("lives", "ffi").steps
    lost = steps.last & ~steps.score.game_over
    assert lost.sum() > steps.score.game_over.sum() > 0
    assert (steps.discount[lost] == 0).all()


def test_time_limit_truncates_with_discount_one():
    for case in ("time limit", "continuous", "64 bits"):
        steps = play(case, "ffi").steps
        assert (steps.last & (steps.discount == 1)).any(), case


@pytest.mark.parametrize(("case", "dies"), [("vector", True), ("continuous", False)])
def test_nan_observation_becomes_zero_only_when_terminated(case, dies, monkeypatch):
    """Every observation is patched to NaN. Terminal ones become 0, because their value is not used. Others stay NaN."""
    encode = tasks.encode
    monkeypatch.setattr(tasks, "encode", lambda spaces, obs: encode(spaces, obs) * jnp.nan)
    name, options, protocol, num_steps = CASES[case]
    env = envs.make(f"envpool/{name}", NUM_ENVS, HostEnvConfig(SEED, protocol), **options)
    _, steps = run(env, random_actions(env.spec, num_steps))
    died = steps.discount == 0
    assert steps.last.any() and died.any() == dies
    assert (steps.obs[died] == 0).all() and np.isnan(steps.obs[~died]).all()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_QT, reason="Qt has no package for this architecture")
def test_procgen_truncates_at_its_own_time_limit():
    """envpool uses max_episode_steps only to label ends. If it were too low, terminations would become truncations."""
    for name, limit in (("MazeEasy-v0", 500), ("JumperMemory-v0", 2000)):
        env = envs.make(f"envpool/{name}", NUM_ENVS, HostEnvConfig(SEED))
        assert env.reset.args[0].pools[0].pool.envs.config["max_episode_steps"] == limit
        steps = run(env, np.full((limit, NUM_ENVS), 4, np.int32))[1]  # action 4 does not move
        assert not steps.last[:-1].any() and steps.last[-1].all() and (steps.discount == 1).all()
    ends = play("procgen", "ffi").steps
    assert (ends.discount[ends.last] == 0).all()


@pytest.mark.slow
def test_game_over_at_time_limit_step_is_terminated():
    game = play("sticky", "ffi")
    end = int(np.argmax(game.steps.last[:, 0]))
    assert game.steps.last[end, 0] and game.steps.discount[end, 0] == 0
    env = envs.make("envpool/Breakout-v5", NUM_ENVS, HostEnvConfig(SEED, "machado2018"), max_episode_steps=end + 1)
    steps = run(env, game.actions[: end + 1])[1]
    np.testing.assert_array_equal(steps.obs[:, 0], game.steps.obs[: end + 1, 0])
    assert steps.last[end, 0] and steps.discount[end, 0] == 0


@pytest.mark.slow
def test_rollout_scores_are_unclipped_and_span_all_lives():
    """PPO clips rewards. The scores of the rollout equal sums over envpool's own `info` for the same actions."""
    name, options, protocol, num_steps = CASES["lives"]
    env = envs.make(f"envpool/{name}", NUM_ENVS, HostEnvConfig(SEED, protocol), **options)
    config = configure(ppo.Config, rollout_length=num_steps, network="mlp", hidden_sizes=(8,), rewards="sign")
    agent = ppo.make(config, env.spec, 1)

    @jax.jit
    def act(key):
        state = loop.init(env, agent, key)
        noise = agent.sample_noise(key, num_steps, NUM_ENVS)
        policy = functools.partial(agent.explore, state.agent)
        return collect(env, agent, policy, state.actors, noise, num_steps)[1:]

    experience, scores = jax.device_get(act(jax.random.key(1)))
    pool = envpool.make_gymnasium(name, num_envs=NUM_ENVS, seed=host_pool.seeds_of(SEED, NUM_ENVS), episodic_life=True)
    pool.reset()
    score, length, finished = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int), []
    last = np.zeros(NUM_ENVS, bool)
    for action in experience.steps.action:
        _, _, terminated, truncated, info = pool.step(action)
        score, length = score + info["reward"], length + ~last
        last = terminated | truncated
        for i in np.flatnonzero((info["terminated"] > 0) | truncated):
            finished.append((score[i], length[i]))
            score[i] = length[i] = 0
    assert scores["episodes"] == len(finished) > 0
    assert scores["return_sum"] == sum(s for s, _ in finished)
    assert scores["length_sum"] == sum(n for _, n in finished)


def games(valid, reward, over):
    """Return (score, length) of each game that ended in rows [T, N]. An invalid row does not count as a step."""
    found, score, length = [], np.zeros(over.shape[1]), np.zeros(over.shape[1], int)
    for t in range(len(over)):
        score, length = score + reward[t], length + valid[t]
        for i in np.flatnonzero(over[t]):
            found.append((score[i], length[i]))
            score[i] = length[i] = 0
    return found


def check_policy_version(agent, steps, learners):
    """Check that stored policy outputs fit the observations. Row 0 uses the learner of the rollout before."""
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(0), 1, steps.obs.shape[2]))
    policy = jax.jit(lambda learner, obs: agent.explore(learner, PolicyInput(obs), (), noise).extras)
    learner = lambda k: jax.tree.map(lambda x: x[k], learners)
    apart = lambda a, b: max(np.abs(x - y).max() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    for k in (1, 2):
        for row, by, not_by in ((0, k - 1, k), (1, k, k - 1)):
            beside = jax.tree.map(lambda x: x[k, row], steps.extras)  # noqa: B023
            assert apart(beside, policy(learner(by), steps.obs[k, row])) < 1e-3
            assert apart(beside, policy(learner(not_by), steps.obs[k, row])) > 1e-2, "the update must change the policy"


@pytest.mark.slow
@pytest.mark.parametrize(("num_pools", "path"), [(1, "ffi"), (2, "ffi"), (2, "callback")])
def test_async_pools_match_synchronous_pool_across_updates(num_pools, path):
    """Run three rollouts with updates between them. The oracle is a synchronous pool with the same actions."""
    num_steps, num_envs = 120, 4
    host_config = HostEnvConfig(SEED, "dqn2015", path, num_pools)
    env = envs.make("envpool/Breakout-v5", num_envs, host_config)
    network, once = {"kind": "mlp", "hidden_sizes": (8,)}, dict(num_minibatches=1, num_epochs=1)
    config = configure(ppo.Config, rollout_length=num_steps, network=network, **once, learning_rate=0.01)
    agent = ppo.make(config, env.spec, 3)
    whole = agent._replace(learning=Learning(lambda obs: (agent.learning.compress_obs(obs), obs)))

    def update(state, key):
        actors, experience, scores = loop.act(env, whole, state.agent, state.actors, key)
        kept, obs = experience.steps.obs
        experience = experience._replace(steps=experience.steps._replace(obs=kept))
        learner, _ = agent.update(state.agent, experience, key)
        seen = experience._replace(steps=experience.steps._replace(obs=obs))
        return state._replace(agent=learner, actors=actors), (seen, scores, state.agent)

    def program(key):
        key_init, key = jax.random.split(key)
        return jax.lax.scan(update, loop.init(env, agent, key_init), jax.random.split(key, 3))[1]

    experience, scores, learners = jax.device_get(jax.jit(program)(jax.random.key(2)))
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), experience.steps)
    waiting = envs.make("envpool/Breakout-v5", num_envs, host_config._replace(num_async_pools=0))
    first, steps = run(waiting, rows.action)
    np.testing.assert_array_equal(rows.obs, np.concatenate([first.obs[None], steps.obs[:-1]]))
    for name in ("reward", "discount", "last"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(steps, name))
    np.testing.assert_array_equal(rows.valid, ~np.concatenate([first.last[None], steps.last[:-1]]))
    np.testing.assert_array_equal(experience.next_obs[:-1], experience.steps.obs[1:, 0])
    np.testing.assert_array_equal(experience.first_obs, experience.steps.obs[:, 0])
    whole_games = games(rows.valid, steps.score.reward, steps.score.game_over)
    assert scores["episodes"].sum() == len(whole_games) > 0
    assert scores["return_sum"].sum() == sum(score for score, _ in whole_games) > 0
    assert scores["length_sum"].sum() == sum(length for _, length in whole_games)
    assert scores["return_max"].max() == max(score for score, _ in whole_games)
    check_policy_version(agent, experience.steps, learners)
    agree = (rows.action[:, :, None] == rows.action[:, None, :]).mean(0)
    assert agree[~np.eye(num_envs, dtype=bool)].max() < 0.5, "independent draws: about 1/4 agree"


@pytest.mark.parametrize("async_pools", [0, 1, 2])
def test_each_row_uses_exploration_noise_of_its_own_step(async_pools):
    """Noise index t applies to row t, although asynchronous pools choose each action one row earlier.

    Agent state and noise count rows, so the value stored with row t is t.
    """
    env = envs.make("envpool/CartPole-v1", 4, HostEnvConfig(SEED, num_async_pools=async_pools))
    in_all = lambda obs, number: jnp.full(len(obs), number, jnp.int32)
    decide = lambda rows, inputs, carry, row: Decision(in_all(inputs.obs, 0), (), in_all(inputs.obs, rows + row))
    agent = Agent(
        init=lambda key: jnp.int32(0),
        explore=decide,
        exploit=decide,
        update=lambda rows, rollout, key: (rows + 3, {}),
        sample_noise=lambda key, num_steps, num_envs: jnp.arange(num_steps),
        rollout_length=3,
    )

    def program(key):
        state, rollouts = loop.init(env, agent, key), []
        for _ in range(3):
            actors, rollout, _ = loop.act(env, agent, state.agent, state.actors, key)
            rollouts.append(rollout)
            state = state._replace(agent=agent.update(state.agent, rollout, key)[0], actors=actors)
        return jnp.concatenate([rollout.steps.extras for rollout in rollouts])

    places = jax.device_get(jax.jit(program)(jax.random.key(0)))
    np.testing.assert_array_equal(places, np.arange(9)[:, None] + np.zeros(4, int))


def evaluate_by_envpool(pool, act, num_games):
    """Return (score, length) of each environment's first games by envpool's own API, and which games are unfinished.

    It takes as many steps as the evaluator, because the random numbers of the next evaluation depend on them.
    """
    obs, rows, last = pool.reset()[0], [], np.zeros(NUM_ENVS, bool)
    while sum((over for *_, over in rows), start=np.zeros(NUM_ENVS)).min() < num_games:
        for _ in range(evaluation.BLOCK):
            valid = ~last
            obs, _, terminated, truncated, info = pool.step(np.asarray(act(obs)))
            last = terminated | truncated
            rows.append((valid, info["reward"], (info["terminated"] > 0) | truncated))
    columns = [np.stack(column) for column in zip(*rows)]
    found = [games(*(x[:, i : i + 1] for x in columns))[:num_games] for i in range(NUM_ENVS)]
    return found, ~rows[-1][2]


@pytest.mark.slow
def test_evaluation_scores_whole_games_over_all_lives():
    """Evaluate two games per environment, twice. The oracle is envpool's own API with the same policy.

    An evaluation may leave a game unfinished. The next evaluation starts new games nevertheless.
    """
    # The action depends on every pixel, the environment and the evaluation.
    by_pixels = lambda which, obs: (obs.astype(jnp.int32).sum((1, 2, 3)) + which + jnp.arange(NUM_ENVS)) % 4
    env = envs.make("envpool/Breakout-v5", NUM_ENVS, HostEnvConfig(SEED, "dqn2015"), img_height=36, img_width=36)
    config = configure(ppo.Config, rollout_length=8, num_minibatches=1, network="mlp", hidden_sizes=(8,))
    agent = ppo.make(config, env.spec, 1)
    agent = agent._replace(exploit=lambda state, inputs, carry, noise: Decision(by_pixels(state, inputs.obs)))
    evaluator = evaluation.Evaluator(env, agent, [0], 2 * NUM_ENVS)
    options = dict(episodic_life=True, img_height=36, img_width=36, seed=host_pool.seeds_of(SEED, NUM_ENVS))
    pool = envpool.make_gymnasium("Breakout-v5", num_envs=NUM_ENVS, **options)
    lengths: set[int] = set()
    left = []
    for index in range(2):
        score, length, ended = evaluator.episodes(jnp.int32(index), index)
        found, in_mid_game = evaluate_by_envpool(pool, functools.partial(jax.jit(by_pixels), index), 2)
        assert ended.all() and [*zip(score[0], length[0])] == [*itertools.chain(*found)]
        lengths |= set(length[0].tolist())
        left.append(in_mid_game.any())
    assert left[0] and len(lengths) > 2 and min(lengths) > 50, "the test needs unfinished games"


@pytest.fixture(scope="module")
def freeway(tmp_path_factory):
    """Return the folder of a small PPO run."""
    options = dict(img_height=36, img_width=36, max_episode_steps=20)
    agent = dict(rollout_length=4, num_minibatches=1, num_epochs=1, hidden_sizes=(8,), network="mlp")
    folder = tmp_path_factory.mktemp("atari") / "run"
    jaxrl_fast.fit(
        algo="ppo", env="Freeway-v5", env_options=options, num_envs=2, total_steps=8, eval_envs=1,
        eval_episodes=1, loggers=(), log_level="quiet", run_dir=str(folder), **agent,
    )  # fmt: skip
    return folder


@pytest.mark.slow
def test_atari_video_has_one_doubled_screen_frame_per_step(freeway, tmp_path):
    out = tmp_path / "game.gif"
    assert video.main([str(freeway), "--max-steps", "12", "--out", str(out)]) == 0
    with Image.open(out) as gif:
        pictures = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(gif)]
    assert len(pictures) == 13, "the first observation and twelve steps"
    height, width, _ = pictures[0].shape
    assert width == 2 * 160 and 2 * 210 < height < 500, "the screen at double size, and a caption below it"
    screens = [picture[:420].astype(int) for picture in pictures]
    moved = [(np.abs(a - b).max(-1) > 40).sum() for a, b in itertools.pairwise(screens)]
    assert min(moved) > 100, "cars move in every frame"


@pytest.mark.slow
def test_training_evaluation_and_video_use_disjoint_environment_seeds(freeway):
    """All three derive their environment seeds from one run seed. The sets of 500 seeds are pairwise disjoint."""
    ready = plan.validate_plan(resume.of_run(freeway))
    watched = saved_run.open_env(freeway)[1]
    seed = lambda env: env.reset.args[0].pools[0].seed
    seeds = [set(host_pool.seeds_of(seed(env), 500)) for env in (ready.env, ready.eval_env, watched)]
    assert not seeds[0] & seeds[1] and not seeds[0] & seeds[2] and not seeds[1] & seeds[2]


@pytest.mark.slow
def test_replay_buffer_of_single_frames_rebuilds_envpool_frame_stacks():
    game = play("lives", "ffi")
    num_steps = len(game.actions)
    layout = ReplayConfig(num_steps, NUM_ENVS, n_step=1, frame_stack=4)
    spec, steps = game.env.spec, game.steps
    stacks = np.concatenate([game.first.obs[None], steps.obs])  # [T + 1, N, ...]
    before = np.concatenate([np.zeros((1, NUM_ENVS), bool), steps.last[:-1]])
    row = Transition(stacks[:-1], game.actions, steps.reward, steps.discount, steps.last, ~before, ())
    ring = init(layout, spec.obs, spec.action)
    assert ring.obs.shape == (num_steps, NUM_ENVS, 84, 84, 1)
    ring = jax.jit(functools.partial(add, layout))(ring, jax.tree.map(jnp.asarray, row))
    at, env = (x.reshape(-1) for x in np.mgrid[3 : num_steps - 1, :NUM_ENVS])
    sample = jax.jit(functools.partial(read, layout, gamma=1.0))(ring, row=jnp.asarray(at), env=jnp.asarray(env))
    np.testing.assert_array_equal(sample.obs, stacks[at, env])
    np.testing.assert_array_equal(sample.next_obs, stacks[at + 1, env])


def test_seeds_of_is_deterministic_unique_and_disjoint_between_runs():
    assert set(host_pool.seeds_of((0, 0, 0), 500)).isdisjoint(host_pool.seeds_of((1, 0, 0), 500))
    assert len(set(host_pool.seeds_of((0, 0, 0), 5000))) == 5000
    assert host_pool.seeds_of((5, 1, 2), 9) == host_pool.seeds_of((5, 1, 2), 9)


REFUSED = [
    ("Pong-v5", dict(stack_num=0), ["stack_num: must be 1 to 15", "got 0"]),
    ("Pong-v5", dict(num_threads=-1), ["num_threads", "got -1"]),
    ("Pong-v5", dict(frame_skip=2**40), ["frame_skip"]),
    ("Pong-v5", dict(img_width="wide"), ["img_width: must be int", "got 'wide'", "for example 84"]),
    ("Pong-v5", dict(repeat_action_probability=7), ["use protocol"]),
    ("Pong-v5", dict(episodic_life=True), ["use protocol"]),
    ("Pong-v5", dict(reward_clip=True), ["use rewards"]),
    ("Pong-v5", dict(seed=3), ["use seed"]),
    ("Pong-v5", dict(batch_size=3), ["use num_envs"]),
    ("Pong-v5", dict(stack_nun=3), ["no option 'stack_nun'", "stack_num"]),
    ("CartPole-v1", dict(stack_num=3), ["no option 'stack_num'"]),
    ("Go9x9-v1", {}, ["2 players"]),
    ("D1Basic-v1", {}, ["bounds must be finite"]),
    ("Pongg-v5", {}, ["Pong-v5"]),
]


@pytest.mark.parametrize(("name", "options", "words"), REFUSED, ids=[f"{n} {o}" for n, o, _ in REFUSED])
def test_make_rejects_unsupported_task_or_option_without_opening_pool(name, options, words):
    held = len(host_pool.OPEN_POOLS)
    with pytest.raises(ValueError) as refusal:
        envs.make(f"envpool/{name}", 2, **options)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)
    assert len(host_pool.OPEN_POOLS) == held


MISTAKES = [
    ("ppo --env envpool/Pong-v5 --env-option img_width=3", ["img_width", "36 to 1024", "got 3"]),
    ("ppo --env envpool/Pong-v5 --num-seeds 2", ["num_seeds: must be 1 for the host environment", "got 2", "sweep"]),
    ("ppo --env envpool/Pong-v5 --num-envs 9 --devices 2", ["error: devices: must divide num_envs 9, got 2; use 1\n"]),
    (
        "ppo --env envpool/CartPole-v1 --num-envs auto",
        ["num_envs: must be a number", "host environment envpool/CartPole-v1"],
    ),
    ("ppo --env CartPole-v1 --protocol dqn2015", ["error: protocol: ", "not an Atari game", "dqn2015"]),
    ("ppo --env envpool/Pong-v5 --exact-resume", ["host.exact_resume: ", "save_every", "environment steps"]),
    (
        "ppo --env envpool/Pong-v5 --exact-resume --save-every 1M --host.bridge ffi",
        ["host.exact_resume: requires host.bridge callback, got ffi; use callback\n"],
    ),
    ("ppo --env envpool/Pong-v5 --num-envs 9 --async-pools 2", ["host.async_pools: ", "9 environments", "2 pools"]),
    ("ppo --env CartPole-v1 --async-pools 2", ["host.async_pools: ", "on the device", "got 2"]),
    (
        "ppo --env envpool/CartPole-v1 --overlap",
        ["error: host.overlap: requires async_pools, got 0; set async_pools to 1 or more\n"],
    ),
    ("dqn --env envpool/CartPole-v1 --async-pools 1 --overlap", ["error: host.overlap: ", "dqn", "async_pools alone"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_train_command_rejects_invalid_options_in_one_line_without_files(line, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert not list(tmp_path.iterdir())


def test_missing_envpool_error_names_pip_extra(monkeypatch):
    monkeypatch.setattr(envs, "is_installed", lambda backend: backend != "envpool")
    missing = re.escape(f"envpool is not installed; {install('atari')}")
    with pytest.raises(ValueError, match=missing):
        envs.make("envpool/Pong-v5", 2)
    with pytest.raises(ValueError, match=rf"^unknown environment 'Pong-v5' \({missing}\); "):
        envs.make("Pong-v5", 2)


def test_missing_backend_without_extra_error_names_pip_package(monkeypatch):
    monkeypatch.setattr(envs, "is_installed", lambda backend: backend != "gymnax")
    with pytest.raises(ValueError, match=r"gymnax is not installed; pip install gymnax$"):
        envs.make("gymnax/CartPole-v1", 2)


def test_pool_falls_back_to_callback_with_warning_when_ffi_is_unavailable(monkeypatch):
    monkeypatch.setattr(adapter, "ffi_unavailable_reason", lambda: "jaxlib is another")
    env = envs.make("envpool/CartPole-v1", 2, HostEnvConfig(SEED))
    assert any("jaxlib is another" in line for line in env.view.warnings) and not env.view.info
    assert run(env, random_actions(env.spec, 3))[1].reward.shape == (3, 2)
    with pytest.raises(ValueError, match=r"host.bridge: .* \(jaxlib is another\), got ffi"):
        envs.make("envpool/CartPole-v1", 2, HostEnvConfig(SEED, bridge="ffi"))


@pytest.mark.slow
def test_arbitrary_action_arrays_are_rejected_or_stepped_without_crash():
    """Send 2,000 arrays of random shape, dtype and value in a child process. Each is rejected or stepped."""
    code = """
    import functools, sys, warnings
    import jax, jax.numpy as jnp, numpy as np
    from jaxrl_fast import envs
    from jaxrl_fast.envs.host.config import HostEnvConfig
    warnings.simplefilter("ignore")
    chance = np.random.default_rng(0)
    refused = stepped = 0
    for name, path in (("CartPole-v1", "ffi"), ("Pendulum-v1", "ffi"), ("CartPole-v1", "callback"), ("Pong-v5", "ffi")):
        env = envs.make(f"envpool/{name}", 3, HostEnvConfig((0,), bridge=path))
        state, first = jax.jit(env.reset)(jax.random.key(0))
        shapes = [(), (0,), (1,), (2,), (3,), (4,), (3, 1), (3, 2), (1, 3), (3, 0), (3, 1, 1)]
        step = jax.jit(env.step)
        for _ in range(500):
            shape = shapes[chance.integers(len(shapes))]
            if chance.random() < 0.4:
                shape = (3, *getattr(env.spec.action, "shape", ()))
            dtype = chance.choice("bool int8 uint8 int16 int32 uint32 float16 float32 complex64".split())
            size = 10.0 ** chance.integers(0, 12)
            value = np.asarray(chance.uniform(-size, size, shape))
            value = np.where(chance.random(shape) < 0.1, chance.choice([np.nan, np.inf, -np.inf, 2.0**30]), value)
            with np.errstate(all="ignore"):
                action = jnp.asarray(value.astype(dtype))
            try:
                state, after = step(state, action)
                jax.block_until_ready(after)
                assert np.isfinite(after.reward).all()
                stepped += 1
            except ValueError as error:
                assert "actions must be" in str(error), error
                refused += 1
    print("refused", refused, "stepped", stepped)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    _, refused, _, stepped = done.stdout.split()
    assert int(refused) + int(stepped) == 2000 and int(refused) > 500 and int(stepped) > 100


def test_too_many_threads_give_warning_and_async_pools_give_info():
    warnings = lambda name, *given, **options: envs.make(f"envpool/{name}", *given, **options).view.warnings
    assert warnings("Pong-v5", 8) == ()
    assert any("num_threads 1000" in line for line in warnings("Pong-v5", 8, num_threads=1000))
    many = envs.make("envpool/Pong-v5", 8, HostEnvConfig(num_async_pools=8), num_threads=100)
    assert any("800 threads in 8 pools" in line for line in many.view.warnings)
    assert any("8 pools step asynchronously" in line for line in many.view.info)


@pytest.mark.parametrize(
    ("name", "num_envs", "num_cores", "seconds"),
    [
        ("Pong-v5", 1024, 2, 77),  # 1024 * 0.15 s / 2
        ("Pong-v5", 1024, 32, None),
        ("AlohaHandOver-v1", 400, 4, 30),  # 400 * 0.3 s / 4
        ("CartPole-v1", 4096, 1, None),
    ],
)
def test_make_warns_of_long_construction_time(name, num_envs, num_cores, seconds, monkeypatch):
    """All cores construct a pool in parallel. There is no warning for a short time."""
    monkeypatch.setattr(tasks, "num_cores", lambda: num_cores)
    warnings = envs.make(f"envpool/{name}", num_envs, HostEnvConfig(SEED)).view.warnings
    wanted = f"making {num_envs} environments takes about {seconds} s on {num_cores} cores"
    assert warnings == (() if seconds is None else (wanted,))


@pytest.mark.slow
def test_environment_warning_is_printed_once_at_log_level_quiet(tmp_path, monkeypatch, capsys):
    """The pools of training and evaluation give the same warning, which is printed once."""
    options = SHORT | AGENTS["ppo"] | dict(algo="ppo", env_options=dict(num_threads=99))
    monkeypatch.setattr(tasks, "num_cores", lambda: 2)
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "run"))
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("warning: num_threads 99: more than twice")


@pytest.mark.parametrize(
    ("options", "num_eval_envs"),
    [
        (dict(eval_envs=8), 8),
        (dict(eval_envs=8, eval_episodes=4), 4),
        (dict(), 2),  # the default of 128 applies to device environments
    ],
)
def test_number_of_evaluation_environments_follows_options(options, num_eval_envs):
    few = dict(env="envpool/CartPole-v1", num_envs=2, rollout_length=8, hidden_sizes=(8,), num_minibatches=1)
    ready = plan.validate_plan(load.from_keywords(algo="ppo", **few, **options))
    assert ready.eval_env.spec.num_envs == num_eval_envs


@pytest.mark.parametrize("overlap", [False, True])
def test_plan_validation_opens_no_pool(overlap):
    options: dict[str, Any] = dict(env="envpool/CartPole-v1", num_envs=4, async_pools=2, overlap=overlap)
    options |= dict(rollout_length=8, hidden_sizes=(8,))
    held = len(host_pool.OPEN_POOLS)
    ready = plan.validate_plan(load.from_keywords(algo="ppo", **options))
    memory.rollout_bytes(ready.env, ready.agent)
    state = program.shapes(ready.env, ready.agent)
    assert ready.needs.environments == nbytes((state.actors, state.rollout)) > 0
    assert bool(state.rollout) == overlap and len(host_pool.OPEN_POOLS) == held
    assert ready.env.parallelism.num_pools == 2, "each pool has its own ladder of epsilons"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        (
            "--async-pools 1",
            ["1 pool steps asynchronously", "first action of a rollout is chosen by the policy before the last"],
        ),
        (
            "--async-pools 2 --overlap",
            ["2 pools step asynchronously", "collected", "by a policy that is one update old"],
        ),
    ],
)
def test_run_header_states_policy_lag_of_async_pools(line, words, capsys):
    settings = load.from_command_line(f"ppo --env envpool/CartPole-v1 --num-envs 4 {line}".split())
    console.announce(plan.validate_plan(settings), terminal.PlainConsole())
    said = [text for text in capsys.readouterr().out.splitlines() if "asynchronously" in text]
    assert len(said) == bool(words) and all(word in said[0] for word in words)


def test_async_pools_with_thread_affinity_use_disjoint_cores(monkeypatch):
    made = []
    monkeypatch.setattr(adapter.envpool, "make_gymnasium", lambda name, **options: made.append(options) or len(made))
    monkeypatch.setattr(host_pool, "OPEN_POOLS", [])
    options = dict(num_threads=3, thread_affinity_offset=1)
    env = envs.make("envpool/CartPole-v1", 6, HostEnvConfig(SEED, bridge="callback", num_async_pools=2), **options)
    seeds = [pool.pool and made[-1]["seed"] for pool in env.reset.args[0].pools]
    assert [options["thread_affinity_offset"] for options in made] == [1, 4]
    assert [*seeds[0], *seeds[1]] == host_pool.seeds_of(SEED, 6)


def test_spec_is_converted_from_envpool_spaces():
    spec = lambda name, **options: envs.make(f"envpool/{name}", 1, **options).spec
    pong = spec("Pong-v5")
    assert (pong.obs.shape, pong.obs.dtype, pong.frame_stack, pong.action) == ((84, 84, 4), jnp.uint8, 4, Discrete(6))
    assert spec("Pong-v5", full_action_space=True).action == Discrete(18)
    assert spec("Pong-v5", stack_num=2, img_height=42, img_width=48).obs.shape == (42, 48, 2)
    deep = spec("Pong-v5", stack_num=13, img_height=36, img_width=36, gray_scale=False)
    assert deep.obs.shape == (39, 36, 36) and deep.frame_stack == 0, "more channels than pixels: axes are kept"
    assert spec("Ant-v4").obs.dtype == jnp.float32 and spec("Ant-v4").action == Box((8,))
    assert spec("Taxi-v3").obs.shape == (500,)
    assert jax.tree.map(lambda x: x.shape, spec("WalkerWalk-v1").obs) == {
        "height": (1,),
        "orientations": (14,),
        "velocity": (9,),
    }


@pytest.mark.parametrize("algo", [slow("dqn"), "pqn"])
def test_exploring_evaluation_uses_environment_count_of_one_pool(algo, tmp_path):
    """Each pool has a ladder of epsilons with one entry for each of its environments."""
    options = SHORT | AGENTS[algo] | dict(apex_alpha=7.0)
    run = jaxrl_fast.fit(algo=algo, async_pools=2, run_dir=str(tmp_path / "run"), **options)
    result = run.evaluate(explore=True, episodes=3)
    assert result["eval_episodes"] == 4 and result["policy"] == "exploring", "2 episodes per environment of a pool"


@pytest.mark.parametrize(
    ("env", "kept"),
    [("envpool/CartPole-v1", set()), slow("gymnax/CartPole-v1", {"jit_begin", "jit_chunk", "jit__lambda"})],
)
@pytest.mark.slow
def test_compilation_cache_stores_no_programs_of_host_pools(env, kept, tmp_path, monkeypatch):
    """Such a program contains the address of its pool, so another process could not reuse it."""
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    given = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    try:
        run = jaxrl_fast.fit(**SHORT | AGENTS["ppo"] | dict(env=env), algo="ppo", run_dir=str(tmp_path / "run"))
        evaluate.main([str(run.folder), "--episodes", "4"])
    finally:
        jax.config.update("jax_compilation_cache_dir", given)
    names = {path.name.partition("-")[0] for path in (tmp_path / "cache").glob("*")}
    assert names & {"jit_begin", "jit_chunk", "jit_advance", "jit__lambda"} == kept


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "async_pools", "overlap"), [("ppo", 0, False), ("dqn", 2, False), ("ppo", 2, True)])
def test_exact_resume_matches_uninterrupted_run(algo, async_pools, overlap, tmp_path, monkeypatch):
    options = dict(algo=algo, exact_resume=True, async_pools=async_pools, overlap=overlap) | SHORT | AGENTS[algo]
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "whole"))
    stop_after(monkeypatch, 200)
    assert jaxrl_fast.fit(**options, run_dir=str(tmp_path / "parts")).summary["status"] == "stopped"
    jaxrl_fast.fit(resume=str(tmp_path / "parts"), log_level="quiet")
    same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_exact_resume_matches_when_best_checkpoint_falls_between_saves(tmp_path, monkeypatch):
    """A run may resume from this checkpoint, so the uninterrupted run must reset its episodes there too."""
    options = SHORT | AGENTS["ppo"] | dict(algo="ppo", exact_resume=True, eval_every=96, save_every=320)
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "whole"))
    stop_after(monkeypatch, 200)
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "parts"))
    jaxrl_fast.fit(resume=str(tmp_path / "parts"), log_level="quiet")
    same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_exact_resume_restarts_run_stopped_before_first_checkpoint(tmp_path, monkeypatch):
    """A stop between checkpoints saves none, because the games cannot be restored there."""
    options = SHORT | AGENTS["ppo"] | dict(algo="ppo", exact_resume=True, eval_every=0, save_every=320)
    options |= dict(stop_when_solved=True, solved_threshold=1e6)  # so chunks end at log records
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "whole"))
    with monkeypatch.context() as patched:
        stop_after(patched, 100)
        stopped = jaxrl_fast.fit(**options, run_dir=str(tmp_path / "parts")).summary
    assert stopped["status"] == "stopped" and not list((tmp_path / "parts" / "checkpoints").glob("step-*"))
    jaxrl_fast.fit(resume=str(tmp_path / "parts"), log_level="quiet")
    same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_play_seed_determines_evaluation_returns(tmp_path):
    """Host environments draw their own random numbers. Equal play seeds give equal returns; other seeds give others."""
    run = jaxrl_fast.fit(**SHORT | AGENTS["ppo"], algo="ppo", run_dir=str(tmp_path / "run"))
    scores = [run.evaluate(episodes=16, play_seed=seed)["seeds"][0]["returns"] for seed in (3, 3, 4)]
    assert scores[0] == scores[1] != scores[2]


@pytest.mark.slow
@pytest.mark.parametrize("when", [160, 480])
def test_signal_stops_host_evaluation_and_resume_completes_it(when, tmp_path, monkeypatch):
    """The evaluation at 480 is the final one. A run that is stopped in it is not done."""
    options = SHORT | AGENTS["ppo"] | dict(algo="ppo", exact_resume=True)
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "whole"))
    evaluate = trainer.Trainer.evaluate

    def stop_at(self):
        if self.env_steps == when:
            self.stop(signal.SIGTERM)
        evaluate(self)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "evaluate", stop_at)
        summary = jaxrl_fast.fit(**options, run_dir=str(tmp_path / "parts")).summary
    assert summary["status"] == "stopped" and summary["env_steps"] == when
    assert jaxrl_fast.fit(resume=str(tmp_path / "parts"), log_level="quiet").summary["status"] == "done"
    same(tmp_path / "whole", tmp_path / "parts")


def saved_replay(run):
    """Return the replay buffer's arrays in the run's last checkpoint, by name."""
    saved, _ = checkpoint.newest(run.folder / "checkpoints")
    prefix = "agent/replay/"
    return SimpleNamespace(**{k.rsplit("/", 1)[-1]: x for k, x in saved.arrays.items() if k.startswith(prefix)})


@pytest.mark.slow
def test_inexact_resume_keeps_replay_and_updates_but_resets_episodes(tmp_path, capsys):
    options = SHORT | AGENTS["dqn"] | dict(algo="dqn")
    jaxrl_fast.fit(**options | dict(total_steps=320), run_dir=str(tmp_path / "run"))
    run = jaxrl_fast.fit(resume=str(tmp_path / "run"), total_steps=480, log_level="info")
    assert run.summary["env_steps"] == 480 and run.summary["status"] == "done"
    assert "its episodes are reset" in capsys.readouterr().out
    ring = saved_replay(run)
    assert ring.size == 256 // 4 and run.agent_state.num_updates == 480 // 32
    cut = (int(ring.head) - (480 - 320) // 4) % 64  # the row at which episodes were interrupted
    assert not ring.valid[cut - 1].any() and ring.last[cut - 2].all(), "n-step targets cannot cross the interruption"


@pytest.mark.slow
def test_exact_resume_matches_with_different_thread_options(tmp_path, monkeypatch):
    options = SHORT | AGENTS["ppo"] | dict(algo="ppo", exact_resume=True, env_options=dict(num_threads=1))
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "whole"))
    stop_after(monkeypatch, 200)
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "parts"))
    with pytest.raises(ValueError, match=r"^env_options: a resume cannot change it from "):
        jaxrl_fast.fit(resume=str(tmp_path / "parts"), env_options=dict(max_episode_steps=3))
    threads = dict(num_threads=2, thread_affinity_offset=0)
    jaxrl_fast.fit(resume=str(tmp_path / "parts"), env_options=threads, log_level="quiet")
    same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_sweep_releases_programs_before_closing_their_pools(tmp_path, monkeypatch, capsys):
    """Programs contain the addresses of their pools. The sweep prints the warnings of its pools too."""
    held, counts = len(host_pool.OPEN_POOLS), []
    build, close = program.build, adapter.EnvpoolPool.close

    def programs_with(pool):
        """Count live programs that call this pool. Calls contain the pool's id in their name."""
        texts = [m.to_string() for e in jax.devices()[0].client.live_executables() for m in e.hlo_modules()]
        return sum(f"EnvPool_{id(pool.envs)}_" in text for text in texts)

    def build_and_note(env, *args, **options):
        counts.append(len(host_pool.OPEN_POOLS))
        built = build(env, *args, **options)
        counts.append(sum(programs_with(each.pool) for each in env.reset.args[0].pools))
        return built

    def close_and_note(pool):
        counts.append(programs_with(pool))
        close(pool)

    monkeypatch.setattr(program, "build", build_and_note)
    monkeypatch.setattr(adapter.EnvpoolPool, "close", close_and_note)
    options = SHORT | AGENTS["ppo"] | dict(algo="ppo", env_options=dict(num_threads=99), total_steps=320)
    monkeypatch.setattr(tasks, "num_cores", lambda: 2)
    swept = jaxrl_fast.sweep(**options, seed=[0, 1], sweep_dir=str(tmp_path / "swept"))
    assert swept.status == 0 and len(host_pool.OPEN_POOLS) == held
    assert counts == 2 * [held + 2, 1, 0, 0], "2 pools, 1 program for the first; 0 programs at close"
    assert capsys.readouterr().err.count("warning: num_threads 99") == 2
    alone = jaxrl_fast.fit(**options, seed=1, run_dir=str(tmp_path / "alone"))
    returns = lambda folder: [record["return_mean"] for record in files.read_metrics(folder)]
    first, second = sorted(path.parent for path in swept.folder.glob("*/metrics.jsonl"))
    assert returns(alone.folder) == returns(second) != returns(first)


@pytest.mark.slow
def test_repeated_fit_evaluate_and_video_leave_no_open_pools(tmp_path):
    options, held = SHORT | AGENTS["ppo"] | dict(algo="ppo", total_steps=32), len(host_pool.OPEN_POOLS)
    for name in ("first", "second"):
        run = jaxrl_fast.fit(**options, run_dir=str(tmp_path / name))
        assert len(host_pool.OPEN_POOLS) == held
        for _ in range(2):
            assert run.evaluate(episodes=2)["eval_episodes"] >= 2
            run.video(max_steps=3)
            assert len(host_pool.OPEN_POOLS) == held


@pytest.mark.slow
def test_pools_open_before_compilation(tmp_path, monkeypatch, capsys):
    """Compile time excludes construction. With exact_resume, evaluations open their own pools later."""
    held, build = [], program.build

    def build_and_note(*args, **options):
        held.append(len(host_pool.OPEN_POOLS))
        return build(*args, **options)

    monkeypatch.setattr(program, "build", build_and_note)
    options = SHORT | AGENTS["ppo"] | dict(algo="ppo", total_steps=32, eval_every=0, log_level="info")
    held.append(len(host_pool.OPEN_POOLS))
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "run"))
    out = capsys.readouterr().out
    assert held[1] == held[0] + 2 and held[0] == len(host_pool.OPEN_POOLS), "pools are closed at the end"
    assert 0 < out.index("making 8 environments ...") < out.index("made in ") < out.index("compiling ...")
    jaxrl_fast.fit(**options, exact_resume=True, run_dir=str(tmp_path / "exact"))
    assert held[2] == held[0] + 1 and "making 4 environments ..." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "options"),
    [
        ("dqn", dict(replay={"size": 512}, batch_size=8, learning_starts=400, replay_ratio=0.02)),
        ("pqn", dict(rollout_length=64, num_minibatches=2, num_epochs=1)),
    ],
)
def test_pong_training_has_finite_losses_and_whole_game_returns(algo, options, tmp_path):
    """A game ends when one side has 21 points. An untrained policy loses nearly all points, in 750 steps or more."""
    run = jaxrl_fast.fit(
        algo=algo, env="Pong-v5", env_options=dict(img_height=36, img_width=36), network="nature",
        num_envs=2, total_steps=3072, log_every=512, eval_episodes=2, eval_envs=2, loggers=(),
        log_level="quiet", run_dir=str(tmp_path / "run"), **options,
    )  # fmt: skip
    assert run.summary["status"] == "done" and run.summary["protocol"] == "dqn2015"
    losses = [record["td_loss"] for record in run.metrics]
    learned = [loss for loss in losses if loss is not None]
    assert learned and np.isfinite(learned).all() and losses[-1] is not None
    if algo == "dqn":
        assert saved_replay(run).obs.shape == (256, 2, 36, 36, 1), "each frame is stored once"
    ended = [record for record in run.metrics if record["episodes"]]
    assert sum(record["episodes"] for record in ended) >= 2
    for record in ended:
        assert -21 <= record["return_min"] <= record["return_max"] <= -12 and record["episode_length_mean"] > 700
    assert -21 <= run.summary["eval_return_mean"] < 0 and run.summary["eval_length_mean"] > 700


@pytest.mark.slow
def test_run_folder_config_and_summary_contain_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    agent = dict(rollout_length=4, num_minibatches=1, num_epochs=1, hidden_sizes=(8,), network="mlp")
    options = dict(algo="ppo", env="Pong-v5", num_envs=2, total_steps=8, log_level="quiet") | agent
    options |= dict(env_options=dict(img_height=36, img_width=36, max_episode_steps=20), eval_episodes=2, eval_envs=2)
    run = jaxrl_fast.fit(**options, loggers=(), protocol="machado2018")
    assert "machado2018" in run.folder.name and run.summary["protocol"] == "machado2018"
    assert "protocol: machado2018" in (run.folder / "config.yaml").read_text()
    run = jaxrl_fast.fit(**options, loggers=())
    assert run.summary["protocol"] == "dqn2015" and "protocol: dqn2015" in (run.folder / "config.yaml").read_text()
