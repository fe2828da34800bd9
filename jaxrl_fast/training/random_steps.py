"""Step environments with random actions, for a check."""

import math
import time
from typing import Any, NamedTuple

NUM_CHUNKS = 4  # of the steps; no further one begins when the time is over
PASSES = 2.25  # a check makes the steps of all four environments twice, and those of one alone


class Rows(NamedTuple):
    """T steps of N environments, as numpy arrays; with P players, P * N rows, in the order of players."""

    first_obs: Any  # [N, ...]
    obs: Any  # [T, N, ...]
    reward: Any  # [T, N]
    discount: Any
    last: Any
    duration: float  # seconds, compilation excluded
    num_envs: int  # N
    in_time: bool = True  # all steps were made that were asked for

    @property
    def ends(self) -> Any:
        """Return where each environment's episode ends, for all its players: bool [T, N]."""
        return self.of_games(self.last).all(axis=1)

    def of_games(self, values: Any) -> Any:
        """Return values of rows [T, P * N] as [T, P, N]."""
        return values.reshape(len(values), -1, self.num_envs)


def make(env_id: Any, options: Any, num_envs: int) -> Any:
    """Return environments in this process, where those that share a mistake show it."""
    from jaxrl_fast import envs
    from jaxrl_fast.envs.host.config import HostEnvConfig, Workers
    from jaxrl_fast.options import wrap

    config = HostEnvConfig((0, 0, 0), workers=Workers(0), wrappers=wrap.read(options.wrap))
    return envs.make(env_id, num_envs, config, **options.env_options)


def play_in_time(env_id: Any, options: Any, trial: Rows, max_time: float) -> Rows:
    """Return as many steps as all passes can make in `max_time` seconds, or those of the trial."""
    num_tried = len(trial.reward)
    affordable = int(max_time * num_tried / (PASSES * max(trial.duration, 1e-9)))
    num_steps = min(options.steps, affordable)
    if num_steps < 2 * num_tried:
        return trial._replace(in_time=num_tried >= options.steps)
    rows = play(env_id, options, trial.num_envs, num_steps, max_time / PASSES)
    return rows._replace(in_time=len(rows.reward) >= options.steps)


def play(env_id: Any, options: Any, num_envs: int, num_steps: int, max_time: float = math.inf) -> Rows:
    """Step new environments with random actions that depend on nothing but the index of step and environment.

    There are fewer steps if they take more than `max_time` seconds.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_fast.utils.devices import release_envs
    from jaxrl_fast.utils.random import key_of_seed

    env = make(env_id, options, num_envs)
    length = -(-num_steps // NUM_CHUNKS)

    @jax.jit
    def advance(start: Any, first: Any) -> Any:
        keys = jax.vmap(lambda t: jax.random.fold_in(key_of_seed(0), t))(first + jnp.arange(length))

        def step(now: Any, key: Any) -> Any:
            state, timestep = now
            each = [jax.random.fold_in(key, i) for i in range(env.spec.num_envs)]
            noise = jnp.stack([jax.random.uniform(one, (env.spec.action.num_outputs,)) for one in each])
            now = env.step(state, _random_action(env.spec, noise, timestep.action_mask))
            return now, now[1]

        return jax.lax.scan(step, start, keys)

    try:
        if env.host:
            env.host.open()
        now = jax.jit(env.reset)(key_of_seed(0))
        first_obs = jax.device_get(now[1].obs)
        chunks: list[Any] = []
        compiled = advance.lower(now, np.int32(0)).compile()
        began = time.perf_counter()
        for first in range(0, num_steps, length):
            if chunks and time.perf_counter() - began > max_time:
                break
            now, steps = compiled(now, np.int32(first))
            chunks.append(jax.device_get(steps))
        duration = time.perf_counter() - began
        steps = jax.tree.map(lambda *x: np.concatenate(x)[:num_steps], *chunks)
        share = len(steps.reward) / (length * len(chunks))
        return Rows(first_obs, steps.obs, steps.reward, steps.discount, steps.last, duration * share, num_envs)
    finally:
        release_envs([env])


def _random_action(spec: Any, noise: Any, mask: Any) -> Any:
    """Return uniform random actions [N, ...] among those that are allowed, from noise [N, num_outputs] in [0, 1)."""
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_fast.types import Box, Discrete, MultiDiscrete
    from jaxrl_fast.types.spaces import Hybrid

    if isinstance(spec.action, Box):
        return (2 * noise - 1).reshape(len(noise), *spec.action.shape)
    if isinstance(spec.action, Hybrid):
        num, size = sum(spec.action.nums), spec.action.size
        choices = _random_action(spec._replace(action=MultiDiscrete(spec.action.nums)), noise[:, :num], mask)
        numbers = _random_action(spec._replace(action=Box((size,))), noise[:, num:], None)
        return jnp.concatenate([choices.astype(jnp.float32), numbers], axis=1)
    scores = noise if mask is None else jnp.where(mask, noise, -1.0)  # the largest is chosen
    if isinstance(spec.action, Discrete):
        return jnp.argmax(scores, axis=1).astype(jnp.int32)
    parts = jnp.split(scores, np.cumsum(spec.action.nums)[:-1], axis=1)
    return jnp.stack([jnp.argmax(part, axis=1) for part in parts], axis=1).astype(jnp.int32)
