"""Load a trained policy from a run's folder: `jaxrl_fast.load("runs/mine").policy(obs)` is an action."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast.config.options import Options
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.evaluation.saved_run import Which, open_env, read_run, select_seed
from jaxrl_fast.rollout import initial_carry
from jaxrl_fast.types import Agent, Array, Decision, Env, EnvSpec, Key, PolicyInput, PyTree
from jaxrl_fast.utils.random import key_of_seed


class Trained(NamedTuple):
    """A trained policy of one seed.

    `policy(obs, key=None, explore=False)` is compiled. It takes one observation as in `env.spec.obs`, or a batch of
    them [B, ...], and returns the environment's actions: int32, or float32 within the action bounds. It acts greedily;
    `explore=True` acts as in training and requires a PRNG key.
    """

    policy: Callable[..., Array]
    env: Env
    agent: Agent
    agent_state: PyTree
    settings: Settings
    seed: int
    checkpoint: Path
    env_steps: int

    def __repr__(self) -> str:
        return f"Trained({self.settings.algo} on {self.env.spec.id}, seed {self.seed}, {str(self.checkpoint)!r})"


def load(
    folder: Path,
    seed: int | None = None,
    which: Which = "best",
    env: Any = None,
    member: Mapping[str, Any] | None = None,
) -> Trained:
    """Return the trained policy of the run in `folder`; see `api.load`."""
    saved = read_run(folder, which, *open_env(folder, env), member or {})
    saved = select_seed(saved, saved.seeds[0] if seed is None else seed)
    state = jax.device_put(saved.learners)
    agent, options = saved.agent, saved.settings.options
    num_envs = num_exploration_envs(options)
    if remembers(agent, agent.exploit, state, saved.env.spec.obs):
        problem = "its policy has a memory, so it is not a function of an observation alone"
        raise ValueError(f"{folder}: {problem}; use evaluate, video or .agent.exploit, which take the memory")
    policies = Policies(
        partial(jax.jit(partial(greedy, agent)), state), partial(jax.jit(partial(exploring, agent, num_envs)), state)
    )
    act = partial(decide, saved.env, policies)
    return Trained(act, saved.env, agent, state, saved.settings, saved.seeds[0], saved.checkpoint, saved.env_steps)


class Policies(NamedTuple):
    """The compiled greedy and exploring policies: from observations [B, ...] to the agent's actions [B, ...]."""

    exploit: Callable[[PyTree], Array]
    explore: Callable[[PyTree, Key], Array]


def decide(env: Env, policies: Policies, obs: PyTree, key: Key | None = None, explore: bool = False) -> Array:
    """Return the environment's action for one observation or for each of a batch; see `Trained`.

    Raises:
        ValueError: If `obs` does not match the environment, the batch is empty, or `explore` lacks a key.
    """
    if explore and key is None:
        raise ValueError("policy: explore=True requires a PRNG key; pass key=jax.random.key(0)")
    batch, is_one = as_batch(env.spec, obs)
    if not is_one and not len(jax.tree.leaves(batch)[0]):
        raise ValueError("policy: obs is an empty batch; pass at least one observation")
    action = env.to_env_action(policies.explore(batch, key) if explore and key is not None else policies.exploit(batch))
    return action[0] if is_one else action


def as_batch(spec: EnvSpec, obs: PyTree) -> tuple[PyTree, bool]:
    """Return observations [B, ...] in the environment's dtypes, and whether `obs` was a single one without axis B.

    Raises:
        ValueError: If structure, shapes or dtypes do not match `spec.obs`.
    """
    structure: Any = jax.tree.structure(spec.obs)
    try:
        leaves = [_array(x) for x in structure.flatten_up_to(_plain(obs))]
    except ValueError:  # another structure
        leaves = []
    extra = {x.ndim - like.ndim if _fits(x, like) else None for x, like in zip(leaves, jax.tree.leaves(spec.obs))}
    if extra not in ({0}, {1}):
        is_array = lambda x: isinstance(x, (list, tuple)) and not isinstance(spec.obs, tuple)
        shown = jax.tree.map(_array, _plain(obs), is_leaf=is_array)
        expected, found = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree) for tree in (spec.obs, shown))
        raise ValueError(
            f"obs: {spec.id} observes {expected}, got {found}; pass one observation or a batch with a leading axis"
        )
    cast = lambda x, like: jnp.asarray(x if extra == {1} else x[None], like.dtype)
    return jax.tree.map(cast, structure.unflatten(leaves), spec.obs), extra == {0}


def _array(x: Any) -> Any:
    """Return a numpy array; a traced array is returned as it is, so that policies can be used under jit and vmap."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _plain(obs: PyTree) -> PyTree:
    """Return the observation with every mapping converted to a dictionary."""
    return {name: _plain(part) for name, part in obs.items()} if isinstance(obs, Mapping) else obs


def _fits(x: np.ndarray, like: jax.ShapeDtypeStruct) -> bool:
    """Return whether `x` has the shape, except for a batch axis, and a safe dtype; boolean boards take any numbers."""
    same_shape = x.shape[max(x.ndim - like.ndim, 0) :] == like.shape
    return same_shape and (like.dtype == bool or np.can_cast(x.dtype, like.dtype, "same_kind"))


def remembers(agent: Agent, decide: Callable[..., Decision], state: PyTree, obs: PyTree) -> bool:
    """Return whether `agent.exploit` or `agent.explore` changes the recurrent state. `obs` is a ShapeDtypeStruct.

    The recurrent state may be that of the exploration noise alone. Then the greedy policy has no memory.
    """
    changed = []

    def act(carry: PyTree, obs: PyTree) -> None:
        noise = jax.tree.map(lambda x: x[0], agent.sample_noise(key_of_seed(0), 1, 1))
        after = decide(state, PolicyInput(obs), carry, noise).carry
        before, after = jax.tree.leaves(carry), jax.tree.leaves(after)
        changed.append(len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)))

    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), obs)
    jax.eval_shape(act, initial_carry(agent, 1), one)
    return any(changed)


def greedy(agent: Agent, state: PyTree, obs: PyTree) -> Array:
    """Return deterministic actions [B, ...] for observations [B, ...]."""
    num_obs = jax.tree.leaves(obs)[0].shape[0]
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(key_of_seed(0), 1, num_obs))
    return agent.exploit(state, PolicyInput(obs), initial_carry(agent, num_obs), noise).action


def num_exploration_envs(options: Options) -> int:
    """Return the number of environments that explore together, each with its own epsilon: those of one pool."""
    return int(options.num_envs) // max(options.async_pools, 1)


def exploring(agent: Agent, num_envs: int, state: PyTree, obs: PyTree, key: Key) -> Array:
    """Return exploring actions [B, ...] for observations [B, ...]: row i acts as environment i % `num_envs` does."""
    num_obs = jax.tree.leaves(obs)[0].shape[0]
    num_rounds = -(-num_obs // num_envs)

    def act(inputs):
        """Act in one round of `num_envs` observations."""
        obs, key = inputs
        noise = jax.tree.map(lambda x: x[0], agent.sample_noise(key, 1, num_envs))
        return agent.explore(state, PolicyInput(obs), initial_carry(agent, num_envs), noise).action

    fill = lambda x: jnp.resize(x, (num_rounds, num_envs, *x.shape[1:]))
    action = jax.lax.map(act, (jax.tree.map(fill, obs), jax.random.split(key, num_rounds)))
    return action.reshape(-1, *action.shape[2:])[:num_obs]
