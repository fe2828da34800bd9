"""Define the shared vocabulary: environments, agents, and the records that they exchange.

N environments step together, and T steps make a rollout. Comments give the shape of each array in brackets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import Array as Array  # exported for other modules

from jaxrl_fast.types.host import AsyncPools, AtariProtocol, HostEnv, HostResource
from jaxrl_fast.types.host import PyTree as PyTree
from jaxrl_fast.types.spaces import Box as Box
from jaxrl_fast.types.spaces import Discrete as Discrete
from jaxrl_fast.types.spaces import MultiDiscrete as MultiDiscrete
from jaxrl_fast.types.spaces import Space as Space

Key = Array
Law = Literal["uniform", "normal", "gumbel"]  # a distribution of random numbers, as a function of jax.random
Metrics = Mapping[str, Array]  # scalars; "x_sum" is divided by "gradient_steps" to be reported as "x"
SHARED_MEMORY_AXIS = "cores"  # the name of an axis of devices that are cores of one CPU and share its memory
MAX_FLAT = 2**15  # parameters updated as one vector; more cost a CPU more in copies than they save in kernels


class EnvSpec(NamedTuple):
    """The properties of an environment that an agent may depend on."""

    id: str  # with its backend: "gymnax/CartPole-v1"
    obs: jax.ShapeDtypeStruct  # one environment's observation (or a tree of them)
    action: Space
    num_envs: int  # N; if environments are sharded, the number on one shard
    frame_stack: int = 0  # the last axis of obs holds this many successive frames; 0: no frames are stacked
    has_action_mask: bool = False  # time steps have an action mask
    players: tuple[str, ...] = ()  # P names: row p * (N / P) + i is the view of player p in game i; (): no players

    @property
    def num_games(self) -> int:
        """Return the number of environments: N, or N / P if an environment has P players."""
        return self.num_envs // max(len(self.players), 1)


class Parallelism(NamedTuple):
    """How environments and gradient steps are split over devices. Only an agent that supports it receives one."""

    axis_name: str | None = None  # the device axis over which environments are sharded
    num_shards: int = 1  # the length of that axis
    num_grad_workers: int = 1  # cores that repeat everything but gradient steps, and split the rows of these
    num_pools: int = 1  # asynchronous pools of N / num_pools environments each

    @property
    def grad_axis(self) -> str | None:
        """Return the name of the device axis over which gradients are summed, or None."""
        return SHARED_MEMORY_AXIS if self.num_grad_workers > 1 else self.axis_name


class EpisodeScore(NamedTuple):
    """The rewards and ends from which scores are computed, if they differ from the agent's rewards and ends."""

    reward: Array  # [N] f32, neither clipped nor shaped
    game_over: Array  # [N] bool: the game has ended with its last life, not only an episode at a lost life


class TimeStep(NamedTuple):
    """The result of a reset or a step of N environments.

    A step taken from a `last` time step ignores its action, has reward 0 and begins the next episode, or waits for
    other players (gymnasium's default and dm_env's contract). So the next observation is always the true successor.
    """

    obs: PyTree  # [N, ...]
    reward: Array  # [N] f32, as the environment returns it
    discount: Array  # [N] f32: 0 where the state is terminal, else 1 (also where the episode is truncated)
    last: Array  # [N] bool: the episode is over
    score: EpisodeScore | None = None  # None: the score is computed from reward and last
    action_mask: Array | None = None  # [N, num_outputs] bool: which actions are allowed; None: all are
    failed: Array | None = None  # [N] bool: the step gave nothing to learn from (quarantine); None: none can


class View(NamedTuple):
    """How environments are seen: by agents, whose actions and observations have one form, and by people."""

    to_env_action: Callable[[Array], Array] = lambda action: action  # [N, ...] to the environment's own bounds
    action_tree: PyTree = None  # of `envs.nested.Part`: the parts of such an action; None: it is one array
    raw_obs: PyTree = None  # one observation as the environment returns it, in at most 32 bits; None: as `spec.obs`
    encode_obs: Callable[[PyTree], PyTree] = lambda obs: obs  # raw observations [N, ...] to those of agents
    raw_mask: Callable[[PyTree], Array] | None = None  # raw observations [N, ...] to the action masks in them, if any
    whole_spec: EnvSpec | None = None  # of the observation that videos draw, if it differs from the agents'
    whole_obs: Callable[[PyTree, PyTree], PyTree] = lambda state, obs: obs  # (state, obs [N, ...]) to that observation
    info: tuple[str, ...] = ()  # lines for the user
    warnings: tuple[str, ...] = ()  # lines about options that are probably mistakes
    resize: Callable[[int, Any], Any] | None = None  # (N, `HostEnvConfig`) to an Env with N of these environments


