"""Define the options of REPPO."""

from dataclasses import dataclass

from jaxrl_fast.options import algorithm
from jaxrl_fast.options.declare import COUNT, FRACTION, NON_NEGATIVE, POSITIVE, Part, option
from jaxrl_fast.options.network import Network, network
from jaxrl_fast.options.optimizer import Adam, optimizer, schedule
from jaxrl_fast.options.value import value_of_pairs


@dataclass(frozen=True)
class REPPO(algorithm.OnPolicy):
    """Relative entropy pathwise policy optimization (Voelcker et al. 2025), with the authors' small batches."""

    rollout_length: int = algorithm.rollout(32)
    num_minibatches: int = algorithm.num_minibatches(16)
    num_epochs: int = algorithm.num_epochs(8)
    learning_rate: float = algorithm.learning_rate(3e-4)
    schedule: Part = schedule("constant")
    gamma: float = algorithm.gamma(0.99)
    return_lambda: float = option(0.95, "Lambda of the returns that critics learn.", bounds=FRACTION, traced=True)
    kl_bound: float = option(
        0.1,
        "Bound of the KL divergence from the policy that acted. Beyond it, a row moves the policy back.",
        bounds=POSITIVE,
        traced=True,
    )
    kl_multiplier: float = option(0.01, "Initial multiplier of the KL divergence.", bounds=POSITIVE, traced=True)
    temperature: float = option(0.01, "Initial multiplier of the entropy.", bounds=POSITIVE, traced=True)
    target_entropy: float | None = option(
        None,
        "Target entropy of the policy in nats, for actions in [-1, 1]. none: minus half the number of dimensions.",
        traced=True,
    )
    auxiliary_coef: float = option(
        1.0,
        "Weight of the auxiliary loss: predictions of the reward and of the next embedding.",
        bounds=NON_NEGATIVE,
        traced=True,
    )
    critic_width: int = option(512, "Width of the layers of the critic and of its embedding.", bounds=COUNT)
    normalize_observations: bool = algorithm.normalize_observations(True)
    rewards: algorithm.Rewards = algorithm.rewards()
    value: Part = value_of_pairs()
    network: Network = network(hidden_sizes=(512, 512), activation="relu", kernel_init="lecun_normal", layer_norm=True)
    optimizer: Adam = optimizer(epsilon=1e-8, max_grad_norm=0.5)
