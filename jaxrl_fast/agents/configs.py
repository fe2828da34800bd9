"""The hyperparameters of every algorithm and their defaults. Standard library only, so that `--help` is quick.

An algorithm's options are the fields of a frozen dataclass, all with a default, each with its docstring below it, in
CONFIGS or as the `Config` of a module of one's own. `rollout_length` (a number, or "auto") must be among them. What
else is reckoned with, where it is there:

- `gradient_rows(num_envs)`: rows in a gradient step, for how many devices there is work. An algorithm that says it must
  sum its gradients over `spec.axis_name` (`jax.lax.psum`); one that does not learns on one device.
- `network`: one of `networks.KINDS`, or "auto", which decides how much work a row is.
- `capacity`: transitions in a replay; `first_learning(num_envs)`: environment steps before the first gradient step.
- `traced`: names of real numbers that `make` and its functions only calculate with. A sweep over them is one program,
  in which they are JAX's; over others, each value is compiled for.
- `describe(num_envs)`: a sentence for a run's header.

Options that do nothing by themselves are in NEEDS.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

SMALLEST_ROLLOUT = 32  # environment steps in all between updates of an algorithm that leaves it to us


@dataclass(frozen=True)
class PPO:
    """Proximal policy optimisation (Schulman et al. 2017), with the defaults of CleanRL's classic-control runs."""

    rollout_length: int = 128
    """Environment steps between updates, in each environment."""
    num_minibatches: int = 4
    """Parts that the rollout is dealt into, each one gradient step."""
    num_epochs: int = 4
    """Passes over the rollout in each update."""
    learning_rate: float = 2.5e-4
    """Adam's step size at the start."""
    anneal: bool = True
    """Let the learning rate fall linearly to 0, counted in gradient steps taken."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    max_grad_norm: float = 0.5
    """Bound on the global norm of the gradient; 0 for none."""
    gamma: float = 0.99
    """Discount of one environment step."""
    gae_lambda: float = 0.95
    """Lambda of the advantage estimate (Schulman et al. 2016)."""
    clip: float = 0.2
    """Epsilon of the clipped policy loss (equation 7)."""
    value_clip: bool = True
    """Keep new values within `clip` of the old ones in the loss."""
    value_coef: float = 0.5
    """Weight of the value loss (c1 in equation 9)."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus (c2 in equation 9)."""
    normalize_advantage: bool = True
    """Mean 0 and standard deviation 1 in each minibatch."""
    target_kl: float | None = None
    """Skip what is left of an update once its approximate KL passes 1.5 times this."""
    normalize_observations: bool = False
    """Standardise observations by their running mean and variance."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of their discounted sum."""
    clip_rewards: bool | None = None
    """Learn from the signs of rewards only; scores are of true rewards. None: in Atari by the rules of 2015."""
    network: Literal["auto", "mlp", "minatar", "nature", "dqn2013", "impala"] = "auto"
    """auto goes by the shape of the observation."""
    hidden: tuple[int, ...] = ()
    """Widths of the dense layers; left out, those of the network's paper (64 64 for mlp)."""
    activation: Literal["auto", "tanh", "relu"] = "auto"
    """auto is that of the network's paper."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the network computes in; parameters stay float32. bfloat16 is for GPUs."""
    squash: bool = False
    """Continuous actions: a tanh-Gaussian instead of a clipped Gaussian."""
    log_std_init: float = 0.0
    """Continuous actions: log standard deviation at the start, the same in all states."""

    def gradient_rows(self, num_envs: int) -> int:
        """Rows in a gradient step."""
        return self.rollout_length * num_envs // self.num_minibatches


