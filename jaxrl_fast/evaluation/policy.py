"""Load a trained policy from a run's folder: `jaxrl_fast.load("runs/mine").policy(obs)` is an action."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast import players
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.envs.spaces import split_action
from jaxrl_fast.evaluation.inputs import as_batch, num_rows, seen
from jaxrl_fast.evaluation.saved_run import Which, open_env, read_run, select_seed
from jaxrl_fast.options.run import Options
from jaxrl_fast.rollout import initial_carry
from jaxrl_fast.types import Agent, Array, Decision, Env, Key, PolicyInput, PyTree
from jaxrl_fast.utils.files import current_folder
from jaxrl_fast.utils.importing import describe
from jaxrl_fast.utils.random import key_of_seed


class Trained(NamedTuple):
    """A trained policy of one seed: a `Policy`, or a `RecurrentPolicy` if the agent has a memory.

    If only the exploration noise depends on earlier steps (ou, gsde), it is a `CorrelatedPolicy`.
    With several players, `policies["left"]` is the policy of the player "left".
    """

    policy: "Policy | RecurrentPolicy | Callable[..., Any]"
    env: Env
    agent: Agent
    agent_state: PyTree
    settings: Settings
    seed: int
    checkpoint: Path
    env_steps: int
    policies: Mapping[str, "Policy | RecurrentPolicy"] = MappingProxyType({})  # the policy of each player by name

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
    if seed is not None and not hasattr(seed, "__index__"):
        raise ValueError(f"seed: must be a whole number, got {describe(seed)}")
    start = current_folder()
    saved = read_run(folder, which, *open_env(folder, env), member or {}, start)
    saved = select_seed(saved, saved.seeds[0] if seed is None else seed)
    state = jax.device_put(saved.learners)
    options, names = saved.settings.options, saved.env.spec.players
    num_envs = num_exploration_envs(options)
    if names and players.num_learner_envs(saved.env.spec, options.players) == saved.env.spec.num_envs:
        num_envs *= len(names)
    of_agent = partial(policy_of, saved.env, num_envs, state)
    policies = {name: of_agent(player_agent(saved.agent, i)) for i, name in enumerate(names)}
    act = partial(_refuse, names) if names else of_agent(saved.agent)
    rest = saved.settings, saved.seeds[0], saved.checkpoint, saved.env_steps
    return Trained(act, saved.env, saved.agent, state, *rest, policies=policies)


def player_agent(agent: Agent, player: int) -> Agent:
    """Return the agent that acts for one player of a run whose environment has players."""
    assert agent.players.of_player, "`players` makes such agents"
    return agent.players.of_player(player)


def policy_of(env: Env, num_envs: int, state: PyTree, agent: Agent) -> "Policy | RecurrentPolicy":
    """Return the policy of an agent's state; `num_envs` environments explore together."""
    exploit = jax.jit(lambda state, given, carry: greedy(agent, state, seen(env, given), carry))
    explore = jax.jit(lambda state, given, *rest: exploring(agent, num_envs, state, seen(env, given), *rest))
    decide = Decide(env, partial(exploit, state), partial(explore, state))
    has_memory, has_noise = (any(remembers(agent, act, state, env.spec.obs)) for act in (agent.exploit, agent.explore))
    kind = RecurrentPolicy if has_memory else CorrelatedPolicy if has_noise else Policy
    return kind(decide, partial(initial_carry, agent))


def _refuse(names: tuple[str, ...], *given: Any, **options: Any) -> Array:
    """Raise ValueError for a policy of all players, since each player has one."""
    raise ValueError(f"policy: each of the players {' and '.join(names)} has one; use .policies[{names[0]!r}]")


@dataclass(frozen=True)
class Policy:
    """A compiled function from observations to actions.

    `policy(obs, key=None, explore=False, mask=None)` takes one observation as the environment returns it, or a batch of
    them [B, ...], and returns the environment's actions: int32, or float32 within the action bounds, and a tree of such
    arrays for a Dict or Tuple space. It acts greedily;
    `explore=True` acts as in training and requires a PRNG key. `mask` says which actions are allowed, as the
    environment's `info["action_mask"]` does: one bit for each action, or an array for each choice. It is required if
    the environment has masks, unless they are a part of its observations.
    """

    _decide: "Decide"
    _initial: Callable[[int], PyTree]

    def __call__(self, obs: PyTree, key: Key | None = None, explore: bool = False, mask: Any = None) -> Array:
        """Return the action for one observation or for each of a batch.

        Raises:
            ValueError: If `obs` or `mask` do not match the environment, the batch is empty, or `explore` lacks a key.
        """
        batch, is_one = as_batch(self._decide.env, obs, mask)
        action, _ = self._decide(batch, self._initial(num_rows(batch)), key, explore)
        return jax.tree.map(lambda x: x[0], action) if is_one else action


