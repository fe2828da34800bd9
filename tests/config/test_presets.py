"""Test presets: those with a source have its hyperparameters, and the agent of every preset can be traced.

The table is copied from the sources' documentation, not from the presets: CleanRL's scripts for Atari
(ppo_atari_envpool_xla_jax, dqn_atari_jax, pqn_atari_envpool), gymnax's README and purejaxql's pqn_minatar.
"""

import jax
import pytest

from jaxrl_fast import agents, envs, loop
from jaxrl_fast.config import load, presets
from jaxrl_fast.config.parts import by_path
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.kernels import build
from jaxrl_fast.options import wrap
from jaxrl_fast.types import Discrete, Env, EnvSpec, TimeStep
from tests.helpers import slow

ADAM = dict(kind="adam", epsilon=1e-8, max_grad_norm=0.0)
LARGE = dict(kind="auto", hidden_sizes=(256, 256))
ATARI = dict(total_steps=10_000_000, protocol="dqn2015", rewards="sign", gamma=0.99, network="auto")
PPO_ATARI = ATARI | dict(
    num_envs=8, rollout_length=128, num_minibatches=4, num_epochs=4, learning_rate=2.5e-4, schedule="linear",
    clip_coef=0.1, value=dict(kind="mean", clip_vloss=False), entropy_coef=0.01, value_coef=0.5,
    optimizer=ADAM | dict(epsilon=1e-5, max_grad_norm=0.5), gae_lambda=0.95, normalize_advantage=True, target_kl=None,
)  # fmt: skip
DQN_ATARI = ATARI | dict(
    num_envs=1, rollout_length=4, learning_rate=1e-4, batch_size=32, replay_ratio=0.25, learning_starts=80_000,
    replay=dict(kind="uniform", size=1_000_000, n_step=1), target=dict(kind="average", tau=1.0, interval=1000),
    explore=dict(kind="epsilon", start=1.0, end=0.01, steps=1_000_000), schedule="constant", optimizer=ADAM,
    value=dict(kind="mean", loss="squared"), double=False, dueling=False, bonus="none",
)  # fmt: skip
PQN_ATARI = ATARI | dict(
    num_envs=8, rollout_length=128, num_minibatches=4, num_epochs=4, q_lambda=0.65, learning_rate=2.5e-4,
    schedule="linear", explore=dict(kind="epsilon", start=1.0, end=0.01, steps=1_000_000),
    network=dict(kind="auto", layer_norm=True),
    optimizer=dict(kind="radam", max_grad_norm=5.0),  # equals 10 for a loss twice as large
)  # fmt: skip
PPO_MINATAR = dict(
    num_envs=64, total_steps=10_000_000, rollout_length=128, num_minibatches=8, num_epochs=4, learning_rate=5e-4,
    gamma=0.999, clip_coef=0.2, entropy_coef=0.01, network=LARGE | dict(kind="mlp"),
)  # fmt: skip
PQN_MINATAR = dict(
    num_envs=128, total_steps=10_000_000, rollout_length=32, num_minibatches=32, num_epochs=2, learning_rate=5e-4,
    schedule="linear", q_lambda=0.65, explore=dict(kind="epsilon", steps=1_000_000),
    network=dict(kind="minatar", layer_norm=True),
)  # fmt: skip
MUJOCO = dict(num_envs=1, total_steps=1_000_000, gamma=0.99, network=LARGE, schedule="constant")
OFF_POLICY = MUJOCO | dict(
    replay=dict(kind="uniform", size=1_000_000, n_step=1), batch_size=256, target=dict(kind="average", tau=0.005),
    replay_ratio=1.0, learning_rate=3e-4,
)  # fmt: skip
TD3 = OFF_POLICY | dict(learning_starts=25_000, critic_learning_rate=3e-4, noise=dict(kind="normal", std=0.1))
CONTROL = {
    "ppo": MUJOCO | dict(
        rollout_length=2048, num_minibatches=32, num_epochs=10, learning_rate=3e-4, entropy_coef=0.0, clip_coef=0.2,
        gae_lambda=0.95, optimizer=ADAM | dict(epsilon=1e-5, max_grad_norm=0.5), normalize_observations=True,
        rewards="normalized", schedule="linear", network=dict(kind="auto", hidden_sizes=()),
    ),
    "sac": OFF_POLICY | dict(learning_starts=5_000, critic_learning_rate=1e-3, learn_temperature=True, num_critics=2),
    "td3": TD3 | dict(policy_delay=2, target_noise=0.2, target_noise_clip=0.5, num_critics=2),
    "ddpg": TD3 | dict(policy_delay=2, target_noise=0.0, num_critics=1),
}  # fmt: skip
FAST = dict(  # FastTD3's hyperparams.py for CheetahRun: 1024 environments, 2 gradient steps for each step of all
    num_envs=1024, replay=dict(kind="uniform", size=10_240 * 1024, n_step=3), batch_size=32_768, replay_ratio=2 / 1024,
    learning_starts=10 * 1024, gamma=0.97, target=dict(kind="average", tau=0.1), learning_rate=3e-4,
    critic_learning_rate=3e-4, policy_delay=2, network=dict(kind="auto", hidden_sizes=(512, 256, 128)),
    critic_hidden_sizes=(1024, 512, 256), normalize_observations=True,
)  # fmt: skip
FLASH = dict(  # FlashSAC's configs/agent/flashSAC.yaml, and scripts/run_mujoco.sh for one environment
    num_envs=1, total_steps=1_000_000, gamma=0.99, batch_size=512, replay_ratio=1.0, learning_starts=10_000,
    replay=dict(kind="uniform", size=1_000_000, n_step=1), policy_delay=2, learning_rate=3e-4,
    critic_learning_rate=3e-4, schedule=dict(kind="cosine", final=0.5), temperature=0.01, target_sigma=0.15,
    std_bounds="tanh", rewards="scaled", noise=dict(kind="held", exponent=2.0, longest=16), num_critics=2,
    target=dict(kind="average", tau=0.01, interval=1), value=dict(kind="c51", atoms=101, v_min=-5, v_max=5),
    network=dict(kind="flash", hidden_sizes=(128, 128)), critic_hidden_sizes=(256, 256), optimizer=ADAM,
    normalize_observations=False,
)  # fmt: skip
FLASH_ON_GPU = FLASH | dict(  # scripts/run_mujoco_playground.sh
    num_envs=1024, total_steps=50_000_000, batch_size=2048, replay_ratio=2 / 1024, learning_starts=100_000, gamma=0.97,
    replay=dict(kind="uniform", size=10_000_000, n_step=1),
)  # fmt: skip
ROBOTS = ("half_cheetah", "hopper", "walker2d", "ant")
GAMES = ("pong", "breakout")
BOARDS = ("asterix", "breakout", "freeway", "space_invaders")
SOURCES = {
    **{f"ppo_{game}": PPO_ATARI for game in GAMES},
    **{f"dqn_{game}": DQN_ATARI for game in GAMES},
    **{f"pqn_{game}": PQN_ATARI for game in GAMES},
    **{f"ppo_minatar_{board}": PPO_MINATAR for board in BOARDS},
    **{f"pqn_minatar_{board}": PQN_MINATAR for board in BOARDS},
    **{f"{algo}_{robot}": CONTROL[algo] for algo in CONTROL for robot in ROBOTS},
    **{f"sac_flash_{robot}": FLASH for robot in (*ROBOTS, "humanoid")},
    "sac_flash_cheetah_run_fast": FLASH_ON_GPU,
    "sac_cheetah_run_fast": FAST,
    "td3_cheetah_run_fast": FAST | dict(value=dict(kind="c51", atoms=101, v_min=-500, v_max=500), target_noise=0.1),
}
values_of = lambda settings: {path: settings.value(path) for path in settings.known}
OF_ATARI = [name for name in presets.shipped() if load.from_keywords(name).options.env.endswith("-v5")]


