"""The vocabulary: what environments say, what agents are, and what passes between them.

N environments step together, T steps make a rollout. Leading axes are written in brackets.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jax import Array, ShapeDtypeStruct

PyTree = Any
Key = Array
Metrics = Mapping[str, Array]  # scalars; "x_sum" is divided by "gradient_steps" to be reported as "x"
SHARED_MEMORY_AXIS = "cores"  # the name of an axis of devices that are cores of one CPU and share its memory
MAX_FLAT = 2**15  # parameters updated as one vector; more cost a CPU more in copies than they save in kernels
AtariProtocol = Literal["", "dqn2015", "machado2018"]  # of Atari: the rules by which games are played and scored


class Discrete(NamedTuple):
    """Actions are int32 in [0, num)."""

    num: int


class Box(NamedTuple):
    """Actions are float32 in [-1, 1]; the environment's adapter scales them to its true bounds."""

    shape: tuple[int, ...]


class EnvSpec(NamedTuple):
    """All that an agent may know of its environment."""

    id: str  # with its backend: "gymnax/CartPole-v1"
    obs: ShapeDtypeStruct  # one environment's observation (or a tree of them)
    action: Discrete | Box
    num_envs: int  # N, on this shard where `axis_name` is set
    frame_stack: int = 0  # the last axis of obs holds this many successive frames; 0: no frames are stacked
    axis_name: str | None = None  # the device axis that the environments are split over
    num_shards: int = 1  # the length of that axis
    num_grad_workers: int = 1  # cores that do all alike but gradient steps, of whose rows each takes its part
    num_pools: int = 1  # that environments act in by turns, as many in each

    @property
    def grad_axis(self) -> str | None:
        """The device axis over which gradients are summed."""
        return SHARED_MEMORY_AXIS if self.num_grad_workers > 1 else self.axis_name

    @property
    def total_num_envs(self) -> int:
        """On all shards."""
        return self.num_envs * self.num_shards


class EpisodeScore(NamedTuple):
    """What the score keeper sees, where that differs from what the learner sees."""

    reward: Array  # [N] f32, neither clipped nor shaped
    game_over: Array  # [N] bool: the whole game has ended, not only a life


class HostEnvConfig(NamedTuple):
    """How environments on the host are run. Those on the device need none of this: all of their chance is in keys."""

    seed: tuple[int, ...] = (0,)  # of everything random in them: the run's, then what else tells pools apart
    protocol: AtariProtocol = ""
    path: str = "auto"  # from the program to the pool: "ffi", "callback", or whichever works best
    async_pools: int = 0  # pools that work while the policy thinks for the others and the agent learns; 0: none does
    overlap: bool = False  # these play a whole rollout while the agent learns from the one before
    shard: int = 0  # of num_shards with as many environments each, seeded as all together
    num_shards: int = 1


class TimeStep(NamedTuple):
    """What N environments answer.

    A step taken from a `last` time step ignores its action, has reward 0 and begins the next episode
    (gymnasium's default and dm_env's contract). So the next observation is always the true successor.
    """

    obs: PyTree  # [N, ...]
    reward: Array  # [N] f32, as the environment gives it
    discount: Array  # [N] f32: 0 where no value lies beyond, else 1 (also when time ran out)
    last: Array  # [N] bool: the episode is over
    score: EpisodeScore | tuple[()] = ()  # (): reward and last tell the score


class Pools(NamedTuple):
    """N environments dealt to pools, N / num in each, and a step of a pool in two halves.

    One state is handed from call to call, pool by pool, so that they keep their order. While actions are under way the
    environment's own `reset` and `step` have no place.
    """

    num: int
    send: Callable[[int, PyTree, Array], PyTree]  # (pool, state, action [N / num, ...])
    receive: Callable[[int, PyTree], tuple[PyTree, TimeStep]]  # (pool, state); what came of the action, [N / num]
    overlap: bool = False  # a rollout is played while the agent learns from the one before


