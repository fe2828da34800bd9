"""Define the options of PQN."""

from dataclasses import dataclass

from jaxrl_fast.options import algorithm
from jaxrl_fast.options.declare import FRACTION, Part, option
from jaxrl_fast.options.explore import Epsilon, explore
from jaxrl_fast.options.memory import NoMemory, WithBurnIn, memory
from jaxrl_fast.options.network import Network, network
from jaxrl_fast.options.optimizer import Adam, optimizer, schedule


@dataclass(frozen=True)
class PQN(algorithm.OnPolicy):
    """Parallelized Q-network (Gallici et al. 2025).

    The defaults follow CleanRL's classic-control runs, except for the network's widths and the gradient bound. The
    gradient bound differs because CleanRL's loss is twice as large.
    """

    rollout_length: int = algorithm.rollout(128)
    num_minibatches: int = algorithm.num_minibatches(4)
    num_epochs: int = algorithm.num_epochs(4)
    learning_rate: float = algorithm.learning_rate(2.5e-4)
    schedule: Part = schedule("linear")
    gamma: float = algorithm.gamma(0.99)
    q_lambda: float = option(0.65, "Lambda of Peng's Q(lambda) returns.", bounds=FRACTION, traced=True)
    rewards: algorithm.Rewards = algorithm.rewards()
    explore: Epsilon = explore()
    network: Network = network(activation="relu", layer_norm=True)
    memory: NoMemory | WithBurnIn = memory(WithBurnIn())
    optimizer: Adam = optimizer("radam", epsilon=1e-8, max_grad_norm=10.0)
