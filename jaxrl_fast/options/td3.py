"""Define the options of TD3 and DDPG."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxrl_fast.options import algorithm
from jaxrl_fast.options.bonus import bonus_of_actors
from jaxrl_fast.options.declare import NON_NEGATIVE, Part, option
from jaxrl_fast.options.explore import White, noise_of_actions
from jaxrl_fast.options.network import Network, network
from jaxrl_fast.options.optimizer import Adam, optimizer, schedule
from jaxrl_fast.options.replay import Uniform, replay
from jaxrl_fast.options.sees import Actor, Critic, actor, critic
from jaxrl_fast.options.target import Average, target_of_critics
from jaxrl_fast.options.value import value_of_critics

_policy_delay = partial(
    algorithm.policy_delay,
    help="Gradient steps of the critics per gradient step of the policy and update of the targets.",
)
_noise = partial(option, bounds=NON_NEGATIVE, traced=True)
_target_noise = partial(_noise, help="Standard deviation of noise on the target policy's actions in [-1, 1].")


@dataclass(frozen=True)
class TD3(algorithm.ActorCritic):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018).

    The defaults follow the authors' published code, except that random actions last 5,000 steps.
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
    policy_delay: int = _policy_delay(2)
    target_noise: float = _target_noise(0.2)
    target_noise_clip: float = _noise(0.5, "Clip target noise to plus or minus this.")
    normalize_observations: bool = algorithm.normalize_observations(False)
    rewards: algorithm.Rewards = algorithm.rewards()
    replay: Uniform = replay(1_000_000)
    target: Part = target_of_critics(Average())
    value: Part = value_of_critics()
    bonus: Part = bonus_of_actors()
    noise: White = noise_of_actions()
    network: Network = network(hidden_sizes=(256, 256), activation="relu", kernel_init="lecun_normal")
    critic_hidden_sizes: tuple[int, ...] = algorithm.critic_hidden_sizes()
    critic_layer_norm: bool = algorithm.critic_layer_norm()
    optimizer: Adam = optimizer(epsilon=1e-8, max_grad_norm=0.0)
    actor: Actor = actor()
    critic: Critic = critic()


@dataclass(frozen=True)
class DDPG(TD3):
    """Deep deterministic policy gradient (Lillicrap et al. 2016): TD3 with one critic, no delay and no target noise.

    The other defaults are TD3's. The paper's noise is `noise` ou with theta 0.15 and std 0.38.
    """

    num_critics: int = algorithm.num_critics(1)
    policy_delay: int = _policy_delay(1)
    target_noise: float = _target_noise(0.0)
