"""Choose the number of environments with the best throughput on this machine, for num_envs auto.

Counts are doubled, and each is timed with real updates of the agent. The search stops if doubling gains little, memory
is full, a run would have too few updates, or the time limit is reached.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_fast.config.settings import Settings
from jaxrl_fast.loggers.terminal import make_console
from jaxrl_fast.parallel import program
from jaxrl_fast.training import bonus_data, build, memory
from jaxrl_fast.utils import compile_cache, formatting
from jaxrl_fast.utils.errors import is_out_of_memory
from jaxrl_fast.utils.memory import format_bytes, free_bytes

GAIN = 1.1  # the least factor of throughput for which a doubled count is accepted
PATIENCE = 2  # counts that are tried beyond the best one, since timings vary on a busy machine
MIN_UPDATES = 20  # of a run with several environments: with fewer it would be fast but not learn
BUDGET_S = 120.0  # the time after which no other count is tried
SAMPLE_S = 0.3  # the least duration of a timed sample; the fastest of three is used


class Trial(NamedTuple):
    """One count of environments."""

    num_envs: int
    rate: float | None = None  # environment steps per second of all seeds, updates included; None: not run
    why: str = ""  # the reason if it was not run
    too_many: bool = False  # whether larger counts would not run either


def gain(before: Trial, after: Trial) -> float:
    """Return the gain of one doubling between two counts that were run."""
    assert before.rate is not None and after.rate is not None
    return (after.rate / before.rate) ** (1 / math.log2(after.num_envs / before.num_envs))


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial after which doubling gains too little, or None if nothing was run."""
    found: Trial | None = None
    for trial in _run(trials):
        found = trial if found is None or gain(found, trial) >= GAIN else found
    return found


def next_count(trials: Sequence[Trial], start: int) -> int | None:
    """Return the next count: upward from `start`, or downward if `start` is too many. None: the search is done."""
    if not trials:
        return start
    last, found = trials[-1], best_trial(trials)
    if any(trial.too_many for trial in trials):
        lower = last.num_envs // 2
        return lower if found is None and lower not in (0, *(trial.num_envs for trial in trials)) else None
    beyond = [trial for trial in _run(trials) if found is not None and trial.num_envs > found.num_envs]
    return 2 * last.num_envs if len(beyond) < PATIENCE else None


def choose(settings: Settings) -> Settings:
    """Return the settings with the best number of environments, and print the trials.

    Raises ValueError if no number works.
    """
    from jaxrl_fast import envs

    options = settings.options
    env = envs.make(
        options.env, 1, build.host_env_config(options, build.TRAINING), **options.env_options
    )  # a mistake in the options concerns every count
    if not env.on_device:
        raise ValueError(f"num_envs: must be a number for the host environment {env.spec.id}, got auto")
    trials: list[Trial] = []
    began, num_printed = time.perf_counter(), 0
    terminal = make_console(options.log_level)
    with contextlib.closing(terminal), compile_cache.compile_cache(options.compile_cache):
        while (count := next_count(trials, options.num_envs)) and time.perf_counter() - began < BUDGET_S:
            trials.append(measure_count(settings, count))
            if best_trial(trials) is None:
                continue  # all counts may fail, and then no table is printed
            lines = table(trials)
            for line in lines[num_printed:]:
                terminal.print(line)
            num_printed = len(lines)
        found = best_trial(trials)
        if found is None:
            tried = trials[0]
            reason = f"{formatting.counted(tried.num_envs, 'environment')} failed: {tried.why}"
            raise ValueError(f"num_envs: no number of environments works, got auto; {reason}")
        terminal.print(f"{found.num_envs:>9}  environment{'s' * (found.num_envs > 1)} chosen")
    return with_count(settings, found.num_envs)


def measure_count(settings: Settings, num_envs: int) -> Trial:
    """Compile and time some updates with this number of environments, unless it cannot be used."""
    settings = with_count(settings, num_envs)
    options, algorithm = settings.options, build.load_algorithm(settings)
    steps_per_update = settings.agent.length(num_envs) * num_envs
    num_updates = -(-options.total_steps // steps_per_update)
    if options.total_steps < steps_per_update or num_envs > 1 and num_updates < MIN_UPDATES:
        made = options.total_steps // steps_per_update
        steps, updates = formatting.counted(options.total_steps, "step"), formatting.counted(made, "update")
        return Trial(num_envs, why=f"{steps} in total, only {updates}", too_many=True)
    try:
        settings, env, _, placement = build.build(settings, algorithm, num_updates)
        agent = build.make_agent(without_warmup(settings.agent), algorithm, env, num_updates)
    except ValueError as error:
        return Trial(num_envs, why=str(error))
    try:
        needed = memory.estimate(env, agent, placement, bonus_data.of_program(settings.agent))
        memory.check_fits(needed, settings.agent.replay_size, steps_per_update)
        built = program.build(env, agent, num_updates, placement)
        takes, free = placement.num_devices * built.memory, free_bytes(placement.num_devices)
        if free is not None and takes > free:
            needs, there = format_bytes(takes), format_bytes(free)
            return Trial(num_envs, why=f"an update needs {needs} of memory, of which {there} are free", too_many=True)
        rate = measure(built, options.seed, options.num_seeds) * steps_per_update * options.num_seeds
    except ValueError as error:
        return Trial(num_envs, why=str(error), too_many=True)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return Trial(num_envs, why="it does not fit into memory", too_many=True)
    return Trial(num_envs, rate)


def measure(built: Any, seed: int, num_seeds: int) -> float:
    """Return updates per second."""
    seeds = np.arange(seed, seed + num_seeds, dtype=np.int32)
    state = built.init(seeds if num_seeds > 1 else seeds[0])

    def duration(length: int) -> float:
        nonlocal state
        began = time.perf_counter()
        state, rows = built.chunk(state, np.asarray(length, np.int32))
        jax.block_until_ready(rows)
        return time.perf_counter() - began

    length, took = 1, duration(1)
    while took < SAMPLE_S and length < built.capacity:
        length = min(2 * length, built.capacity)
        took = duration(length)
    return length / min(took, duration(length), duration(length))


def table(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each count, below a heading. Gains are per doubling."""
    lines, before = ["num_envs auto: steps a second, updates included", "     envs   steps/s   gain"], None
    for trial in trials:
        if trial.rate is None:
            lines.append(f"{trial.num_envs:>9}  not run: {trial.why}")
            continue
        gained = "" if before is None else f"{100 * (gain(*sorted((before, trial))) - 1):+.0f}%"
        lines.append(f"{trial.num_envs:>9}{formatting.short_number(trial.rate):>10}{gained:>7}".rstrip())
        before = trial
    return lines


def with_count(settings: Settings, num_envs: int) -> Settings:
    """Return the settings with this number of environments."""
    return settings._replace(options=dataclasses.replace(settings.options, num_envs=num_envs), auto_num_envs=False)


def _run(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that were run, by count."""
    return sorted(trial for trial in trials if trial.rate is not None)


def without_warmup(agent: Any) -> Any:
    """Return the agent's options without a warmup, because steps without learning cost less."""
    return agent if agent.learning_starts is None else dataclasses.replace(agent, learning_starts=0)