@dataclass(frozen=True)
class RecurrentPolicy:
    """A compiled function from observations and a memory to actions and the next memory.

    `action, memory = policy(obs, memory, key=None, explore=False, mask=None)`, otherwise as `Policy`. The memory at the
    start of an episode is `initial_memory()`, or `initial_memory(B)` for a batch of B observations.
    """

    _decide: "Decide"
    _initial: Callable[[int], PyTree]

    def initial_memory(self, batch_size: int | None = None) -> PyTree:
        """Return the memory at the start of an episode, [...], or of `batch_size` episodes, [B, ...]."""
        memory = self._initial(1 if batch_size is None else batch_size)
        return jax.tree.map(lambda x: x[0], memory) if batch_size is None else memory

    def __call__(
        self, obs: PyTree, memory: PyTree, key: Key | None = None, explore: bool = False, mask: Any = None
    ) -> tuple[Array, PyTree]:
        """Return the action and the next memory for one observation, or for each of a batch.

        Raises:
            ValueError: If `obs`, `memory` or `mask` do not match the policy, the batch is empty, or `explore` lacks a
                key.
        """
        batch, is_one = as_batch(self._decide.env, obs, mask)
        expected = self.initial_memory(None if is_one else num_rows(batch))
        shapes = lambda tree: jax.tree.map(jnp.shape, tree)
        if shapes(memory) != shapes(expected):
            problem = f"must have the shapes {shapes(expected)}, got {shapes(memory)}"
            raise ValueError(f"policy: memory {problem}; pass policy.initial_memory() or what the last call returned")
        memory = jax.tree.map(lambda x: x[None], memory) if is_one else memory
        result = self._decide(batch, memory, key, explore)
        return jax.tree.map(lambda x: x[0], result) if is_one else result


@dataclass(frozen=True)
class CorrelatedPolicy(RecurrentPolicy):
    """A policy without memory whose exploration noise lasts for several steps, such as ou and gsde.

    `policy(obs)` is the greedy action, as for `Policy`. As in training, exploration remembers its noise:
    `action, memory = policy(obs, memory, key, explore=True)`, from `initial_memory()` at the start of an episode.
    """

    def __call__(  # type: ignore[override]
        self, obs: PyTree, memory: PyTree = None, key: Key | None = None, explore: bool = False, mask: Any = None
    ) -> Array | tuple[Array, PyTree]:
        """Return the action for one observation or for each of a batch, and the next memory if one is given.

        Raises:
            ValueError: As for `RecurrentPolicy`, and if `explore` lacks the memory.
        """
        if memory is None and not explore:
            return Policy(self._decide, self._initial)(obs, mask=mask)
        if memory is None or isinstance(memory, jax.Array) and jnp.issubdtype(memory.dtype, jax.dtypes.prng_key):
            raise ValueError(
                "policy: explore=True requires the memory of the exploration noise, which lasts for several steps, got "
                "none; pass memory=policy.initial_memory() in the first step, then what the last call returned"
            )
        return super().__call__(obs, memory, key, explore, mask)


class Decide(NamedTuple):
    """The compiled greedy and exploring policies, from raw inputs and carries [B, ...] to actions and carries."""

    env: Env
    exploit: Callable[[PolicyInput, PyTree], tuple[Array, PyTree]]
    explore: Callable[[PolicyInput, PyTree, Key], tuple[Array, PyTree]]

    def __call__(self, batch: PolicyInput, carry: PyTree, key: Key | None, explore: bool) -> tuple[Array, PyTree]:
        """Return the environment's actions [B, ...] and the carries after them."""
        if explore and key is None:
            raise ValueError("policy: explore=True requires a PRNG key; pass key=jax.random.key(0)")
        if not num_rows(batch):
            raise ValueError("policy: obs is an empty batch; pass at least one observation")
        action, carry = self.explore(batch, carry, key) if explore and key is not None else self.exploit(batch, carry)
        return split_action(self.env.view.action_tree, self.env.view.to_env_action(action)), carry


def remembers(agent: Agent, decide: Callable[..., Decision], state: PyTree, obs: PyTree) -> list[bool]:
    """Return which leaves of the recurrent state `agent.exploit` or `agent.explore` changes.

    `obs` is a ShapeDtypeStruct. The recurrent state may be that of the exploration noise or of the critic alone. Then
    the greedy policy has no memory.
    """
    changed: list[bool] = []

    def act(carry: PyTree, obs: PyTree) -> None:
        noise = jax.tree.map(lambda x: x[0], agent.sample_noise(key_of_seed(0), 1, 1))
        after = decide(state, PolicyInput(obs), carry, noise).carry
        before, after = jax.tree.leaves(carry), jax.tree.leaves(after)
        changed.extend(a is not b for a, b in zip(before, after or before, strict=True))

    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), obs)
    jax.eval_shape(act, initial_carry(agent, 1), one)
    return changed


def greedy(agent: Agent, state: PyTree, inputs: PolicyInput, carry: PyTree) -> tuple[Array, PyTree]:
    """Return deterministic actions and the next carries [B, ...] for inputs and carries [B, ...]."""
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(key_of_seed(0), 1, num_rows(inputs)))
    return agent.exploit(state, inputs, carry, noise)[:2]


def num_exploration_envs(options: Options) -> int:
    """Return the number of environments in a pool, which explore together, each with its own epsilon."""
    return int(options.num_envs) // max(options.host.async_pools, 1)


def exploring(
    agent: Agent, num_envs: int, state: PyTree, inputs: PolicyInput, carry: PyTree, key: Key
) -> tuple[Array, PyTree]:
    """Return exploring actions and the next carries: row i [B, ...] acts like environment i % `num_envs`."""
    num_obs = num_rows(inputs)
    num_rounds = -(-num_obs // num_envs)

    def act(given):
        """Act in one round of `num_envs` observations."""
        inputs, carry, key = given
        noise = jax.tree.map(lambda x: x[0], agent.sample_noise(key, 1, num_envs))
        return agent.explore(state, inputs, carry, noise)[:2]

    fill = lambda x: jnp.resize(x, (num_rounds, num_envs, *x.shape[1:]))
    rounds = jax.lax.map(act, (*jax.tree.map(fill, (inputs, carry)), jax.random.split(key, num_rounds)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_obs], rounds)
