"""Options of PPO."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PPO:
    """Proximal policy optimization (Schulman et al. 2017), with the defaults of CleanRL's classic-control runs."""

    rollout_length: int = 128
    """Environment steps between updates, in each environment."""
    num_minibatches: int = 4
    """Parts that the rollout is dealt into, each one gradient step."""
    num_epochs: int = 4
    """Passes over the rollout in each update."""
    learning_rate: float = 2.5e-4
    """Adam's step size at the start."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to 0, counted in gradient steps taken."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    max_grad_norm: float = 0.5
    """Bound on the global norm of the gradient; 0 for none."""
    gamma: float = 0.99
    """Discount of one environment step."""
    gae_lambda: float = 0.95
    """Lambda of the advantage estimate (Schulman et al. 2016)."""
    clip_coef: float = 0.2
    """Epsilon of the clipped policy loss (equation 7)."""
    clip_vloss: bool = True
    """Keep new values within `clip_coef` of the old ones in the loss."""
    value_coef: float = 0.5
    """Weight of the value loss (c1 in equation 9)."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus (c2 in equation 9)."""
    normalize_advantage: bool = True
    """Mean 0 and standard deviation 1 in each minibatch."""
    target_kl: float | None = None
    """Skip what is left of an update once its approximate KL passes 1.5 times this."""
    normalize_observations: bool = False
    """Standardize observations by their running mean and variance."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of their discounted sum."""
    clip_rewards: bool | None = None
    """Learn from the signs of rewards only; scores are of true rewards. None: in Atari by the rules of 2015."""
    network: Literal["auto", "mlp", "minatar", "nature", "dqn2013", "impala"] = "auto"
    """auto goes by the shape of the observation."""
    hidden_sizes: tuple[int, ...] = ()
    """Widths of the dense layers; left out, those of the network's paper (64 64 for mlp)."""
    activation: Literal["auto", "tanh", "relu"] = "auto"
    """auto is that of the network's paper."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the network computes in; parameters stay float32. bfloat16 is for GPUs."""
    tanh_squash: bool = False
    """Continuous actions: a tanh-Gaussian instead of a clipped Gaussian."""
    log_std_init: float = 0.0
    """Continuous actions: log standard deviation at the start, the same in all states."""

    def gradient_rows(self, num_envs: int) -> int:
        """Rows in a gradient step."""
        return self.rollout_length * num_envs // self.num_minibatches
