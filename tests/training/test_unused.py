"""Test which options a run names as without effect, against a table of options with and without it."""

import pytest

from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.config import load
from jaxrl_fast.config.options import known_options
from jaxrl_fast.config.population import Member
from jaxrl_fast.config.presets import shipped
from jaxrl_fast.loggers.terminal import QuietConsole
from jaxrl_fast.training import console, plan, unused

TD3, SAC, DDPG = (dict(algo=algo, env="Pendulum-v1") for algo in ("td3", "sac", "ddpg"))
PPO, DQN, PQN = (dict(algo=algo, env="CartPole-v1") for algo in ("ppo", "dqn", "pqn"))
CONTINUOUS, ON_HOST, BOARD = (PPO | dict(env=e) for e in ("Pendulum-v1", "gymnasium/CartPole-v1", "Breakout-MinAtar"))
ONE_STEP = PPO | {"agent.num_epochs": 1, "agent.num_minibatches": 1}
CUSTOM = {"agent.network": "tests.networks.test_custom:Squares"}
STEPS = {"total_steps": 20_480}  # the off-policy algorithms learn

# An option, its value, a run in which it has no effect, and one in which it has; None where there is none so small.
CASES = [
    ("host_bridge", "callback", PPO, ON_HOST),
    ("env_timeout", 5, PPO, ON_HOST | {"env_workers": 1}),
    ("env_timeout", 5, ON_HOST | {"env_workers": 0}, ON_HOST | {"env_workers": 2}),
    ("env_timeout", 5, PPO | {"env": "envpool/CartPole-v1"}, None),
    ("exact_resume", True, PPO, ON_HOST | {"save_every": "1k"}),
    ("keep_replay", False, PPO, DQN | {"agent.replay_storage": "host"}),
    ("keep_replay", False, DQN, DQN | {"agent.replay_storage": "disk"}),
    ("replay_dir", "new", DQN, DQN | {"agent.replay_storage": "disk"}),
    ("on_damaged_replay", "drop", DQN | {"agent.replay_storage": "disk"}, None),
    ("on_nonfinite", "continue", PPO, PPO | {"num_seeds": 2}),
    ("project", "mine", PPO, None),
    ("console_every", 5, PPO | {"log_level": "quiet"}, PPO),
    ("eval_envs", 64, PPO | {"eval_episodes": 10}, PPO | {"eval_episodes": 64}),
    ("eval_envs", 300, PPO | {"eval_episodes": 100}, PPO | {"eval_episodes": 200}),
    ("eval_envs", 64, ON_HOST | {"eval_episodes": 4, "num_envs": 8}, ON_HOST | {"eval_episodes": 8, "num_envs": 4}),
    ("agent.replay_compression", "none", DQN, DQN | {"agent.replay_storage": "host"}),
    ("agent.tanh_squash", True, PPO, CONTINUOUS),
    ("agent.log_std_init", -1, PPO, CONTINUOUS),
    ("agent.sde_sample_freq", 4, PPO | {"agent.gsde": True}, CONTINUOUS | {"agent.gsde": True}),
    ("agent.observations", "vector", PPO, BOARD),
    ("agent.clip_coef", 0.1, ONE_STEP, ONE_STEP | {"agent.num_epochs": 2}),
    ("agent.clip_vloss", False, ONE_STEP, PPO),
    ("agent.target_kl", 0.1, ONE_STEP, ONE_STEP | ON_HOST | {"async_pools": 2}),
    ("agent.activation", "relu", PPO | CUSTOM, PPO | CUSTOM | {"agent.hidden_sizes": 8}),
    ("agent.layer_norm", False, PQN | CUSTOM, PQN | CUSTOM | {"agent.hidden_sizes": 8}),
    ("agent.layer_norm", True, SAC | {"agent.network": "simba", "agent.hidden_sizes": 8}, SAC),
    ("agent.layer_norm", False, PQN | {"agent.network": "simba"}, PQN),
    ("agent.apex_alpha", 7, DQN | {"num_envs": 1}, DQN | {"num_envs": 2}),
    ("agent.apex_alpha", 7, DQN | {"agent.epsilon_start": 0, "agent.epsilon_end": 0}, DQN | {"agent.epsilon_end": 0}),
    ("agent.epsilon_steps", 9, DQN | {"agent.epsilon_end": 1}, DQN),
    (
        "agent.munchausen_alpha",
        0.5,
        DQN | {"agent.munchausen": True, "agent.munchausen_clip": 0},
        DQN | {"agent.munchausen": True},
    ),
    (
        "agent.munchausen_clip",
        -2,
        DQN | {"agent.munchausen": True, "agent.munchausen_alpha": 0},
        DQN | {"agent.munchausen": True},
    ),
    (
        "agent.importance_exponent",
        1,
        SAC | {"agent.prioritized": True, "agent.priority_exponent": 0},
        SAC | {"agent.prioritized": True},
    ),
    ("agent.noise_theta", 0.15, TD3 | {"agent.exploration_noise": 0}, TD3),
    ("agent.noise_theta", 0.15, DDPG | {"agent.exploration_noise": 0}, SAC),
    ("agent.target_noise", 0.3, TD3 | {"agent.target_noise_clip": 0}, TD3),
    ("agent.target_noise_clip", 0.1, DDPG, DDPG | {"agent.target_noise": 0.2}),
    ("agent.target_noise_clip", 0.1, TD3 | {"agent.target_noise": 0}, TD3),
]


