"""Atari by ale-py: rows against a plain loop over its own vector environment, and the rules for lost lives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import envs, evaluate, video
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.host.pool import seeds_of

pytestmark = pytest.mark.skipif(not envs.is_installed("ale"), reason="the extra ale is not installed")
N, T = 3, 260
SHORT = dict(max_num_frames_per_episode=400, noop_max=4)


@functools.cache
def played(game, protocol, bridge="auto", seed=0):
    """Return the actions, the first time step and all others, of random steps."""
    config = HostEnvConfig(seed=(seed,), protocol=protocol, bridge=bridge)
    env = envs.make(f"ale/{game}", N, config, **SHORT)
    actions = np.random.default_rng(0).integers(env.spec.action.num, size=(T, N)).astype(np.int32)
    state, first = env.reset(jax.random.key(0))
    steps = jax.jit(lambda state, actions: jax.lax.scan(env.step, state, actions)[1])(state, actions)
    found = jax.tree.map(np.array, (first, steps))
    env.host.close()
    return actions, *found, env.spec


def plain_loop(game, actions, protocol, seed=0):
    """Yield rows of ale-py's own environment, of which a lost life ends an episode by the number of lives."""
    from ale_py.vector_env import AtariVectorEnv

    rules = dict(repeat_action_probability=0.25, use_fire_reset=False, noop_max=4)
    rules = rules if protocol == "machado2018" else dict(use_fire_reset=True, noop_max=4)
    own = AtariVectorEnv(game, N, stack_num=1, reward_clipping=False, max_num_frames_per_episode=400, **rules)
    obs, info = own.reset(seed=np.array(seeds_of((seed,), N), np.int32))
    stack, lives, last = [np.repeat(obs, 4, 1)], info["lives"], np.zeros(N, bool)
    for action in actions:
        obs, reward, terminated, truncated, info = own.step(np.where(last, 0, action).astype(np.int32))
        lost = (info["lives"] < lives) & ~last & (protocol == "dqn2015")
        over, lives = terminated | truncated, info["lives"]
        begins, reward = last, np.where(last, 0, reward)
        stack.append(np.where(begins[:, None, None, None], np.repeat(obs, 4, 1), np.append(stack[-1][:, 1:], obs, 1)))
        last = over | lost
        yield stack[-1], reward, terminated | lost, last, over


@pytest.mark.parametrize(
    "game, rom, protocol",
    [("Breakout", "breakout", "dqn2015"), ("Breakout", "breakout", "machado2018"), ("Pong", "pong", "dqn2015")],
)
def test_rows_are_those_of_a_plain_loop(game, rom, protocol):
    actions, first, steps, spec = played(game, protocol)
    assert spec.obs == jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8) and spec.frame_stack == 4
    assert (first.obs == first.obs[..., :1]).all() and not first.last.any()
    num_lost = 0
    for t, (obs, reward, terminated, last, over) in enumerate(plain_loop(rom, actions, protocol)):
        np.testing.assert_array_equal(steps.last[t], last, err_msg=str(t))
        np.testing.assert_array_equal(steps.obs[t], np.moveaxis(obs, 1, -1), err_msg=str(t))
        np.testing.assert_array_equal(steps.reward[t], reward)
        np.testing.assert_array_equal(steps.discount[t], 1 - terminated)
        if protocol == "dqn2015":
            np.testing.assert_array_equal(steps.score.game_over[t], over)
            np.testing.assert_array_equal(steps.score.reward[t], reward)
            num_lost += (last & ~over).sum()
    assert steps.reward.dtype == np.float32
    ends = steps.last & (steps.discount == 1)
    assert ends.any(), "400 frames are a truncation"
    assert (num_lost > 0) == (game == "Breakout" and protocol == "dqn2015")


def test_ffi_and_callback_bridges_match_and_seeds_differ():
    """Both bridges give the same rows; other seeds give others; each environment has its own."""
    _, first, steps, _ = played("Breakout", "machado2018")
    _, other_first, other, _ = played("Breakout", "machado2018", "callback")
    jax.tree.map(np.testing.assert_array_equal, (first, steps), (other_first, other))
    _, _, others, _ = played("Breakout", "machado2018", seed=1)
    assert (steps.obs != others.obs).any()
    assert all((steps.obs[:, i] != steps.obs[:, j]).any() for i in range(N) for j in range(i))


def test_actions_outside_space_are_clipped():
    env = envs.make("ale/Pong", 2)
    state, _ = env.reset(jax.random.key(0))
    for action in ([-7, 99], [2**31 - 1, -(2**31)]):
        state, timestep = env.step(state, jnp.array(action, jnp.int32))
    assert timestep.obs.shape == (2, 84, 84, 4)
    env.host.close()


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(stack_num=2), "stack_num: not an option of ale/Pong, got 2; use frame_stack"),
        (dict(episodic_life=True), "use protocol"),
        (dict(frameskip=0), "frameskip: must be 1 to 1000 for ale/Pong, got 0"),
        (dict(speed=3), "ale/Pong has no option 'speed'"),
        (dict(gray=True), "gray: ale/Pong stacks 4 frames already"),
    ],
)
def test_make_rejects_wrong_game_or_option_with_one_line_message(options, words):
    with pytest.raises(ValueError) as caught:
        envs.make("ale/Pong", 2, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("async_pools", [2])
def test_run_trains_resumes_evaluates_and_records_video(async_pools, tmp_path, capsys):
    folder = str(tmp_path / "run")
    options = dict(algo="ppo", env="ale/Pong", env_options=dict(max_num_frames_per_episode=800), num_envs=2)
    options |= dict(rollout_length=16, num_minibatches=1, num_epochs=1)
    quiet = dict(log_level="quiet", loggers=(), eval_episodes=2, async_pools=async_pools)
    jaxrl_fast.fit(**options, total_steps=128, run_dir=folder, **quiet)
    run = jaxrl_fast.fit(resume=folder, total_steps=256, log_level="quiet")
    assert run.summary["env_steps"] == 256 and run.summary["protocol"] == "dqn2015"
    assert evaluate.main([folder, "--episodes", "2"]) == 0
    assert video.main([folder, "--max-steps", "20", "--out", str(tmp_path / "a.gif")]) == 0, capsys.readouterr().err
    assert (tmp_path / "a.gif").stat().st_size > 1000