class Env(NamedTuple):
    """N environments that step together, as two pure functions. The state contains the PRNG keys."""

    reset: Callable[[Key], tuple[PyTree, TimeStep]]
    step: Callable[[PyTree, Array], tuple[PyTree, TimeStep]]
    spec: EnvSpec
    host: HostEnv | None = None  # None: environments on the device, which can be vmapped
    view: View = View()
    parallelism: Parallelism = Parallelism()

    @property
    def on_device(self) -> bool:
        return self.host is None

    @property
    def protocol(self) -> AtariProtocol:
        return self.host.protocol if self.host else ""

    @property
    def pools(self) -> AsyncPools | None:
        """Return the asynchronous pools, or None."""
        return self.host.pools if self.host else None


class PolicyInput(NamedTuple):
    """The input of a policy: the parts of N time steps that it may depend on."""

    obs: PyTree  # [N, ...]
    action_mask: Array | None = None  # [N, num_outputs] bool; None: all actions are allowed


class Decision(NamedTuple):
    """The output of a policy for N environments."""

    action: Array  # [N, ...]
    carry: PyTree = ()  # [N, ...] recurrent state for its next step; (): none
    extras: PyTree = None  # [N, ...] data of this step that `update` requires


class Transition(NamedTuple):
    """One step of N environments, from the observation acted upon to its result."""

    obs: PyTree  # [T, N, ...], as `compress_obs` returns it
    action: Array  # [T, N, ...]
    reward: Array  # [T, N] f32
    discount: Array  # [T, N] f32
    last: Array  # [T, N] bool
    valid: Array  # [T, N] bool: False where the action was ignored, so that the row must not be learned from
    extras: PyTree  # [T, N, ...]
    action_mask: Array | None = None  # [T, N, num_outputs] bool of the observation acted upon


class Rollout(NamedTuple):
    """T steps of N environments, and the observations and recurrent states at their ends."""

    steps: Transition  # [T, N, ...]
    next_obs: PyTree  # [N, ...] after the last step: bootstrap from here
    carry: PyTree  # [N, ...] the policy's recurrent state before the first step
    first_obs: PyTree = None  # [N, ...] of the first step, uncompressed
    next_action_mask: Array | None = None  # [N, num_outputs] bool after the last step


class GradientSteps(NamedTuple):
    """An update in parts: `num` gradient steps on one rollout, so that other work can be done between two of them.

    U is an update in progress: the variables that gradient steps change, and the inputs of these and of `finalize`.
    """

    num: int
    prepare: Callable[[PyTree, Rollout, Key], PyTree]  # (S, rollout, key) to U
    step: Callable[[PyTree, int | Array, int | Array], PyTree]  # (U, i, j) to U: gradient steps i to j - 1
    finalize: Callable[[PyTree], tuple[PyTree, Metrics]]  # U to S


def split_keys(key: Key, num_steps: int, num_envs: int) -> Key:
    """Return a PRNG key for each of T steps: the default noise of an agent."""
    return jax.random.split(key, num_steps)


@dataclass(frozen=True)
class SampleNoise:
    """A function (key, T, N) to noise for T decisions, [T, ...], that names the distributions of its numbers."""

    draw: Callable[[Key, int, int], PyTree]
    laws: tuple[Law, ...]  # of its arrays of real numbers, in order; the last one is also that of all further arrays

    def __call__(self, key: Key, num_steps: int, num_envs: int) -> PyTree:
        return self.draw(key, num_steps, num_envs)


class Learning(NamedTuple):
    """What some agents need around `update`."""

    compress_obs: Callable[[PyTree], PyTree] = lambda obs: obs  # observations [N, ...] to the form stored for `update`
    on_env_restart: Callable[[PyTree], PyTree] = lambda state: state  # S to S when all environments restart mid-episode
    gradient_steps: GradientSteps | None = None  # `update` in parts, for an agent that supports --overlap
    resources: tuple[HostResource, ...] = ()  # the part of its state that lies on the host


class AgentPlayers(NamedTuple):
    """What an agent for environments with several players has."""

    of_player: "Callable[[int], Agent] | None" = None  # p to an agent that only acts, in environments of player p alone
    is_scored: Callable[[int], Any] | None = None  # N to a numpy bool [N]: whose games are scored; None: all rows


class Agent(NamedTuple):
    """A learning algorithm, as pure functions of a state S that it defines."""

    init: Callable[[Key], PyTree]
    explore: Callable[[PyTree, PolicyInput, PyTree, PyTree], Decision]  # (S, input, carry, noise), while training
    exploit: Callable[[PyTree, PolicyInput, PyTree, PyTree], Decision]  # the same, while evaluating
    update: Callable[[PyTree, Rollout, Key], tuple[PyTree, Metrics]]
    rollout_length: int  # T
    sample_noise: Callable[[Key, int, int], PyTree] = split_keys  # (key, T, N) to noise for T decisions, [T, ...]
    initial_carry: PyTree = ()  # [...] recurrent state of one environment at the start of an episode; (): none
    policy_state: Callable[[PyTree], PyTree] = lambda state: state  # S to S with None for parts that acting ignores
    parameters: Callable[[PyTree], PyTree] = lambda state: state  # S to the parts that are learned and must stay finite
    learning: Learning = Learning()
    players: AgentPlayers = AgentPlayers()