def planned(values):
    agent = {name.removeprefix("agent."): value for name, value in values.items() if name.startswith("agent.")}
    options = {name: value for name, value in (STEPS | values).items() if not name.startswith("agent.")}
    return plan.validate_plan(load.from_keywords(agent=agent, **options))


def named(made):
    """Return the options of the warnings, and check that each has one."""
    lines = unused.lines(made)
    found = [line.partition(": has no effect; ")[0].removeprefix("--").replace("-", "_") for line in lines]
    assert len({*found}) == len(found)
    return {*found}


@pytest.mark.parametrize(("option", "value", "idle", "used"), CASES)
def test_option_without_effect_is_named_only_where_it_has_none(option, value, idle, used, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if idle["env"].startswith("envpool/"):
        pytest.importorskip("envpool")
    default = known_options(CONFIGS[idle["algo"]])[option].default
    assert option not in named(planned(idle | {option: default}))
    assert option in named(planned(idle | {option: value}))
    if used is not None:
        assert option not in named(planned(used | {option: value}))


@pytest.mark.parametrize(("num_envs", "async_pools", "most"), [(4, 0, 4), (5, 0, None), (8, 2, 4), (10, 2, None)])
def test_more_workers_than_environments_of_pool_are_named(num_envs, async_pools, most):
    """They have an effect: there are as many as environments."""
    made = planned(ON_HOST | {"num_envs": num_envs, "async_pools": async_pools, "env_workers": 5})
    said = f"--env-workers: a pool of {most} environments uses at most {most} workers, got 5; use {most}"
    assert unused.lines(made) == ([] if most is None else [said])
    assert f"{most or 5} worker processes step the environments of each pool" in made.env.view.info


def test_announce_warns_of_each_option_once_in_one_line(capsys):
    console.announce(planned(PPO | {"agent.log_std_init": -1, "env_timeout": 5}), QuietConsole())
    assert capsys.readouterr().err.splitlines() == [
        "warning: --env-timeout: has no effect; gymnax/CartPole-v1 runs on the device",
        "warning: --agent.log-std-init: has no effect; the actions of gymnax/CartPole-v1 are discrete",
    ]


@pytest.mark.parametrize(("noises", "is_told"), [((0.0, 0.1), False), ((0.0, 0.0), True)])
def test_option_with_effect_in_one_member_of_sweep_is_not_named(noises, is_told):
    made = planned(TD3 | {"agent.noise_theta": 0.15, "agent.exploration_noise": noises[0]})
    members = tuple(Member(seed, {"exploration_noise": noise}) for seed, noise in enumerate(noises))
    assert named(made._replace(members=members)) == ({"agent.noise_theta"} if is_told else set())


def test_dropping_damaged_replay_has_effect_on_resume_only():
    made = planned(DQN | {"agent.replay_storage": "host", "on_damaged_replay": "drop"})
    assert named(made) == {"on_damaged_replay"}
    options = made.settings.options.__class__(**vars(made.settings.options) | {"resume": "run"})
    assert named(made._replace(settings=made.settings._replace(options=options))) == set()


@pytest.mark.parametrize("preset", shipped())
def test_preset_sets_no_option_that_another_one_switches_off(preset):
    agent = load.from_command_line(["--config", preset]).agent
    for name in unused.reasons(agent.unused()):
        assert getattr(agent, name) == getattr(type(agent)(), name)
