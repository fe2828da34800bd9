"""A minimal host backend in numpy: rows, seeds, and exceptions of host pools."""

import importlib.machinery
import sys
import traceback
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import envs, train
from jaxrl_fast.envs.host import env as host_env
from jaxrl_fast.envs.host import pool as host_pool
from jaxrl_fast.envs.host.config import HostEnvConfig, Shard
from jaxrl_fast.envs.host.pool import PoolSpec, Row, seeds_of
from jaxrl_fast.runs import files
from jaxrl_fast.training import build
from jaxrl_fast.types import Discrete, EnvSpec

SEED = (7, 0, 0)
FIRST_ACTION = 5  # the environment's actions are 5, 6 and 7
CONFIG = HostEnvConfig(SEED)
EVENTS: list[tuple] = []  # calls of pools: ("open", seeds), ("reseed", seeds), ("close",)


class BrokenError(Exception):
    """An exception of an environment. Unlike most exceptions, it needs two arguments."""

    def __init__(self, code, reason):
        super().__init__(code, reason)


class Counter:
    """One environment that counts to a random limit, where it terminates or is truncated at random."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.count, self.limit, self.is_truncated = 0, self.rng.integers(1, 6), self.rng.random() < 0.5
        return self.observe()

    def step(self, action):
        assert action in (5, 6, 7)
        self.count += 1
        ended = self.count == self.limit
        reward = 10 * self.count + action
        return self.observe(), reward, ended and not self.is_truncated, ended and self.is_truncated

    def observe(self):
        return np.array([self.count, self.limit, self.is_truncated], np.float64)


class CountingPool:
    """A `HostPool` of n Counters."""

    def __init__(self, options, seeds):
        self.options, self.num_steps = options, 0
        EVENTS.append(("open", list(seeds)))
        self._seed(seeds)

    def _seed(self, seeds):
        self.envs = [Counter(seed) for seed in seeds]

    def reset(self):
        self.ended = [False] * len(self.envs)
        return np.stack([env.reset() for env in self.envs])

    def send(self, action):
        assert type(action) is np.ndarray and action.dtype == np.int64
        self.action = action

    def recv(self):
        self.num_steps += 1
        if self.num_steps == self.options.get("fails_at", 0):
            raise self.options["error"]
        rows = [
            (env.reset(), 99, False, False) if ended else env.step(action)  # 99: the driver ignores it
            for env, ended, action in zip(self.envs, self.ended, self.action)
        ]
        obs, reward, terminated, truncated = map(np.stack, zip(*rows))
        self.ended = terminated | truncated
        return Row(obs[:, : self.options.get("obs_size", 3)], reward, terminated, truncated)

    def reseed(self, seeds):
        EVENTS.append(("reseed", list(seeds)))
        self._seed(seeds)

    def render(self):
        return np.full((4, 4, 3), self.envs[0].count, np.uint8)

    def close(self):
        EVENTS.append(("close",))


def make(name, num_envs, options, host_config):
    """The backend's `make`."""
    spec = PoolSpec(
        EnvSpec(f"counting/{name}", None, Discrete(3), host_pool.num_envs_per_pool(num_envs, host_config)),
        raw_obs=jax.ShapeDtypeStruct((3,), np.float64),
        action_dtype=np.int64,
        action_start=FIRST_ACTION,
        can_render=True,
    )
    return host_env.make_env(spec, lambda index, seeds: CountingPool(options, seeds), host_config)


@pytest.fixture(autouse=True)
def counting(monkeypatch):
    """Register the backend."""
    package, module = ModuleType("counting"), ModuleType("jaxrl_fast.envs.counting")
    package.__spec__ = importlib.machinery.ModuleSpec("counting", None)
    module.make, module.registered = make, lambda: ("Up-v0",)
    monkeypatch.setitem(sys.modules, "counting", package)
    monkeypatch.setitem(sys.modules, "jaxrl_fast.envs.counting", module)
    monkeypatch.setattr(envs, "BACKENDS", (*envs.BACKENDS, "counting"))
    monkeypatch.setattr(host_pool, "OPEN_POOLS", [])
    EVENTS.clear()


def opened():
    return [seed for event, *rest in EVENTS if event == "open" for seed in rest[0]]


def random_actions(num_steps, num_envs):
    return np.random.default_rng(0).integers(3, size=(num_steps, num_envs)).astype(np.int32)


def run(env, actions):
    """Reset, then one step for each row of actions, as one compiled program."""

    def program(actions):
        state, first = env.reset(jax.random.key(0))
        return first, jax.lax.scan(env.step, state, actions)[1]

    return jax.device_get(jax.jit(program)(actions))


