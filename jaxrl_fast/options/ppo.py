"""Define the options of PPO."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_fast.options import algorithm
from jaxrl_fast.options.bonus import bonus_of_policies
from jaxrl_fast.options.declare import FRACTION, NON_NEGATIVE, POSITIVE, Part, option
from jaxrl_fast.options.explore import Gaussian, policy
from jaxrl_fast.options.memory import NoMemory, Recurrent, memory
from jaxrl_fast.options.network import Network, network
from jaxrl_fast.options.optimizer import Adam, AdaptiveKL, optimizer, schedule
from jaxrl_fast.options.sees import Actor, Critic, actor, critic
from jaxrl_fast.options.value import value_of_states

Rewards = Literal["auto", "raw", "sign", "normalized"]


@dataclass(frozen=True)
class PPO(algorithm.OnPolicy):
    """Proximal policy optimization (Schulman et al. 2017), with the defaults of CleanRL's classic-control runs."""

    rollout_length: int = algorithm.rollout(128)
    num_minibatches: int = algorithm.num_minibatches(4)
    num_epochs: int = algorithm.num_epochs(4)
    learning_rate: float = algorithm.learning_rate(2.5e-4)
    schedule: Part = schedule("linear", kl=AdaptiveKL())
    gamma: float = algorithm.gamma(0.99)
    gae_lambda: float = option(0.95, "Lambda of the advantage estimate (GAE).", bounds=FRACTION, traced=True)
    clip_coef: float = option(0.2, "Clip range of the policy ratio (equation 7).", bounds=POSITIVE, traced=True)
    value_coef: float = option(0.5, "Weight of the value loss (c1 in equation 9).", bounds=NON_NEGATIVE, traced=True)
    entropy_coef: float = option(0.01, "Weight of the entropy (c2 in equation 9).", bounds=NON_NEGATIVE, traced=True)
    normalize_advantage: bool = option(True, "Standardize advantages in each minibatch.")
    target_kl: float | None = option(
        None,
        "Skip the remaining gradient steps of an update once its approximate KL exceeds 1.5 times this. none: never. "
        "With schedule kl, the first skipped step still changes the learning rate.",
        bounds=POSITIVE,
        traced=True,
    )
    normalize_observations: bool = algorithm.normalize_observations(False)
    rewards: Rewards = algorithm.rewards(
        help="Rewards to train on: raw, their sign, or divided by the running standard deviation of their discounted "
        "sum (normalized); reported returns are always of raw rewards. auto: sign for Atari with protocol dqn2015, "
        "else raw."
    )
    value: Part = value_of_states()
    bonus: Part = bonus_of_policies()
    policy: Gaussian = policy()
    network: Network = network()
    memory: NoMemory | Recurrent = memory(Recurrent())
    optimizer: Adam = optimizer(epsilon=1e-5, max_grad_norm=0.5)
    actor: Actor = actor()
    critic: Critic = critic()
