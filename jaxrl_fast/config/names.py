"""Suggest names for unknown options: corrections of typing mistakes, and translations from other libraries."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxrl_fast.config.sources import PROGRAM, Setting, describe_value, join_names
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import Option, complete, options_of, value_of
from jaxrl_fast.utils.parsing import nearest, shown

ELSEWHERE = {  # names of these options in other libraries (docs/guides/migrating.md)
    **dict.fromkeys(("env_id", "env_name"), "env"),
    **dict.fromkeys(("total_timesteps", "timesteps"), "total_steps"),
    **dict.fromkeys(("num_steps", "n_steps"), "rollout_length"),
    **dict.fromkeys(("update_epochs", "n_epochs"), "num_epochs"),
    **dict.fromkeys(("clip_eps", "clip_range"), "clip_coef"),
    **dict.fromkeys(("normalize_env", "vecnormalize"), "normalize_observations"),
    **dict.fromkeys(("start_e", "epsilon_start", "exploration_initial_eps"), "explore.start"),
    **dict.fromkeys(("end_e", "epsilon_finish", "exploration_final_eps"), "explore.end"),
    **dict.fromkeys(("exploration_fraction", "epsilon_anneal_time"), "explore.steps"),
    **dict.fromkeys(("anneal_lr", "lr_decay"), "schedule"),
    **dict.fromkeys(("train_frequency", "train_freq", "training_interval", "utd_ratio"), "replay_ratio"),
    **dict.fromkeys(("policy_noise", "target_policy_noise"), "target_noise"),
    **dict.fromkeys(("policy_freq", "policy_frequency"), "policy_delay"),
    **dict.fromkeys(("action_noise", "exploration_noise"), "noise.std"),
    **dict.fromkeys(("tensorboard", "track", "trackio", "wandb"), "loggers"),
    "alpha": "temperature",
    "autotune": "learn_temperature",
    "noise_clip": "target_noise_clip",
    "policy_lr": "learning_rate",
    "q_lr": "critic_learning_rate",
    "buffer_batch_size": "batch_size",
    "buffer_size": "replay.size",
    "crossq": "target",
    "clip_range_vf": "value.clip_vloss",
    "ent_coef": "entropy_coef",
    "learning_rate_schedule": "schedule",
    "lr": "learning_rate",
    "lstm_hidden_size": "memory.size",
    "n_envs": "num_envs",
    "name": "run_dir",
    "net_arch": "network.hidden_sizes",
    "norm_adv": "normalize_advantage",
    "preset": "config",
    **dict.fromkeys(("target_network_frequency", "target_update_interval"), "target.interval"),
    "tensorboard_log": "run_dir",
    "top_quantiles_to_drop_per_net": "value.drop",
    **dict.fromkeys(("gsde", "tanh_squash", "use_sde"), "policy"),
    "vf_coef": "value_coef",
    "wandb_project_name": "project",
}


def positive(name: str) -> str:
    """Return no_x as x and network.no_x as network.x; other names unchanged."""
    prefix, dot, last = name.rpartition(".")
    return f"{prefix}{dot}{last.removeprefix('no_')}"


def refuse_ambiguous(setting: Setting, paths: Sequence[str]) -> NoReturn:
    """Raise ValueError for a name that several options have."""
    raise ValueError(
        f"{setting.origin}: must name one option, got one for each of {' and '.join(paths)}; use a whole name"
    )


def refuse_unknown(
    setting: Setting,
    known: Mapping[str, Option],
    records: Sequence[Any] = (),
    algo: str = "",
    program: str = PROGRAM,
) -> NoReturn:
    """Raise ValueError for a name that no option has, with a hint. `records` are those with the known options."""
    if setting.name == "algo" and setting.on_command_line:
        example = " ".join([program, *map(str, setting.values[:1] or ["ppo"])])
        raise ValueError(f"{setting.origin}: the algorithm is the first argument; use {example}")
    name = positive(setting.name)
    offered, ours = of_other_parts(known), ELSEWHERE.get(name.rpartition(".")[2].lower(), "")
    of_others = "." in name or ours not in known  # alpha of SAC means the temperature, not replay.alpha
    if (paths := complete(name, offered)) and of_others:
        of_choice = paths[0].rpartition(".")[0]
        word = next(value_of(record, of_choice) for record in records if of_choice in options_of(record))
        *first, last = offered[paths[0]]
        way = f"{', '.join(first)} or {last}" if first else last
        got = f", got {shown(' '.join(map(describe_value, setting.values)))}" if setting.values else ""
        raise ValueError(f"{setting.origin}: {of_choice} {word} has no such option{got}; use {of_choice} {way}")
    if name != setting.name and complete(name, known):
        raise ValueError(f"{setting.origin}: {name} requires a value, got none; give it one")
    having = [other for other, config in ALGORITHMS.items() if algo and complete(name, all_options(config))]
    if having and of_others:
        has = "has" if len(having) == 1 else "have"
        raise ValueError(f"{setting.origin}: {algo} has no such option; {join_names(having)} {has} it")
    if owners := [path for path, option in known.items() if name in option.parts]:
        raise ValueError(f"{setting.origin}: unknown option; did you mean {owners[0]} {name}?")
    candidates = [*known, *offered, "config"]
    alias = f"; did you mean {ours}?" if ours in candidates else ""
    hint = _nearest(name, candidates if of_others else [*known], cutoff=0.9) or alias or _nearest(name, candidates)
    ending = f"; {program} --help all lists all" if setting.on_command_line else ""
    raise ValueError(f"{setting.origin}: unknown option{hint or ending}")


def _nearest(name: str, paths: Sequence[str], cutoff: float = 0.6) -> str:
    """Return a hint at the options whose path or last word is nearest to a name."""
    spelled = {path.rpartition(".")[2]: path for path in reversed(paths)} | {path: path for path in paths}
    return nearest(name, spelled, spelled.__getitem__, cutoff)


def of_other_parts(known: Mapping[str, Option]) -> dict[str, list[str]]:
    """Return the options of parts that are not chosen, by path, each with the words of the parts that have it."""
    found: dict[str, list[str]] = {}
    for path, option in known.items():
        for word, part in option.parts.items():
            for inner in options_of(part):
                if (name := f"{path}.{inner}") not in known:
                    found.setdefault(name, []).append(word)
        for inner in options_of(option.custom) if option.custom else ():
            if (name := f"{path}.{inner}") not in known:
                found.setdefault(name, []).append("MODULE:CLASS")
    return found


def all_options(record: Any) -> list[str]:
    """Return the paths of a record's options, of all parts that may be chosen."""
    known = options_of(record)
    return [*known, *of_other_parts(known)]