def run_in_halves(env, actions):
    """Run the same actions with each pool's step split into send and receive."""

    def step(state, action):
        for i, part in enumerate(jnp.split(action, env.pools.num)):
            state = env.pools.send(i, state, part)
        rows = []
        for i in range(env.pools.num):
            state, row = env.pools.receive(i, state)
            rows.append(row)
        return state, jax.tree.map(lambda *x: jnp.concatenate(x), *rows)

    def program(actions):
        state, first = env.reset(jax.random.key(0))
        return first, jax.lax.scan(step, state, actions)[1]

    return jax.device_get(jax.jit(program)(actions))


def oracle(seed, actions):
    """Step one environment in a plain loop; return its first observation, and arrays obs, reward, discount and last."""
    env = Counter(seed)
    first, rows, last = env.reset(), [], False
    for action in actions:
        if last:
            obs, reward, terminated, truncated = env.reset(), 0, False, False
        else:
            obs, reward, terminated, truncated = env.step(action + FIRST_ACTION)
        last = terminated or truncated
        rows.append((obs, reward, 0.0 if terminated else 1.0, last))
    return first, [np.stack(column) for column in zip(*rows)]


def check_rows(first, steps, actions):
    for i, seed in enumerate(seeds_of(SEED, actions.shape[1])):
        expected_first, expected = oracle(seed, actions[:, i])
        np.testing.assert_array_equal(first.obs[i], expected_first)
        found = steps.obs[:, i], steps.reward[:, i], steps.discount[:, i], steps.last[:, i]
        for one, other in zip(found, expected):
            np.testing.assert_array_equal(one, other)


def test_rows_match_plain_loop():
    env, actions = envs.make("counting/Up-v0", 5, CONFIG), random_actions(60, 5)
    assert env.spec.obs == jax.ShapeDtypeStruct((3,), np.float32) and not env.on_device
    first, steps = run(env, actions)
    assert steps.reward.dtype == steps.obs.dtype == np.float32
    check_rows(first, steps, actions)
    env.host.close()


def test_truncation_has_discount_one_and_reset_row_has_reward_zero():
    _, steps = run(envs.make("counting/Up-v0", 5, CONFIG), random_actions(60, 5))
    truncated = steps.obs[..., 2] == 1
    assert (steps.last & truncated).any() and (steps.last & ~truncated).any()
    np.testing.assert_array_equal(steps.discount == 0, steps.last & ~truncated)
    resets = steps.last[:-1]
    assert (steps.reward[1:][resets] == 0).all() and not steps.last[1:][resets].any()
    assert (steps.obs[1:][resets][:, 0] == 0).all(), "the next row is a reset"


@pytest.mark.parametrize("num_pools", [1, 2, 3])
def test_number_of_async_pools_does_not_change_trajectories(num_pools):
    env, actions = envs.make("counting/Up-v0", 6, CONFIG._replace(num_async_pools=num_pools)), random_actions(40, 6)
    assert env.spec.num_envs == 6 and env.parallelism.num_pools == env.pools.num == num_pools
    check_rows(*run(env, actions), actions)
    assert opened() == seeds_of(SEED, 6) and len(EVENTS) == num_pools
    again = envs.make("counting/Up-v0", 6, CONFIG._replace(num_async_pools=num_pools))
    check_rows(*run_in_halves(again, actions), actions)


def test_shards_use_disjoint_seeds():
    for shard in range(2):
        config = CONFIG._replace(shard=Shard(shard, 2), num_async_pools=2)
        envs.make("counting/Up-v0", 4, config).host.open()
    assert opened() == seeds_of(SEED, 8) and len(set(opened())) == 8


def test_open_and_close_are_idempotent_and_closed_pool_reopens():
    env = envs.make("counting/Up-v0", 2, CONFIG)
    env.host.reseed(3)
    env.host.close()
    assert not EVENTS, "nothing was open"
    env.host.open()
    env.host.open()
    assert opened() == seeds_of((*SEED[:2], 3), 2) and len(host_pool.OPEN_POOLS) == 1
    env.host.reseed(4)
    assert EVENTS[-1] == ("reseed", seeds_of((*SEED[:2], 4), 2))
    env.host.close()
    env.host.close()
    assert [event for event, *_ in EVENTS] == ["open", "reseed", "close"] and not host_pool.OPEN_POOLS
    assert run(env, random_actions(2, 2))[0].obs.shape == (2, 3)
    env.host.close()


def test_render_returns_image_of_first_environment():
    env = envs.make("counting/Up-v0", 2, CONFIG)
    run(env, random_actions(1, 2))
    assert (env.host.render() == 1).all()
    env.host.close()


def test_to_env_action_clips_and_adds_action_start():
    env = envs.make("counting/Up-v0", 3, CONFIG)
    np.testing.assert_array_equal(env.view.to_env_action(jnp.array([-4, 1, 9])), [5, 6, 7])


