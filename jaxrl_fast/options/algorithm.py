"""Define options that several algorithms share, and what a run asks of an algorithm's options."""

from fractions import Fraction
from functools import partial
from typing import Any, Literal

from jaxrl_fast.options.declare import (
    COUNT,
    FRACTION,
    MAX_SCHEDULE,
    POSITIVE,
    Bounds,
    option,
)
from jaxrl_fast.options.memory import NoMemory, Recurrent
from jaxrl_fast.options.network import Network
from jaxrl_fast.options.replay import Uniform
from jaxrl_fast.options.target import NoTarget, PeriodicAverage

MIN_ROLLOUT = 32  # environment steps per update over all environments if rollout_length is auto

Rewards = Literal["auto", "raw", "sign"]

rollout = partial(option, help="Environment steps per update in each environment.", bounds=COUNT)
rollout_off_policy = partial(
    rollout,
    "auto",
    help="Environment steps per update in each environment; auto: 32 divided by num_envs, at least 1.",
)
batch_size = partial(option, help="Transitions per gradient step.", bounds=COUNT)
replay_ratio = partial(
    option, help="Gradient steps per environment step, exact for any number of environments.", bounds=POSITIVE
)  # not traced: counted as a fraction
learning_starts = partial(
    option, help="Environment steps before the first gradient step.", bounds=Bounds(0, MAX_SCHEDULE)
)
random_actions = partial(
    learning_starts, help="Environment steps before the first gradient step; until then actions are uniformly random."
)
num_minibatches = partial(option, help="Minibatches per epoch; each is one gradient step.", bounds=COUNT)
num_epochs = partial(option, help="Passes over the rollout per update.", bounds=COUNT)
learning_rate = partial(option, help="Learning rate; with a schedule, the initial one.", bounds=POSITIVE, traced=True)
critic_learning_rate = partial(
    option, help="Learning rate of the critics; with a schedule, the initial one.", bounds=POSITIVE, traced=True
)
gamma = partial(option, help="Discount factor per environment step.", bounds=FRACTION, traced=True)
policy_delay = partial(option, bounds=COUNT)
num_critics = partial(
    option,
    help="Number of critics; the target is the minimum of their values, unless value is quantile.",
    bounds=Bounds(1, 2**10),
)
critic_hidden_sizes = partial(
    option, (), help="Widths of the dense layers of each critic. Default: hidden_sizes.", bounds=Bounds(1, 2**16)
)
critic_layer_norm = partial(option, False, help="Apply layer normalization in the critics, as network.layer_norm.")
normalize_observations = partial(option, help="Standardize observations by their running mean and variance.")
rewards = partial(
    option,
    "auto",
    help="Rewards to train on: raw, or their sign; reported returns are always of raw rewards. auto: sign for Atari "
    "with protocol dqn2015, else raw.",
)


class Algorithm:
    """What a run asks of an algorithm's options. A custom algorithm's options may define any of it."""

    rollout_length: Any
    replay: Uniform | None = None
    network: Any = None
    memory: NoMemory | Recurrent | None = None
    rewards: str = "raw"
    actor: Any = None  # what the actor and the critic see: `sees`
    critic: Any = None
    learning_starts: int | None = None

    @property
    def has_memory(self) -> bool:
        """Return whether a recurrent layer follows the network."""
        return isinstance(self.memory, Recurrent)

    @property
    def replay_size(self) -> int | None:
        """Return the transitions in the replay buffer, or None without one."""
        return None if self.replay is None else self.replay.size

    @property
    def clips_rewards(self) -> bool:
        """Return whether the agent learns from the sign of rewards. `training.build` has replaced auto."""
        return self.rewards == "sign"

    def length(self, num_envs: int) -> int:
        """Return the environment steps per update in each environment."""
        return int(self.rollout_length)

    def sequence(self) -> int | None:
        """Return the steps that stay together in a gradient step, on one device; None if they may be split."""
        return None

    def gradient_rows(self, num_envs: int) -> int | None:
        """Return the rows in a gradient step, from which the number of devices is chosen; None if not known."""
        return None

    def first_learning(self, num_envs: int) -> int:
        """Return the environment steps before the first gradient step."""
        return 0

    def describe(self, num_envs: int) -> str:
        """Return a sentence for the header of a run, or ""."""
        return ""

    def warnings(self, num_envs: int) -> tuple[str, ...]:
        """Return warnings about combinations of options that are probably mistakes."""
        return ()


