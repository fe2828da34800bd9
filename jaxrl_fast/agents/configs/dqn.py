"""Options of DQN and its extensions."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from jaxrl_fast.agents.configs.common import as_fraction


@dataclass(frozen=True)
class DQN:
    """Deep Q-learning (Mnih et al. 2015) and what Rainbow (Hessel et al. 2018) and others added, as switches.

    The defaults are those of CleanRL's classic-control runs, but for the bound on the gradient, a larger replay and the
    network's widths.
    """

    rollout_length: int | Literal["auto"] = "auto"
    """Environment steps between updates, in each environment; auto: at most 32 in all, or one each."""
    buffer_size: int = 100_000
    """Transitions in the replay over all environments, rounded down to whole rollouts."""
    batch_size: int = 128
    """Transitions in a gradient step."""
    replay_ratio: float = 0.1
    """Gradient steps per environment step, held exactly for any number of environments."""
    learning_starts: int = 10_000
    """Environment steps before the first gradient step."""
    target_update_interval: int = 500
    """Environment steps between updates of the target parameters; less than a gradient step takes: after each."""
    tau: float = 1.0
    """How far the target parameters move towards the others in one update; 1 copies them, less is an average."""
    learning_rate: float = 2.5e-4
    """Adam's step size at the start."""
    anneal_lr: bool = False
    """Let the learning rate fall linearly to 0, counted in gradient steps taken."""
    adam_epsilon: float = 1e-8
    """Adam's epsilon."""
    max_grad_norm: float = 10.0
    """Bound on the global norm of the gradient; 0 for none."""
    gamma: float = 0.99
    """Discount of one environment step."""
    n_step: int = 1
    """Rewards that a target sums before it looks at a value."""
    loss: Literal["squared", "huber"] = "squared"
    """Of the temporal-difference error; huber leans to the median, so keep rewards near 1. c51 has its own loss."""
    double: bool = False
    """Choose the next action by the online parameters (van Hasselt et al. 2016)."""
    dueling: bool = False
    """Streams for the state's value and the actions' advantages (Wang et al. 2016)."""
    noisy: bool = False
    """Explore by noise in the dense layers (Fortunato et al. 2018); the epsilons hold as well."""
    value_head: Literal["none", "c51", "quantile"] = "none"
    """Learn mean returns, or distributions on atoms (Bellemare et al. 2017) or by quantiles (Dabney et al. 2018)."""
    num_atoms: int = 51
    """Atoms or quantiles of a distribution."""
    v_min: float = -10.0
    """c51: the lowest return that it can tell."""
    v_max: float = 10.0
    """c51: the highest return that it can tell."""
    munchausen: bool = False
    """Add the scaled log-policy to the reward (Vieillard et al. 2020)."""
    munchausen_alpha: float = 0.9
    """Scale of the log-policy."""
    munchausen_temperature: float = 0.03
    """Of the softmax policy."""
    munchausen_clip: float = -1.0
    """The lowest that temperature times log-policy counts for."""
    prioritized: bool = False
    """Draw transitions in proportion to their errors (Schaul et al. 2016)."""
    priority_exponent: float = 0.5
    """How much errors count in the drawing."""
    importance_exponent: float = 0.4
    """How much of that the loss takes back at the start; at the end, all."""
    epsilon_start: float = 1.0
    """Chance of a random action at the start."""
    epsilon_end: float = 0.05
    """Chance of a random action after epsilon_steps."""
    epsilon_steps: int = 250_000
    """Environment steps over which it falls, linearly."""
    apex_alpha: float = 0.0
    """a: environment i of N explores with epsilon ^ (1 + a i / (N - 1)); 7 in Ape-X (Horgan et al. 2018), 0 for one."""
    layer_norm: bool = False
    """Normalize before every activation; in convolutions over each pixel's channels."""
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

    @property
    def ratio(self) -> Fraction:
        """The replay ratio as it is written: 0.1 is 1/10, to be counted in whole numbers."""
        return as_fraction(self.replay_ratio)

    def first_learning(self, num_envs: int) -> int:
        """Environment steps before the first gradient step, when something can be read from the replay for sure."""
        return max(self.learning_starts, (self.n_step + 1) * num_envs)

    def gradient_rows(self, num_envs: int) -> int:
        """Rows in a gradient step."""
        return self.batch_size

    def describe(self, num_envs: int) -> str:
        """What a run's header says."""
        count = lambda x: f"{x:,}"
        return (
            f"{self.replay_ratio:g} gradient steps per environment step, {count(self.batch_size)} transitions each, "
            f"from step {count(self.first_learning(num_envs))} on"
        )