class Env(NamedTuple):
    """N environments stepping together, as two pure functions. Randomness lives in the state."""

    reset: Callable[[Key], tuple[PyTree, TimeStep]]
    step: Callable[[PyTree, Array], tuple[PyTree, TimeStep]]
    spec: EnvSpec
    on_device: bool = True  # False: pools on the host behind it, which no vmap can multiply
    info: tuple[str, ...] = ()  # what its user should know, a sentence each
    warnings: tuple[str, ...] = ()  # what its user will hardly have meant, a sentence each
    protocol: AtariProtocol = ""
    reseed: Callable[[int], None] = lambda number: None  # on the host, where it can be: other games for each number
    open: Callable[[], None] = lambda: None  # makes what is on the host behind it, or it is made when first needed
    close: Callable[[], None] = lambda: None  # gives that up: no program that was compiled with it may run any more
    render: Callable[[], Any] | None = None  # [H, W, 3] uint8 of the first environment as it stands, on the host
    to_env_action: Callable[[Array], Array] = lambda action: action  # [N, ...] actions as its true bounds have them
    pools: Pools | None = None  # N dealt to pools that take actions now and answer later


class Decision(NamedTuple):
    """What a policy answers to N observations."""

    action: Array  # [N, ...]
    memory: PyTree = ()  # [N, ...] what it carries to its next step
    extras: PyTree = ()  # [N, ...] what `update` wants to know about this moment


class Transition(NamedTuple):
    """One step of N environments, from the observation acted upon to what followed."""

    obs: PyTree  # [T, N, ...] or what the agent keeps of it
    action: Array  # [T, N, ...]
    reward: Array  # [T, N] f32
    discount: Array  # [T, N] f32
    last: Array  # [T, N] bool
    valid: Array  # [T, N] bool: False where the action was ignored, so that nothing was experienced
    extras: PyTree  # [T, N, ...]


class Rollout(NamedTuple):
    """T steps of N environments, and what is needed to look beyond them."""

    steps: Transition  # [T, N, ...]
    next_obs: PyTree  # [N, ...] what follows the last step: bootstrap from here
    memory: PyTree  # [N, ...] the policy's memory before the first step
    first_obs: PyTree = ()  # [N, ...] of the first step, also where an agent keeps less of each


class GradientSteps(NamedTuple):
    """An update that is `num` gradient steps on one rollout, in parts: other things may be done between two steps.

    L is an update under way: what gradient steps change, and all that they and the end need.
    """

    num: int
    begin: Callable[[PyTree, Rollout, Key], PyTree]  # (S, rollout, key) to L
    take: Callable[[PyTree, int | Array, int | Array], PyTree]  # (L, i, j) to L: those from number i up to, not with, j
    end: Callable[[PyTree], tuple[PyTree, Metrics]]  # L to S


class Agent(NamedTuple):
    """A learning algorithm, as pure functions of its own state S."""

    init: Callable[[Key], PyTree]
    explore: Callable[[PyTree, PyTree, PyTree, PyTree], Decision]  # (S, obs, memory, noise), while training
    exploit: Callable[[PyTree, PyTree, PyTree, PyTree], Decision]  # the same, while evaluated
    update: Callable[[PyTree, Rollout, Key], tuple[PyTree, Metrics]]
    noise: Callable[[Key, int, int], PyTree]  # (key, T, N): what T decisions want of chance, [T, ...] at once, or ()
    rollout_length: int  # T
    memory: PyTree = ()  # [...] of one environment at the start of an episode
    keep: Callable[[PyTree], PyTree] = lambda obs: obs  # what `update` wants of observations [N, ...]
    policy_state: Callable[[PyTree], PyTree] = lambda state: state  # S with () for parts that only learning needs
    on_env_restart: Callable[[PyTree], PyTree] = lambda state: state  # S when all environments restart in mid-episode
    gradient_steps: GradientSteps | None = None  # `update` in parts, where it can be had so
