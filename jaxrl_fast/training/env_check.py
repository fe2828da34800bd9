"""Check an environment: step it with random actions, and find problems that would spoil a training."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxrl_fast.options.declare import COUNT, SIZE, Bounds, option
from jaxrl_fast.utils import formatting
from jaxrl_fast.utils.errors import EnvFault

NUM_ENVS = 4  # environments that are stepped together
TRIAL_STEPS = 20  # first steps, from whose time the number of further steps is chosen
LARGE_REWARD = 100.0  # in absolute value


@dataclass(frozen=True)
class Options:
    """Environment and effort of the check."""

    env_options: dict[str, Any] = option({}, "Parameters of the environment.")
    steps: int = option(1000, "Maximum number of steps in each of four environments.", bounds=COUNT)
    max_time: float = option(
        20.0, "Time limit of one pass over these steps, in seconds.", bounds=Bounds(0, exclusive_min=True)
    )
    algo: str = option("ppo", "Algorithm whose training is timed; none: no training is timed.")
    num_envs: int = option(8, "Number of environments of the timed training.", bounds=SIZE)


class Finding(NamedTuple):
    """The result of one check."""

    level: Literal["ok", "note", "fix"]
    text: str


class Rows(NamedTuple):
    """T steps of N environments, as numpy arrays; with P players, P * N rows, in the order of players."""

    first_obs: Any  # [N, ...]
    obs: Any  # [T, N, ...]
    reward: Any  # [T, N]
    discount: Any
    last: Any
    duration: float  # seconds, compilation excluded
    num_envs: int  # N

    @property
    def ends(self) -> Any:
        """Return where each environment's episode ends, for all its players: bool [T, N]."""
        return self.of_games(self.last).all(axis=1)

    def of_games(self, values: Any) -> Any:
        """Return values of rows [T, P * N] as [T, P, N]."""
        return values.reshape(len(values), -1, self.num_envs)


def check(env_id: Any, options: Options) -> Iterator[Finding]:
    """Yield the findings. Exceptions of the environment carry a note of their place, see `errors.blamed`.

    Raises:
        ValueError: If the environment cannot be made.
    """
    from jaxrl_fast.envs import spaces
    from jaxrl_fast.envs.host.env import original_errors
    from jaxrl_fast.networks import torsos

    settings = None if options.algo == "none" else _settings(env_id, options)  # refuses an unknown algorithm
    with original_errors():
        env = _make(env_id, options, 1, 0)
        spec = env.spec
        yield Finding(
            "ok", f"observation  {spaces.describe_obs(spec.obs)}   network {torsos.describe(spec.obs, 'auto', 'auto')}"
        )
        yield Finding(
            "ok",
            f"action       {spaces.describe_action(spec.action)}{', some forbidden by a mask' * spec.has_action_mask}",
        )
        trial = _rows(env_id, options, NUM_ENVS, 0, min(TRIAL_STEPS, options.steps))
        affordable = int(options.max_time * TRIAL_STEPS / max(trial.duration, 1e-9))
        num_steps = max(min(options.steps, affordable), min(TRIAL_STEPS, options.steps))
        rows = _rows(env_id, options, NUM_ENVS, 0, num_steps)
        yield from _of_episodes(rows)
        yield from _of_seeds(env_id, options, rows, num_steps, env.on_device)
        yield from _of_saving(env)
        yield from _of_time(settings, options, rows)


def _make(env_id: Any, options: Options, num_envs: int, seed: int) -> Any:
    from jaxrl_fast import envs
    from jaxrl_fast.envs.host.config import HostEnvConfig, Workers

    config = HostEnvConfig((seed, 0, 0), workers=Workers(0))  # in one process, so that environments can share a mistake
    return envs.make(env_id, num_envs, config, **options.env_options)


def _rows(env_id: Any, options: Options, num_envs: int, seed: int, num_steps: int) -> Rows:
    """Step new environments with random actions that depend on nothing but the index of step and environment."""
    import jax
    import jax.numpy as jnp

    from jaxrl_fast.utils.devices import release_envs
    from jaxrl_fast.utils.random import key_of_seed

    env = _make(env_id, options, num_envs, seed)
    keys = jax.random.split(key_of_seed(0), num_steps)

    @jax.jit
    def play(start: Any) -> Any:
        state, timestep = start

        def step(now: Any, key: Any) -> Any:
            state, timestep = now
            each = [jax.random.fold_in(key, i) for i in range(env.spec.num_envs)]
            noise = jnp.stack([jax.random.uniform(one, (env.spec.action.num_outputs,)) for one in each])
            now = env.step(state, _random_action(env.spec, noise, timestep.action_mask))
            return now, now[1]

        return jax.lax.scan(step, (state, timestep), keys)[1]

    try:
        if env.host:
            env.host.open()
        start = jax.jit(env.reset)(key_of_seed(seed))
        compiled = play.lower(start).compile()
        began = time.perf_counter()
        steps = jax.device_get(compiled(start))
        duration = time.perf_counter() - began
        return Rows(
            jax.device_get(start[1].obs), steps.obs, steps.reward, steps.discount, steps.last, duration, num_envs
        )
    finally:
        release_envs([env])


