"""Suggest names for unknown options: corrections of typing mistakes, and translations from other libraries."""

from collections.abc import Iterable
from typing import NoReturn

from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.config.sources import Setting, join_names
from jaxrl_fast.utils.option import options_of
from jaxrl_fast.utils.parsing import nearest

PROGRAM, SWEEP = "python -m jaxrl_fast.train", "python -m jaxrl_fast.sweep"

ELSEWHERE = {  # names of these options in other libraries (docs/guides/migrating.md)
    **dict.fromkeys(("env_id", "env_name"), "env"),
    **dict.fromkeys(("total_timesteps", "timesteps"), "total_steps"),
    **dict.fromkeys(("num_steps", "n_steps"), "agent.rollout_length"),
    **dict.fromkeys(("update_epochs", "n_epochs"), "agent.num_epochs"),
    **dict.fromkeys(("clip_eps", "clip_range"), "agent.clip_coef"),
    **dict.fromkeys(("normalize_env", "vecnormalize"), "agent.normalize_observations"),
    **dict.fromkeys(("start_e", "exploration_initial_eps"), "agent.epsilon_start"),
    **dict.fromkeys(("end_e", "epsilon_finish", "exploration_final_eps"), "agent.epsilon_end"),
    **dict.fromkeys(("exploration_fraction", "epsilon_anneal_time"), "agent.epsilon_steps"),
    **dict.fromkeys(("train_frequency", "train_freq", "training_interval", "utd_ratio"), "agent.replay_ratio"),
    **dict.fromkeys(("policy_noise", "target_policy_noise"), "agent.target_noise"),
    **dict.fromkeys(("policy_freq", "policy_frequency"), "agent.policy_delay"),
    "action_noise": "agent.exploration_noise",
    "alpha": "agent.temperature",
    "autotune": "agent.learn_temperature",
    "noise_clip": "agent.target_noise_clip",
    "policy_lr": "agent.learning_rate",
    "q_lr": "agent.critic_learning_rate",
    "buffer_batch_size": "agent.batch_size",
    "clip_range_vf": "agent.clip_vloss",
    "ent_coef": "agent.entropy_coef",
    "lr": "agent.learning_rate",
    "lstm_hidden_size": "agent.memory_size",
    "n_envs": "num_envs",
    "net_arch": "agent.hidden_sizes",
    "norm_adv": "agent.normalize_advantage",
    "preset": "config",
    "target_network_frequency": "agent.target_update_interval",
    "tensorboard_log": "run_dir",
    "top_quantiles_to_drop_per_net": "agent.top_quantiles_to_drop",
    "track": "wandb",
    "vf_coef": "agent.value_coef",
    "wandb_project_name": "project",
}


def positive(name: str) -> str:
    """Return no_x as x and agent.no_x as agent.x; other names unchanged."""
    prefix, dot, last = name.rpartition(".")
    return f"{prefix}{dot}{last.removeprefix('no_')}"


def refuse_unknown(setting: Setting, known: Iterable[str], algo: str = "", program: str = PROGRAM) -> NoReturn:
    """Raise ValueError for a name that no option has, with a hint."""
    if setting.name == "algo" and setting.on_command_line:
        example = " ".join([program, *map(str, setting.values[:1] or ["ppo"])])
        raise ValueError(f"{setting.origin}: the algorithm is the first argument; use {example}")
    name = positive(setting.name.removeprefix("no_"))
    by_last = {known_name.removeprefix("agent."): known_name for known_name in (*known, "config")}
    last = name.removeprefix("agent.")
    near = lambda cutoff: nearest(last, by_last, lambda found: setting.spell(by_last[found]), cutoff)
    ours = ELSEWHERE.get(last.lower(), "")
    alias = f"; did you mean {setting.spell(ours)}?" if ours in by_last.values() else ""
    is_of_agent = bool(algo) and name.startswith("agent.")
    having = [other for other, config in CONFIGS.items() if last in options_of(config)]
    has = "has" if len(having) == 1 else "have"
    elsewhere = f"; {join_names(having)} {has} it" if having and is_of_agent and last not in by_last else ""
    hint = elsewhere or near(0.9) or alias or near(0.6)
    ending = f"; {program} --help lists all" if setting.on_command_line else ""
    problem = f"{algo} has no such option" if is_of_agent else "unknown option"
    raise ValueError(f"{setting.origin}: {problem}{hint or ending}")