@pytest.mark.parametrize("name", SOURCES)
def test_preset_has_hyperparameters_of_its_source(name):
    settings = load.from_keywords(name)
    here, expected = values_of(settings), by_path(SOURCES[name], settings.known)
    assert {key: here[key] for key in expected} == expected


def test_preset_has_solved_threshold():
    """Exceptions are a board without a published return, and runs as short as the window of the mean return."""
    seaquest = {f"{algo}_minatar_seaquest" for algo in ("ppo", "pqn", "dqn")}
    goals = {name: load.from_keywords(name).options.solved_threshold for name in presets.shipped()}
    without = {name for name, goal in goals.items() if goal is None}
    assert without == seaquest | {"sac_pendulum", "td3_pendulum", "ddpg_pendulum"}


@pytest.mark.parametrize("name", [f"{algo}_{game}" for algo in ("ppo", "dqn", "pqn") for game in GAMES])
def test_fast_preset_differs_only_in_options_for_many_environments(name):
    slow, fast = (load.from_keywords(preset) for preset in (name, f"{name}_fast"))
    before, after = values_of(slow), values_of(fast)
    differing = {path for path, value in before.items() if after[path] != value}
    batches = {"rollout_length", "num_minibatches", "num_epochs", "batch_size", "replay_ratio", "target.interval"}
    assert before.keys() == after.keys() and "num_envs" in differing
    assert differing <= batches | {"num_envs", "learning_rate", "explore.end"}


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.shipped())
def test_agent_of_preset_can_be_traced(name):
    """Trace two updates: the state keeps its shapes and dtypes."""
    settings = load.from_keywords(name)
    env = environment(settings)
    agent = agents.load(settings.algo).make(settings.agent, env.spec, 100)
    assert agent.rollout_length == settings.agent.length(settings.options.num_envs)
    init = jax.eval_shape(lambda: loop.init(env, agent, jax.random.key(0)))
    after, metrics = jax.eval_shape(lambda state: loop.train(env, agent, state, 2), init)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), init)
    assert all(x.shape == (2,) for x in jax.tree.leaves(metrics))


