"""Options of PQN."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PQN:
    """Parallelized Q-network (Gallici et al. 2025).

    The defaults are those of CleanRL's classic-control runs, but for the network's widths and the bound on the
    gradient, which is of twice our loss there.
    """

    rollout_length: int = 128
    """Environment steps between updates, in each environment."""
    num_minibatches: int = 4
    """Parts that the rollout is dealt into, each one gradient step."""
    num_epochs: int = 4
    """Passes over the rollout in each update."""
    learning_rate: float = 2.5e-4
    """RAdam's step size at the start."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to 0, counted in gradient steps taken."""
    adam_epsilon: float = 1e-8
    """RAdam's epsilon."""
    max_grad_norm: float = 10.0
    """Bound on the global norm of the gradient; 0 for none."""
    gamma: float = 0.99
    """Discount of one environment step."""
    q_lambda: float = 0.65
    """Lambda of the returns that values are regressed on (Peng's Q(lambda))."""
    epsilon_start: float = 1.0
    """Chance of a random action at the start."""
    epsilon_end: float = 0.05
    """Chance of a random action after epsilon_steps."""
    epsilon_steps: int = 250_000
    """Environment steps over which it falls, linearly."""
    apex_alpha: float = 0.0
    """a: environment i of N explores with epsilon ^ (1 + a i / (N - 1)); 7 in Ape-X (Horgan et al. 2018), 0 for one."""
    layer_norm: bool = True
    """Normalize before every activation; in convolutions over each pixel's channels, as flax does."""
    clip_rewards: bool | None = None
    """Learn from the signs of rewards only; scores are of true rewards. None: in Atari by the rules of 2015."""
    network: Literal["auto", "mlp", "minatar", "nature", "dqn2013", "impala"] = "auto"
    """auto goes by the shape of the observation."""
    hidden_sizes: tuple[int, ...] = ()
    """Widths of the dense layers; left out, those of the network's paper (64 64 for mlp)."""
    activation: Literal["auto", "tanh", "relu"] = "relu"
    """auto is that of the network's paper."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the network computes in; parameters stay float32. bfloat16 is for GPUs."""

    def gradient_rows(self, num_envs: int) -> int:
        """Rows in a gradient step."""
        return self.rollout_length * num_envs // self.num_minibatches
