"""Names of options: what exists, and what a misspelled one may have meant."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from jaxrl_fast.agents.configs import CONFIGS
from jaxrl_fast.config.options import SWITCHES, Options, types_of
from jaxrl_fast.config.sources import Setting
from jaxrl_fast.utils.parsing import nearest

ELSEWHERE = {  # what other libraries call our options (docs/moving.md)
    **dict.fromkeys(("env_id", "env_name"), "env"),
    **dict.fromkeys(("total_timesteps", "timesteps"), "total_steps"),
    **dict.fromkeys(("num_steps", "n_steps"), "agent.rollout_length"),
    **dict.fromkeys(("update_epochs", "n_epochs"), "agent.num_epochs"),
    **dict.fromkeys(("clip_eps", "clip_range"), "agent.clip_coef"),
    "clip_range_vf": "agent.clip_vloss",
    **dict.fromkeys(("normalize_env", "vecnormalize"), "agent.normalize_observations"),
    **dict.fromkeys(("start_e", "exploration_initial_eps"), "agent.epsilon_start"),
    **dict.fromkeys(("end_e", "epsilon_finish", "exploration_final_eps"), "agent.epsilon_end"),
    **dict.fromkeys(("exploration_fraction", "epsilon_anneal_time"), "agent.epsilon_steps"),
    **dict.fromkeys(("train_frequency", "train_freq", "training_interval"), "agent.replay_ratio"),
    "target_network_frequency": "agent.target_update_interval",
    "n_envs": "num_envs",
    "wandb_project_name": "project",
    "preset": "config",
    "track": "wandb",
    "tensorboard_log": "run_dir",
    "lr": "agent.learning_rate",
    "vf_coef": "agent.value_coef",
    "ent_coef": "agent.entropy_coef",
    "norm_adv": "agent.normalize_advantage",
    "buffer_batch_size": "agent.batch_size",
    "net_arch": "agent.hidden_sizes",
}


PROGRAM, SWEEP = "python -m jaxrl_fast.train", "python -m jaxrl_fast.sweep"


def known_options(agent_type: type) -> dict[str, Any]:
    """Every option of a run with this algorithm, and its type."""
    return types_of(Options) | {f"agent.{name}": kind for name, kind in types_of(agent_type).items()}


def without_no(setting: Setting, known: Mapping[str, Any]) -> Setting:
    """--no-x and --agent.no-x as x, false."""
    name = positive(setting.name)
    if name != setting.name and known.get(name) in SWITCHES and not setting.values:
        return Setting(name, ["false"], setting.said)
    return setting


def positive(name: str) -> str:
    """no_x as x, agent.no_x as agent.x; a name without it as it is."""
    prefix, dot, last = name.rpartition(".")
    return f"{prefix}{dot}{last.removeprefix('no_')}"


def refuse_unknown(setting: Setting, known: Mapping[str, Any], algo: str = "", program: str = PROGRAM) -> NoReturn:
    """No option has this name."""
    dashed, spell = _is_dashed(setting), speller(setting)
    name = positive(setting.name.removeprefix("no_"))
    written = setting.said if dashed else setting.said.replace(setting.name, repr(setting.name), 1)
    if dashed and name != setting.name and known.get(name) in SWITCHES and setting.values:
        raise ValueError(f"{setting.said} takes no value; what is {setting.values[0]!r}?")
    what = f"{algo} has no option" if name.startswith("agent.") else "there is no option"
    theirs = name.removeprefix("agent.").lower()
    ours = "agent.n_step" if theirs == "n_steps" and "agent.n_step" in known else ELSEWHERE.get(theirs, "")
    elsewhere = f"; here that is {spell(ours)} (docs/moving.md)" if ours in {*known, "config"} else ""
    very_near = nearest(name, known, spell, cutoff=0.9)
    hint = _whose(name, known, algo, spell) or very_near or elsewhere or nearest(name, known, spell)
    ending = f"; {program} --help lists all" if dashed else ""
    raise ValueError(f"{what} {written}{hint or ending}")


def speller(setting: Setting) -> Callable[[str], str]:
    """Spells names as this option was written: --num-envs or num_envs."""
    return (lambda name: "--" + name.replace("_", "-")) if _is_dashed(setting) else (lambda name: name)


def _is_dashed(setting: Setting) -> bool:
    """Whether it was written on a command line, and not with dashes in a preset."""
    return setting.said.startswith("-") and " " not in setting.said


def _whose(name: str, known: Iterable[str], algo: str, spell: Callable[[str], str]) -> str:
    """For a message about an option that this algorithm has not, and others have."""
    whole = f"agent.{name.removeprefix('agent.')}"
    others = [other for other, kind in CONFIGS.items() if whole[6:] in types_of(kind)]
    if not (algo and others) or whole in known:
        return ""
    return f"; {'that' if name == whole else spell(whole)} is an option of {' and '.join(others)}"