OURS = build._target("")  # the prefix of the names of the C kernels
ALGORITHMS = "ppo_cartpole", "dqn_cartpole", "pqn_minatar_breakout"


@pytest.mark.parametrize("name", [*ALGORITHMS, *map(slow, ("ppo_pendulum", "rainbow_acrobot", *OF_ATARI))])
@pytest.mark.slow
def test_preset_lowers_to_gpu_program_without_cpu_kernels(name, monkeypatch):
    """The C kernels run on CPUs only: the CPU program calls them, and the GPU program does not."""
    platform = jax.default_backend()
    if not build.unavailable_reason():
        assert OURS in lowered(name, platform)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(build, "unavailable_reason", lambda: "they are for CPUs")
    assert OURS not in lowered(name, "cuda")


def lowered(name, platform):
    """Return the program of an update, lowered for a platform, as text."""
    settings = load.from_keywords(name)
    env = environment(settings)
    agent = agents.load(settings.algo).make(settings.agent, env.spec, 100)
    begin = lambda key: loop.init(env, agent, key)
    update = jax.jit(lambda state: loop.train(env, agent, state, 1))
    return update.trace(jax.eval_shape(begin, jax.random.key(0))).lower(lowering_platforms=(platform,)).as_text()


def environment(settings):
    """Return the environment of a preset; for Atari, a stub with its specification and without a pool."""
    num_envs, size = settings.options.num_envs, settings.options.env_options
    if settings.options.env.startswith("playground/"):
        pytest.importorskip("mujoco_playground", reason="only the nightly workflow has it")
    if settings.preset == "ppo_minigrid_doorkey":
        pytest.importorskip("minigrid", reason="it is not among the packages of the tests")
    if settings.preset not in OF_ATARI:
        config = HostEnvConfig(wrappers=wrap.read(settings.options.wrap))
        return envs.make(settings.options.env, num_envs, config, **size)
    shape = int(size.get("img_height", 84)), int(size.get("img_width", 84)), 4

    def answer():
        zeros = lambda dtype: jax.numpy.zeros(num_envs, dtype)
        obs = jax.numpy.zeros((num_envs, *shape), "uint8")
        return TimeStep(obs, zeros("float32"), zeros("float32"), zeros(bool))

    spec = EnvSpec(settings.options.env, jax.ShapeDtypeStruct(shape, "uint8"), Discrete(6), num_envs, frame_stack=4)
    return Env(lambda key: ((), answer()), lambda state, action: (state, answer()), spec)
