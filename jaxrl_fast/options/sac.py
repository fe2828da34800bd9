"""Define the options of SAC."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_fast.options import algorithm
from jaxrl_fast.options.bonus import bonus_of_sac
from jaxrl_fast.options.declare import COUNT, FRACTION, POSITIVE, Part, option
from jaxrl_fast.options.explore import White, noise_of_policy
from jaxrl_fast.options.network import Network, network
from jaxrl_fast.options.optimizer import Adam, optimizer, schedule
from jaxrl_fast.options.replay import Uniform, replay
from jaxrl_fast.options.sees import Actor, Critic, actor, critic
from jaxrl_fast.options.target import PeriodicAverage, target_of_critics
from jaxrl_fast.options.value import value_of_critics

Rewards = Literal["auto", "raw", "sign", "scaled"]


@dataclass(frozen=True)
class SAC(algorithm.ActorCritic):
    """Soft actor-critic (Haarnoja et al. 2018) with a learned temperature and optional REDQ ensembles.

    The defaults follow the authors' second paper, table 1, with 5,000 steps of random actions as in CleanRL.
    """

    rollout_length: int | Literal["auto"] = algorithm.rollout_off_policy()
    batch_size: int = algorithm.batch_size(256)
    replay_ratio: float = algorithm.replay_ratio(1.0)
    learning_starts: int = algorithm.random_actions(5_000)
    learning_rate: float = algorithm.learning_rate(3e-4)
    critic_learning_rate: float = algorithm.critic_learning_rate(3e-4)
    schedule: Part = schedule("constant")
    gamma: float = algorithm.gamma(0.99)
    num_critics: int = algorithm.num_critics(2)
    policy_delay: int = algorithm.policy_delay(
        1, help="Gradient steps of the critics per gradient step of the policy and the temperature."
    )
    num_target_critics: int | None = option(
        None,
        "Number of critics, sampled in each gradient step, whose minimum is the target; the policy then maximizes the "
        "mean of all critics (REDQ, Chen et al. 2021). none: both use the minimum of all critics.",
        bounds=COUNT,
    )
    learn_temperature: bool = option(True, "Learn the temperature, so that the entropy approaches target_entropy.")
    temperature: float = option(
        1.0, "Weight of the entropy; with learn_temperature, the initial one.", bounds=POSITIVE, traced=True
    )
    target_entropy: float | None = option(
        None,
        "Target entropy of the policy in nats, for actions in [-1, 1]. none: minus the number of action dimensions.",
        traced=True,
    )
    target_entropy_share: float | None = option(
        None,
        "Target entropy for discrete actions, as a share of the logarithm of the number of allowed ones. none: 0.89.",
        bounds=FRACTION,
        traced=True,
    )
    target_sigma: float | None = option(
        None,
        "Standard deviation of the Gaussian whose entropy is the target, 0.5 ln(2 pi e sigma^2) for each action "
        "dimension, in place of target_entropy. none: not used.",
        bounds=POSITIVE,
        traced=True,
    )
    std_bounds: Literal["clip", "tanh"] = option(
        "clip",
        "Bounds of the policy's log standard deviation: clipped to [-20, 2], or a tanh from -10 to 2 (FlashSAC).",
    )
    normalize_observations: bool = algorithm.normalize_observations(False)
    rewards: Rewards = algorithm.rewards(
        help="Rewards to train on: raw, their sign, or divided by the larger of two numbers (scaled): the running "
        "standard deviation of their discounted sum, and the largest sum divided by value.v_max (5 without c51). "
        "Reported returns are always of raw rewards. auto: sign for Atari with protocol dqn2015, else raw."
    )
    replay: Uniform = replay(1_000_000)
    target: Part = target_of_critics(PeriodicAverage())
    value: Part = value_of_critics()
    bonus: Part = bonus_of_sac()
    noise: White = noise_of_policy()
    network: Network = network(hidden_sizes=(256, 256), activation="relu", kernel_init="lecun_normal", batch_norm=True)
    critic_hidden_sizes: tuple[int, ...] = algorithm.critic_hidden_sizes()
    critic_layer_norm: bool = algorithm.critic_layer_norm()
    optimizer: Adam = optimizer(epsilon=1e-8, max_grad_norm=0.0)
    actor: Actor = actor()
    critic: Critic = critic()

    def warnings(self, num_envs: int) -> tuple[str, ...]:
        """Return warnings about combinations of options that are probably mistakes."""
        found = super().warnings(num_envs)
        if self.target_entropy is not None and self.target_entropy > 0:
            problem = f"actions in [-1, 1] have an entropy of at most 0.69 per dimension, got {self.target_entropy:g}"
            found += (f"target_entropy: {problem}; use a negative number",)
        return found