def _random_action(spec: Any, noise: Any, mask: Any) -> Any:
    """Return uniform random actions [N, ...] among those that are allowed, from noise [N, num_outputs] in [0, 1)."""
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_fast.types import Box, Discrete

    if isinstance(spec.action, Box):
        return (2 * noise - 1).reshape(len(noise), *spec.action.shape)
    scores = noise if mask is None else jnp.where(mask, noise, -1.0)  # the largest is chosen
    if isinstance(spec.action, Discrete):
        return jnp.argmax(scores, axis=1).astype(jnp.int32)
    parts = jnp.split(scores, np.cumsum(spec.action.nums)[:-1], axis=1)
    return jnp.stack([jnp.argmax(part, axis=1) for part in parts], axis=1).astype(jnp.int32)


def _of_episodes(rows: Rows) -> Iterator[Finding]:
    """Yield findings about rewards and the ends of episodes."""
    import numpy as np

    last, discount = rows.ends, rows.of_games(rows.discount).min(axis=1)  # 0 if any player's last state is terminal
    terminated, truncated = last & (discount == 0), last & (discount != 0)
    num_terminated, num_truncated = int(terminated.sum()), int(truncated.sum())
    ends = f"{num_terminated} terminated, {num_truncated} truncated"
    size = f"{last.size} steps of random actions"
    if num_terminated + num_truncated:
        yield Finding("ok", f"episodes     {num_terminated + num_truncated} in {size}: {ends}")
    else:
        yield Finding("fix", f"episodes     none ended in {size}; without ends there are no returns, "
                              "so add a time limit: env_options max_episode_steps=1000")  # fmt: skip
    lengths = np.concatenate([np.diff(np.flatnonzero(one)) - 1 for one in last.T])
    if num_terminated > 1 and not num_truncated and len(lengths) > 1 and len(set(lengths.tolist())) == 1:
        after = formatting.counted(int(lengths[0]), "step")
        yield Finding("fix", f"ends         every episode terminated after {after}; if that is a time "
                              "limit, report it as truncated, so that values bootstrap there")  # fmt: skip
    begins = np.vstack([np.zeros_like(rows.last[:1]), rows.last[:-1]])  # rows without a reward
    low, high = float(rows.reward[~begins].min()), float(rows.reward[~begins].max())
    large = max(abs(low), abs(high)) > LARGE_REWARD
    hint = "; rewards normalized may help" if large else ""
    yield Finding("note" if large else "ok", f"rewards      {low:g} to {high:g}{hint}")
    if low == high:
        yield Finding("note", "rewards      all rewards of random actions are equal, so there is nothing to learn from")


def _of_seeds(env_id: Any, options: Options, rows: Rows, num_steps: int, on_device: bool) -> Iterator[Finding]:
    """Yield findings about random numbers: whether a seed repeats an episode, and whether environments differ."""
    again = _rows(env_id, options, NUM_ENVS, 0, num_steps)
    if at := _first_difference(rows, again):
        yield Finding("fix", f"seeds        the same seed and actions gave a different {at}; draw all random numbers "
                              "from self.np_random, which reset(seed=...) seeds")  # fmt: skip
    else:
        yield Finding("ok", "seeds        the same seed and actions give the same steps")
    alone = None if at or on_device else _rows(env_id, options, 1, 0, num_steps)
    if alone is not None and (apart := _first_difference(rows, alone, 1)):
        yield Finding("fix", f"state        an environment gave a different {apart} alone than next to others; keep "
                              "its state in self, not in the class or the module")  # fmt: skip
    if _same_starts(rows.first_obs):
        yield Finding("note", "seeds        all environments start with the same observation")


def _first_difference(one: Rows, other: Rows, num_envs: int = NUM_ENVS) -> str:
    """Return where the first `num_envs` environments differ: "reward in step 3"; "" if they do not."""
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
        None, options.algo, None, env=env_id, env_options=options.env_options, num_envs=options.num_envs
    )


def _of_time(settings: Any, options: Options, rows: Rows) -> Iterator[Finding]:
    """Yield findings about the duration of a step, alone and as a part of a training."""
    each = rows.duration / rows.ends.size
    yield Finding(
        "ok", f"speed        {formatting.short_number(1 / each)} steps per second with {NUM_ENVS} environments"
    )
    if settings is None:
        return
    try:
        rate = _training_rate(settings)
    except EnvFault:
        raise
    except ValueError as error:  # the algorithm does not fit the environment
        yield Finding("note", f"training     not timed: {error}")
        return
    share = min(each * rate, 1.0)
    setting = f"{options.algo} with {formatting.counted(options.num_envs, 'environment')}"
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
