"""Find options that have no effect in a run, because of its other options or its environment.

Three places declare them: `only` of an option (`utils.option`), `unused` of an algorithm's options (`agents.configs`),
and `_of_run`. An option without its required option (`needs`) was rejected before (`config.settings.check_unused`).
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from jaxrl_fast.agents.configs.common import Unused
from jaxrl_fast.config.options import Options, known_options
from jaxrl_fast.training import build
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.types import Box
from jaxrl_fast.utils.formatting import counted
from jaxrl_fast.utils.option import options_of


def lines(plan: Plan) -> list[str]:
    """Return a warning for each option that differs from its default, and has no effect in any member of a sweep."""
    agents = [dataclasses.replace(plan.settings.agent, **member.values) for member in plan.members]
    agents = agents or [plan.settings.agent]
    known = known_options(type(agents[0]))
    of_run, of_each = reasons(_of_run(plan)), [_of_agent(plan, agent) for agent in agents]
    shared = {name: why for name, why in of_each[0].items() if all(name in other for other in of_each)}
    value = lambda name, agent: getattr(
        agent if name.startswith("agent.") else plan.settings.options, name.removeprefix("agent.")
    )
    found = [
        f"--{name.replace('_', '-')}: has no effect; {why}"
        for name, why in (of_run | shared).items()
        if any(value(name, agent) != known[name].default for agent in agents)
    ]
    return found + _too_many_workers(plan)


def _too_many_workers(plan: Plan) -> list[str]:
    """Return a warning if a pool has fewer environments than the requested worker processes."""
    asked, most = plan.settings.options.env_workers, plan.env.spec.num_envs // plan.env.parallelism.num_pools
    if asked == "auto" or asked <= most:
        return []
    size, uses = counted(most, "environment"), counted(most, "worker")
    return [f"--env-workers: a pool of {size} uses at most {uses}, got {asked}; use {most}"]


def reasons(rows: Iterable[Unused]) -> dict[str, str]:
    """Return the first reason why each option has no effect, by name."""
    found: dict[str, str] = {}
    for name, is_unused, why in rows:
        if is_unused:
            found.setdefault(name, why)
    return found


def _of_run(plan: Plan) -> list[Unused]:
    """Return the options of a run that may have no effect, and the replay option that depends on the storage."""
    options, env, has_files = plan.settings.options, plan.env, bool(plan.agent.learning.resources)
    on_device, no_files = f"{env.spec.id} runs on the device", "no replay is in host memory or on disk"
    has_workers = env.host is not None and env.host.num_workers > 0
    num_episodes, in_sweep = options.eval_episodes, bool(plan.members)  # a sweep has other defaults
    num_eval_envs = [build.num_eval_envs(options, n, env.on_device) for n in (options.eval_envs, Options().eval_envs)]
    needs = f"{counted(num_episodes, 'episode')} need{'s' * (num_episodes == 1)} {counted(num_episodes, 'environment')}"
    all_episodes_at_once = options.eval_envs > num_episodes and len({*num_eval_envs}) == 1
    has_replay = hasattr(plan.settings.agent, "replay_compression")
    return [
        ("eval_envs", all_episodes_at_once, needs),
        ("console_every", options.log_level == "quiet" and not in_sweep, "log_level is quiet"),
        ("project", not (options.wandb or options.trackio), "neither wandb nor trackio is on"),
        ("host_bridge", env.on_device, on_device),
        ("env_timeout", env.on_device, on_device),
        ("env_timeout", not has_workers, f"{env.spec.id} is stepped without worker processes"),
        ("keep_replay", not has_files, no_files),
        ("replay_dir", not has_files, no_files),
        ("on_damaged_replay", not options.resume, "no run is resumed"),
        ("on_damaged_replay", not has_files, no_files),
        ("exact_resume", env.on_device, f"{on_device}, and is always resumed exactly"),
        ("on_nonfinite", options.num_seeds == 1 and not in_sweep, "num_seeds is 1"),
        ("agent.replay_compression", has_replay and not has_files, "the replay is on the device"),
    ]


def _of_agent(plan: Plan, agent: Any) -> dict[str, str]:
    """Return why options of an algorithm have no effect: because of `only`, or of other options."""
    missing = reasons(_missing(plan, agent))
    found = {o.name: missing[o.only] for o in options_of(type(agent)).values() if o.only in missing}
    found = reasons(agent.unused()) | found if hasattr(agent, "unused") else found
    return {f"agent.{name}": why for name, why in found.items()}


def _missing(plan: Plan, agent: Any) -> list[Unused]:
    """Return the situations that `only` of an option may name, and whether the run lacks them."""
    spec, split, updates = plan.env.spec, plan.env.parallelism, plan.agent.learning.gradient_steps
    num_acting = spec.num_envs * split.num_shards // split.num_pools
    has_image = any(len(part.shape) in (2, 3) for part in jax.tree.leaves(spec.obs))
    is_current = not plan.settings.options.async_pools  # no step of a rollout is by an older policy
    has_one_step = updates is not None and updates.num == 1 and is_current
    return [
        ("continuous", not isinstance(spec.action, Box), f"the actions of {spec.id} are discrete"),
        ("several_envs", num_acting == 1, "one environment acts at a time"),
        ("no_simba", getattr(agent, "network", "") == "simba", "network simba has built-in normalization"),
        ("images", not has_image, f"{spec.id} has no observation [H, W] or [H, W, C]"),
        ("several_steps", has_one_step, "an update has one gradient step, on data of the current policy"),
    ]