class OnPolicy(Algorithm):
    """An algorithm that learns from each rollout in minibatches."""

    num_epochs: int
    num_minibatches: int
    memory: NoMemory | Recurrent

    def sequence(self) -> int | None:
        """Return the length of the training sequences; None without a memory."""
        return self.memory.sequence_length or self.rollout_length if isinstance(self.memory, Recurrent) else None

    def gradient_rows(self, num_envs: int) -> int:
        """Return the rows in a gradient step, or 0 if minibatches of equal size are not possible."""
        num_rows, rest = divmod(self.rollout_length * num_envs, self.num_minibatches)
        return 0 if rest else num_rows


class OffPolicy(Algorithm):
    """An algorithm that learns from a replay buffer."""

    replay: Uniform
    replay_ratio: float
    batch_size: int
    learning_starts: int
    target: Any

    @property
    def ratio(self) -> Fraction:
        """Return the replay ratio as the fraction that its decimal text denotes: 0.1 is 1/10."""
        return as_fraction(self.replay_ratio)

    def length(self, num_envs: int) -> int:
        """Return the environment steps per update in each environment."""
        return max(1, MIN_ROLLOUT // num_envs) if self.rollout_length == "auto" else int(self.rollout_length)

    def first_learning(self, num_envs: int) -> int:
        """Return the environment steps before the first gradient step: enough for transitions in the replay buffer."""
        return max(self.learning_starts, (self.replay.n_step + 1) * num_envs)

    def gradient_rows(self, num_envs: int) -> int:
        """Return the rows in a gradient step."""
        return self.batch_size

    def describe(self, num_envs: int) -> str:
        """Return a sentence for the header of a run."""
        rows = "sequences" if self.has_memory else "transitions"
        steps = "1 gradient step" if self.replay_ratio == 1 else f"{self.replay_ratio:g} gradient steps"
        return (
            f"{steps} per environment step, {self.batch_size:,} {rows} each, "
            f"from step {self.first_learning(num_envs):,} on"
        )

    def warnings(self, num_envs: int) -> tuple[str, ...]:
        """Return a warning if targets are copied so often that they equal the online parameters."""
        if not isinstance(self.target, PeriodicAverage):
            return ()
        steps, interval = self.length(num_envs) * num_envs, self.target.interval
        if self.target.tau < 1 or interval >= steps or self.replay_ratio * steps < 2:
            return ()
        problem = f"the target is copied several times within an update of {steps} steps, got {interval}"
        return (f"target.interval: {problem}; use {steps} or more",)


class ActorCritic(OffPolicy):
    """The options of SAC, TD3 and DDPG."""

    noise: Any

    @property
    def crossq(self) -> bool:
        """Return whether batch renormalization replaces the target critics."""
        return isinstance(self.target, NoTarget)

    @property
    def normalizes_batches(self) -> bool:
        """Return whether layers use the statistics of a batch."""
        return self.crossq or self.network.kind == "flash"

    def sequence(self) -> int | None:
        """Return the rows that one device must process together: the whole batch if it is normalized, else None."""
        return self.batch_size if self.normalizes_batches else None


def as_fraction(number: float) -> Fraction:
    """Return the fraction that the number's decimal text denotes: 0.1 is 1/10."""
    return Fraction(str(number))


def network_of(config: Algorithm) -> Network | None:
    """Return the network's options, or None if a custom algorithm declares none."""
    return config.network if isinstance(config.network, Network) else None