ERRORS = [BrokenError(3, "a wheel came off"), KeyboardInterrupt("once"), ValueError("no")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("num_pools", [0, 2])
def test_pool_exception_propagates_unchanged_with_traceback(error, num_pools):
    config = CONFIG._replace(num_async_pools=num_pools)
    env = envs.make("counting/Up-v0", 2, config, fails_at=5, error=error)
    act = run_in_halves if num_pools else run
    with pytest.raises(type(error)) as raised, host_env.original_errors():
        act(env, random_actions(20, 2))
    assert raised.value is error and not host_env.ERRORS
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert any(frame.name == "recv" and frame.line == 'raise self.options["error"]' for frame in frames)
    env.host.close()
    other = envs.make("counting/Up-v0", 2, CONFIG)
    check_rows(*run(other, random_actions(20, 2)), random_actions(20, 2))
    other.host.close()


def test_unrelated_jax_error_is_not_replaced():
    with pytest.raises(jax.errors.JaxRuntimeError, match="OUT"), host_env.original_errors():
        raise jax.errors.JaxRuntimeError("OUT of memory")


def test_observation_of_wrong_shape_is_rejected():
    env = envs.make("counting/Up-v0", 2, CONFIG, obs_size=2)
    says = r"^counting/Up-v0: obs must have shape \(2, 3\), got \(2, 2\)$"
    with pytest.raises(ValueError, match=says), host_env.original_errors():
        run(env, random_actions(3, 2))
    env.host.close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (CONFIG._replace(protocol="dqn2015"), "protocol: counting/Up-v0 is not an Atari game, got dqn2015"),
        (CONFIG._replace(num_async_pools=4), "host.async_pools: 6 environments do not divide into 4 pools, got 4"),
        (CONFIG._replace(bridge="ffi"), "host.bridge: counting/Up-v0 has no XLA calls, got ffi; use callback"),
    ],
)
def test_make_rejects_options_that_backend_does_not_support(config, says):
    with pytest.raises(ValueError, match=says):
        envs.make("counting/Up-v0", 6, config)
    assert not EVENTS


SHORT = dict(
    algo="ppo", env="counting/Up-v0", num_envs=4, total_steps=320, eval_episodes=4, eval_envs=2, log_every=32, seed=3,
    rollout_length=8, hidden_sizes=(8,), num_minibatches=1, loggers=(), log_level="quiet",
)  # fmt: skip


@pytest.mark.parametrize("options", [{}, dict(async_pools=2, overlap=True)], ids=str)
@pytest.mark.slow
def test_ppo_trains_and_evaluates(options, tmp_path):
    run = jaxrl_fast.fit(**SHORT, **options, run_dir=str(tmp_path / "run"))
    assert run.summary["status"] == "done" and run.summary["env_steps"] == 320
    assert run.summary["eval_episodes"] >= 4 and 5 < run.summary["eval_length_mean"] + 5 <= 10
    training, evaluation = seeds_of((3, build.TRAINING, 0), 4), seeds_of((3, build.EVALUATION, 0), 2)
    assert opened() == training + evaluation and len(set(opened())) == 6
    assert EVENTS.count(("close",)) == max(options.get("async_pools", 0), 1) + 1 and not host_pool.OPEN_POOLS


@pytest.mark.slow
def test_exact_resume_reseeds_pools_at_checkpoints(tmp_path):
    options = SHORT | dict(exact_resume=True, save_every=160, eval_every=160)
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "run"))
    reseeded = [seeds for event, *rest in EVENTS if event == "reseed" for seeds in rest]
    assert seeds_of((3, build.TRAINING, 5), 4) in reseeded, "160 steps are 5 updates"
    assert seeds_of((3, build.EVALUATION, 1), 2) in reseeded
    assert not host_pool.OPEN_POOLS


@pytest.mark.slow
def test_fit_raises_environment_exception_and_marks_run_failed(tmp_path):
    options = dict(fails_at=20, error=BrokenError(3, "a wheel came off"))
    module = sys.modules["jaxrl_fast.envs.counting"]
    module.make = lambda name, num_envs, _, config: make(name, num_envs, options, config)
    with pytest.raises(BrokenError) as raised:
        jaxrl_fast.fit(**SHORT, run_dir=str(tmp_path / "run"))
    assert raised.value is options["error"]
    summary = files.read_summary(tmp_path / "run")
    assert summary["status"] == "failed" and "a wheel came off" in summary["failure"]
    line = "ppo --env counting/Up-v0 --num-envs 4 --total-steps 320 --rollout-length 8 --num-minibatches 1"
    with pytest.raises(BrokenError):
        train.main([*line.split(), "--loggers", "none", "--run-dir", str(tmp_path / "other")])
