"""Check an environment: step it with random actions, and find problems that would spoil a training."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxrl_fast.options.declare import COUNT, SIZE, Bounds, option
from jaxrl_fast.training import random_steps
from jaxrl_fast.training.random_steps import Rows
from jaxrl_fast.utils import formatting
from jaxrl_fast.utils.errors import EnvFault, blamed, why

NUM_ENVS = 4  # environments that are stepped together
TRIAL_STEPS = 4  # first steps, from whose time the number of further steps is chosen
TRIAL_SHARE = 0.1  # of the time, at most
MIN_SHARE = 0.25  # of the time is left for each part of the check, however long the compilation before it takes
TIMED_UPDATES = 4  # about as many updates are made to time a training
LARGE_REWARD = 100.0  # in absolute value


@dataclass(frozen=True)
class Options:
    """Environment and effort of the check."""

    env: str = option("", "Environment, as for train; the same as ENV.")
    env_options: dict[str, Any] = option({}, "Parameters of the environment.")
    wrap: tuple[str, ...] = option((), "Wrappers, as for train: hide=PART removes a part of the observation.")
    steps: int = option(1000, "Maximum number of steps in each of four environments.", bounds=COUNT)
    max_time: float = option(
        20.0,
        "About how many seconds the check may take; fewer steps are made if they are slow.",
        bounds=Bounds(0, exclusive_min=True),
    )
    algo: str = option("ppo", "Algorithm whose training is timed; none: no training is timed.")
    num_envs: int = option(8, "Number of environments of the timed training.", bounds=SIZE)


class Finding(NamedTuple):
    """The result of one check."""

    level: Literal["ok", "note", "fix"]  # note: a guess or an advice; fix: surely wrong
    text: str


def check(env_id: Any, options: Options) -> Iterator[Finding]:
    """Yield the findings. Exceptions of the environment carry a note of their place, see `errors.blamed`.

    Raises:
        ValueError: If the environment cannot be made.
    """
    from jaxrl_fast.envs import spaces
    from jaxrl_fast.envs.host.env import original_errors
    from jaxrl_fast.networks import torsos

    began = time.perf_counter()
    left = lambda: max(options.max_time - (time.perf_counter() - began), MIN_SHARE * options.max_time)
    settings = None if options.algo == "none" else _settings(env_id, options)  # refuses an unknown algorithm
    with original_errors():
        env = random_steps.make(env_id, options, 1)
        spec = env.spec
        yield Finding(
            "ok", f"observation  {spaces.describe_obs(spec.obs)}   network {torsos.describe(spec.obs, 'auto', 'auto')}"
        )
        yield Finding(
            "ok",
            f"action       {spaces.describe_action(spec.action)}{', some forbidden by a mask' * spec.has_action_mask}",
        )
        num_envs, few = NUM_ENVS, (min(TRIAL_STEPS, options.steps), TRIAL_SHARE * options.max_time)
        try:
            trial = random_steps.play(env_id, options, num_envs, *few)
        except Exception as error:  # environments may raise anything
            if "could not be made" not in (blamed(error) or "") or env.host is None:
                raise
            yield Finding("note", f"instances    {NUM_ENVS} environments cannot exist together ({why(error)}); "
                                  "with num_envs 1, a training needs one")  # fmt: skip
            num_envs, settings = 1, settings and settings.replace(num_envs=1)
            trial = random_steps.play(env_id, options, num_envs, *few)
        rows = random_steps.play_in_time(env_id, options, trial, left())
        yield from _of_episodes(rows, options)
        yield from _of_seeds(env_id, options, rows, env.on_device)
        yield from _of_saving(env)
        yield from _of_time(settings, rows, left())


def _seen(rows: Rows, options: Options) -> str:
    """Return how many steps were made."""
    environments = formatting.counted(rows.num_envs, "environment")
    slow = "" if rows.in_time else f", as many as max_time {options.max_time:g} allows"
    return f"{environments} of {formatting.counted(len(rows.reward), 'step')} each{slow}"


def _longer(rows: Rows, options: Options) -> str:
    """Return the option with which the check makes more steps."""
    return f"--steps {10 * options.steps}" if rows.in_time else f"--max-time {10 * options.max_time:g}"


def _of_episodes(rows: Rows, options: Options) -> Iterator[Finding]:
    """Yield findings about rewards and the ends of episodes."""
    import numpy as np

    last, discount = rows.ends, rows.of_games(rows.discount).min(axis=1)  # 0 if any player's last state is terminal
    terminated, truncated = last & (discount == 0), last & (discount != 0)
    num_terminated, num_truncated = int(terminated.sum()), int(truncated.sum())
    ends = f"{num_terminated} terminated, {num_truncated} truncated"
    size = f"{_seen(rows, options)}, by random actions"
    if num_terminated + num_truncated:
        yield Finding("ok", f"episodes     {num_terminated + num_truncated} in {size}: {ends}")
    else:
        yield Finding("note", f"episodes     none ended in {size}; {_longer(rows, options)} looks longer. Without ends "
                               "there are no returns: --env-option max_episode_steps=1000 ends episodes")  # fmt: skip
    lengths = np.concatenate([np.diff(np.flatnonzero(one)) - 1 for one in last.T])
    if num_terminated > 1 and not num_truncated and len(lengths) > 1 and len(set(lengths.tolist())) == 1:
        after = formatting.counted(int(lengths[0]), "step")
        yield Finding("note", f"ends         every episode terminated after {after}; if that is a time "
                               "limit, report it as truncated, so that values bootstrap there")  # fmt: skip
    begins = np.vstack([np.zeros_like(rows.last[:1]), rows.last[:-1]])  # rows without a reward
    low, high = float(rows.reward[~begins].min()), float(rows.reward[~begins].max())
    large = max(abs(low), abs(high)) > LARGE_REWARD
    hint = "; rewards normalized may help" if large else ""
    yield Finding("note" if large else "ok", f"rewards      {low:g} to {high:g}{hint}")
    if low == high:
        yield Finding("note", "rewards      all rewards of random actions are equal, so there is nothing to learn from")


def _of_seeds(env_id: Any, options: Options, rows: Rows, on_device: bool) -> Iterator[Finding]:
    """Yield findings about random numbers: whether a seed repeats an episode, and whether environments differ."""
    num_envs, num_steps = rows.num_envs, len(rows.reward)
    again = random_steps.play(env_id, options, num_envs, num_steps)
    if at := _first_difference(rows, again):
        yield Finding("fix", f"seeds        the same seed and actions gave a different {at}; draw all random numbers "
                              "from self.np_random, which reset(seed=...) seeds")  # fmt: skip
    else:
        yield Finding("ok", "seeds        the same seed and actions give the same steps")
    alone = None if at or on_device or num_envs == 1 else random_steps.play(env_id, options, 1, num_steps)
    if alone is not None and (apart := _first_difference(rows, alone, 1)):
        yield Finding("fix", f"state        an environment gave a different {apart} alone than next to others; keep "
                              "its state in self, not in the class or the module")  # fmt: skip
    if num_envs > 1 and _same_starts(rows.first_obs):
        yield Finding("note", "seeds        all environments start with the same observation")


def _first_difference(one: Rows, other: Rows, num_envs: int | None = None) -> str:
    """Return where all or the first `num_envs` environments differ: "reward in step 3"; "" if they do not."""
    import jax
    import numpy as np

    starts = zip(jax.tree.leaves(one.first_obs), jax.tree.leaves(other.first_obs))
    if any(not np.array_equal(a[:num_envs], b[:num_envs]) for a, b in starts):
        return "first observation"
    found = []
    for name in ("obs", "reward", "last"):
        for a, b in zip(jax.tree.leaves(getattr(one, name)), jax.tree.leaves(getattr(other, name))):
            different = (a[:, :num_envs] != b[:, :num_envs]).reshape(len(a), -1).any(1)
            if different.any():
                found.append((int(np.argmax(different)), {"obs": "observation", "last": "end"}.get(name, name)))
    return f"{min(found)[1]} in step {min(found)[0] + 1}" if found else ""


def _of_saving(env: Any) -> Iterator[Finding]:
    """Yield a finding: whether a resumed run continues the episodes of host environments."""
    if env.host is None:
        return
    try:
        state = env.host.save()
    finally:
        env.host.close()
    if isinstance(state, str):
        yield Finding("note", f"resume       starts new episodes: {state}")
    else:
        yield Finding("ok", "resume       continues the episodes: a copy returned the same steps")


def _same_starts(first_obs: Any) -> bool:
    import jax

    return all((x == x[:1]).all() for x in jax.tree.leaves(first_obs))


def _settings(env_id: Any, options: Options) -> Any:
    """Return the settings of the training that is timed."""
    from jaxrl_fast.config.load import from_keywords

    return from_keywords(
        None,
        options.algo,
        None,
        env=env_id,
        env_options=options.env_options,
        num_envs=options.num_envs,
        wrap=options.wrap,
    )


def _of_time(settings: Any, rows: Rows, max_time: float) -> Iterator[Finding]:
    """Yield findings about the duration of a step, alone and as a part of a training."""
    each = rows.duration / rows.ends.size
    yield Finding(
        "ok", f"speed        {formatting.short_number(1 / each)} steps per second with "
              f"{formatting.counted(rows.num_envs, 'environment')}"
    )  # fmt: skip
    if settings is None:
        return
    num_envs = settings.options.num_envs
    setting = f"{settings.algo} with {formatting.counted(num_envs, 'environment')}"
    update_s = settings.agent.length(num_envs) * num_envs * each
    if TIMED_UPDATES * update_s > max_time:
        yield Finding(
            "note", f"training     not timed: steps of an update by {setting} take {formatting.seconds(update_s)}"
        )
        return
    try:
        rate = _training_rate(settings)
    except EnvFault:
        raise
    except ValueError as error:  # the algorithm does not fit the environment
        yield Finding("note", f"training     not timed: {error}")
        return
    share = min(each * rate, 1.0)
    speed = f"{formatting.short_number(rate)} steps per second by {setting}"
    yield Finding("ok", f"training     {speed}, of which the environment takes about {share:.0%}")


def _training_rate(settings: Any) -> float:
    """Return the environment steps per second of a training, updates included."""
    from jaxrl_fast.parallel import program
    from jaxrl_fast.training import build, calibrate
    from jaxrl_fast.utils.devices import release_envs

    algorithm = build.load_algorithm(settings)
    settings, env, _, placement = build.build(settings, algorithm, 100)
    agent = build.make_agent(calibrate.without_warmup(settings.agent), algorithm, env, 100)
    try:
        built = program.build(env, agent, 100, placement)
        num_envs = settings.options.num_envs
        steps_per_update = settings.agent.length(num_envs) * num_envs
        return calibrate.measure(built, 0, 1) * steps_per_update
    finally:
        release_envs([env])
