"""Define the options of DQN and its extensions."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_fast.options import algorithm
from jaxrl_fast.options.bonus import bonus_of_values
from jaxrl_fast.options.declare import Part, option
from jaxrl_fast.options.explore import Epsilon, explore
from jaxrl_fast.options.memory import NoMemory, OfReplay, memory
from jaxrl_fast.options.network import Network, network
from jaxrl_fast.options.optimizer import Adam, optimizer, schedule
from jaxrl_fast.options.replay import Uniform, replay
from jaxrl_fast.options.target import PeriodicAverage, target
from jaxrl_fast.options.value import value_of_actions


@dataclass(frozen=True)
class DQN(algorithm.OffPolicy):
    """Deep Q-learning (Mnih et al. 2015), with optional extensions such as those of Rainbow (Hessel et al. 2018).

    The defaults follow CleanRL's classic-control runs, except for the gradient bound, a larger replay buffer and the
    network's widths.
    """

    rollout_length: int | Literal["auto"] = algorithm.rollout_off_policy(
        help="Environment steps per update in each environment; auto: 32 divided by num_envs, at least 1, and with "
        "memory at most the steps of a sequence after its burn_in."
    )
    batch_size: int = algorithm.batch_size(128)
    replay_ratio: float = algorithm.replay_ratio(0.1)
    learning_starts: int = algorithm.learning_starts(10_000)
    learning_rate: float = algorithm.learning_rate(2.5e-4)
    schedule: Part = schedule("constant")
    gamma: float = algorithm.gamma(0.99)
    double: bool = option(
        False, "Choose the next action by the online network, not by the target network (van Hasselt et al. 2016)."
    )
    dueling: bool = option(False, "Use separate streams for state value and advantages (Wang et al. 2016).")
    noisy: bool = option(False, "Explore by noise in the dense layers, in addition to epsilon (Fortunato et al. 2018).")
    rewards: algorithm.Rewards = algorithm.rewards()
    replay: Uniform = replay(100_000)
    target: PeriodicAverage = target(PeriodicAverage(tau=1.0, interval=500))
    value: Part = value_of_actions()
    bonus: Part = bonus_of_values()
    explore: Epsilon = explore()
    network: Network = network(activation="relu", kernel_init="lecun_normal")
    memory: NoMemory | OfReplay = memory(OfReplay())
    optimizer: Adam = optimizer(epsilon=1e-8, max_grad_norm=10.0)

    def length(self, num_envs: int) -> int:
        """Return the environment steps per update in each environment."""
        longest = super().length(num_envs)
        if isinstance(self.memory, OfReplay) and self.rollout_length == "auto":
            return max(1, min(longest, self.memory.sequence_length - self.memory.burn_in))
        return longest

    def sequence(self) -> int | None:
        """Return the length of the training sequences; None without a memory."""
        return self.memory.sequence_length if isinstance(self.memory, OfReplay) else None

    def first_learning(self, num_envs: int) -> int:
        """Return the environment steps before the first gradient step: enough for a transition or a sequence."""
        return max(self.learning_starts, (self.replay.n_step + (self.sequence() or 1)) * num_envs)

    def gradient_rows(self, num_envs: int) -> int:
        """Return the rows in a gradient step, burn-in included."""
        return self.batch_size * (self.sequence() or 1)

    def sequence_period(self, rollout_length: int) -> int:
        """Return the rows between the starts of two sequences: whole rollouts, one without a memory.

        These are about half a sequence, and at most the steps that it has after its burn-in, if one rollout fits there:
        then every row is learned from.
        """
        if not isinstance(self.memory, OfReplay):
            return rollout_length
        length = self.memory.sequence_length
        half, num_learned = length // 2, length - self.memory.burn_in
        return max(1, min(-(-half // rollout_length), num_learned // rollout_length)) * rollout_length