@dataclass(frozen=True)
class DQN:
    """Deep Q-learning (Mnih et al. 2015) and what Rainbow (Hessel et al. 2018) and others added, as switches.

    The defaults are those of CleanRL's classic-control runs, but for the bound on the gradient, a larger replay and the
    network's widths.
    """

    rollout_length: int | Literal["auto"] = "auto"
    """Environment steps between updates, in each environment; auto: at most 32 in all, or one each."""
    capacity: int = 100_000
    """Transitions in the replay over all environments, rounded down to whole rollouts."""
    batch_size: int = 128
    """Transitions in a gradient step."""
    replay_ratio: float = 0.1
    """Gradient steps per environment step, held exactly for any number of environments."""
    learning_starts: int = 10_000
    """Environment steps before the first gradient step."""
    target_period: int = 500
    """Environment steps between updates of the target parameters; less than a gradient step takes: after each."""
    target_step_size: float = 1.0
    """How far the target parameters move towards the others in one update; 1 copies them, less is an average."""
    learning_rate: float = 2.5e-4
    """Adam's step size at the start."""
    anneal: bool = False
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
    distribution: Literal["none", "c51", "quantile"] = "none"
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
    prioritised: bool = False
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
    epsilon_ladder: float = 0.0
    """a: environment i of N explores with epsilon ^ (1 + a i / (N - 1)); 7 in Ape-X (Horgan et al. 2018), 0 for one."""
    layer_norm: bool = False
    """Normalise before every activation; in convolutions over each pixel's channels."""
    clip_rewards: bool | None = None
    """Learn from the signs of rewards only; scores are of true rewards. None: in Atari by the rules of 2015."""
    network: Literal["auto", "mlp", "minatar", "nature", "dqn2013", "impala"] = "auto"
    """auto goes by the shape of the observation."""
    hidden: tuple[int, ...] = ()
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


@dataclass(frozen=True)
class PQN:
    """Parallelised Q-network (Gallici et al. 2025).

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
    anneal: bool = True
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
    epsilon_ladder: float = 0.0
    """a: environment i of N explores with epsilon ^ (1 + a i / (N - 1)); 7 in Ape-X (Horgan et al. 2018), 0 for one."""
    layer_norm: bool = True
    """Normalise before every activation; in convolutions over each pixel's channels, as flax does."""
    clip_rewards: bool | None = None
    """Learn from the signs of rewards only; scores are of true rewards. None: in Atari by the rules of 2015."""
    network: Literal["auto", "mlp", "minatar", "nature", "dqn2013", "impala"] = "auto"
    """auto goes by the shape of the observation."""
    hidden: tuple[int, ...] = ()
    """Widths of the dense layers; left out, those of the network's paper (64 64 for mlp)."""
    activation: Literal["auto", "tanh", "relu"] = "relu"
    """auto is that of the network's paper."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the network computes in; parameters stay float32. bfloat16 is for GPUs."""

    def gradient_rows(self, num_envs: int) -> int:
        """Rows in a gradient step."""
        return self.rollout_length * num_envs // self.num_minibatches


CONFIGS = {"ppo": PPO, "dqn": DQN, "pqn": PQN}
# Options that do nothing unless another has one of these values. A name means the same in every algorithm.
NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("priority_exponent", "importance_exponent"), ("prioritised", (True,))),
    **dict.fromkeys(("munchausen_alpha", "munchausen_temperature", "munchausen_clip"), ("munchausen", (True,))),
    **dict.fromkeys(("v_min", "v_max"), ("distribution", ("c51",))),
    "num_atoms": ("distribution", ("c51", "quantile")),
    "loss": ("distribution", ("none", "quantile")),
}
CONTINUOUS = ("squash", "log_std_init")  # do nothing where actions are discrete


def as_fraction(number: float) -> Fraction:
    """As it is written, not as it is stored: 0.1 is 1/10."""
    return Fraction(str(number))


def rollout_length(config: Any, num_envs: int) -> int:
    """Environment steps between updates, in each environment."""
    left_to_us = max(1, SMALLEST_ROLLOUT // num_envs)
    return left_to_us if config.rollout_length == "auto" else config.rollout_length
