"""Define options and helpers that several algorithms share. Each algorithm states its own default."""

from fractions import Fraction
from functools import partial
from typing import Any, Literal

from jaxrl_fast.utils.option import COUNT, FRACTION, MAX_STEPS, NON_NEGATIVE, POSITIVE, Bounds, Importable, option

MIN_ROLLOUT = 32  # environment steps per update over all environments if rollout_length is auto

Network = Literal["auto", "mlp", "simba", "minatar", "nature", "dqn2013", "impala"] | Importable
Observations = Literal["auto", "image", "board", "vector"]
Activation = Literal["auto", "tanh", "relu"]
KernelInit = Literal["orthogonal", "lecun_normal", "lecun_uniform", "he_normal", "he_uniform"]
Dtype = Literal["float32", "bfloat16"]
Memory = Literal["none", "gru", "lstm", "lru"]
Unused = tuple[str, bool, str]  # an option, whether other options disable it, and the reason

rollout = partial(option, help="Environment steps per update in each environment.", bounds=COUNT)
rollout_off_policy = partial(
    rollout,
    "auto",
    help="Environment steps per update in each environment; auto: 32 divided by num_envs, at least 1.",
)
buffer_size = partial(
    option,
    help="Transitions in the replay buffer over all environments, rounded down to whole rollouts.",
    bounds=Bounds(1, 2**30),  # indices are int32, and so is the sum of two
)
Storage = Literal["auto", "device", "host", "disk"]
replay_storage = partial(
    option,
    "auto",
    help="Where observations of the replay are stored: device memory, host memory, or disk (the run directory). "
    "Results are the same. auto: the first of device, host and disk where they fit.",
)
Compression = Literal["auto", "none", "zstd"]
replay_compression = partial(
    option,
    "auto",
    help="Lossless compression of observations in host or disk storage. auto: zstd for uint8 and bool observations if "
    "zstandard is installed.",
    needs=("replay_storage", "auto", "host", "disk"),
)
batch_size = partial(option, help="Transitions per gradient step.", bounds=COUNT)
replay_ratio = partial(
    option, help="Gradient steps per environment step, exact for any number of environments.", bounds=POSITIVE
)  # not traced: counted as a fraction
learning_starts = partial(option, help="Environment steps before the first gradient step.", bounds=Bounds(0, MAX_STEPS))
random_actions = partial(
    learning_starts, help="Environment steps before the first gradient step; until then actions are uniformly random."
)
target_update_interval = partial(
    option,
    help="Environment steps between target updates; 1, or fewer than those of one gradient step: update after every "
    "gradient step.",
    bounds=Bounds(1, MAX_STEPS),
)
tau = partial(
    option,
    help="Step size of a target update: 1 copies the online parameters, smaller values average (Polyak).",
    bounds=Bounds(0, 1, exclusive_min=True),
    traced=True,
)
n_step = partial(option, help="Number of rewards summed before bootstrapping (n-step returns).", bounds=COUNT)
prioritized = partial(
    option, help="Sample transitions in proportion to their temporal-difference errors (Schaul et al. 2016)."
)
_of_priorities = partial(option, bounds=FRACTION, needs=("prioritized", True), traced=True)
priority_exponent = partial(_of_priorities, help="Exponent of the errors in the sampling probabilities (alpha).")
importance_exponent = partial(
    _of_priorities, help="Initial exponent of the importance weights (beta), which rises to 1 over the run."
)
critic_learning_rate = partial(
    option, help="Learning rate of the critics; with anneal_lr, the initial one.", bounds=POSITIVE, traced=True
)
policy_delay = partial(option, bounds=COUNT)
num_critics = partial(
    option,
    help="Number of critics; the target is the minimum of their values, unless value_head is quantile.",
    bounds=Bounds(1, 2**10),
)
noise_theta = partial(
    option,
    help="Theta of Ornstein-Uhlenbeck exploration noise (Lillicrap et al. 2016 use 0.15); 1: independent noise at each "
    "step. The variance does not depend on it.",
    bounds=Bounds(0, 1, exclusive_min=True),
)
ACTOR_CRITIC_WIDTHS = "Widths of the dense layers of the policy, and of each critic without critic_hidden_sizes."
CRITIC_WIDTHS = "Widths of the dense layers of each critic. Default: hidden_sizes."
ValueHead = Literal["none", "c51", "quantile"]
value_head = partial(
    option,
    "none",
    help="Learn mean returns (none), distributions on fixed atoms (c51, Bellemare et al. 2017) or quantiles (Dabney et "
    "al. 2018).",
)
CRITIC_HEAD = (
    "Critics learn mean returns (none), distributions on fixed atoms (c51; the target uses the critic with the lowest "
    "mean: FastTD3, Seo et al. 2025) or quantiles (the target pools those of all critics: TQC, Kuznetsov et al. 2020)."
)
num_atoms = partial(
    option, help="Number of atoms or quantiles.", bounds=Bounds(2, 2**16), needs=("value_head", "c51", "quantile")
)
_c51 = partial(option, needs=("value_head", "c51"))  # not traced: compared with each other
v_min = partial(_c51, -10.0, help="Lowest return that the atoms represent.")
v_max = partial(_c51, 10.0, help="Highest return that the atoms represent.")
top_quantiles_to_drop = partial(
    option,
    help="Quantiles per critic that the target drops: the largest of the pooled ones (TQC, Kuznetsov et al. 2020).",
    bounds=Bounds(0),
    needs=("value_head", "quantile"),
)
crossq = partial(
    option,
    help="Use batch renormalization in the critics instead of target networks, with (s, a) and (s', a') in one batch "
    "(CrossQ, Bhatt et al. 2024).",
)
_of_crossq = partial(option, needs=("crossq", True))
crossq_momentum = partial(
    _of_crossq,
    help="Decay rate of the running statistics per gradient step.",
    bounds=Bounds(0, 1, exclusive_min=True),
)
crossq_warmup = partial(
    _of_crossq,
    help="Gradient steps with plain batch normalization, before batch renormalization begins.",
    bounds=Bounds(0, MAX_STEPS),
)
num_minibatches = partial(option, help="Minibatches per epoch; each is one gradient step.", bounds=COUNT)
num_epochs = partial(option, help="Passes over the rollout per update.", bounds=COUNT)
learning_rate = partial(option, help="Learning rate; with anneal_lr, the initial one.", bounds=POSITIVE, traced=True)
anneal_lr = partial(option, help="Decay the learning rate linearly to 0 over all gradient steps.")
adam_epsilon = partial(option, help="Epsilon of the optimizer.", bounds=POSITIVE, traced=True)
adam_beta1 = partial(
    option, help="Beta1 of the optimizer: decay rate of the gradients' mean.", bounds=Bounds(0, 0.9999), traced=True
)
max_grad_norm = partial(
    option, help="Maximum global norm of the gradient; 0 disables clipping.", bounds=NON_NEGATIVE, traced="nonzero"
)
gamma = partial(option, help="Discount factor per environment step.", bounds=FRACTION, traced=True)
epsilon_start = partial(option, help="Initial probability of a random action.", bounds=FRACTION, traced=True)
epsilon_end = partial(option, help="Final probability of a random action.", bounds=FRACTION, traced=True)
epsilon_steps = partial(
    option, help="Environment steps over which epsilon decays linearly.", bounds=Bounds(1, MAX_STEPS)
)
apex_alpha = partial(
    option,
    help="Explore in environment i of N with epsilon^(1 + alpha i / (N - 1)) (Horgan et al. 2018 use 7); 0: with the "
    "same epsilon in all.",
    bounds=NON_NEGATIVE,
    traced=True,
    only="several_envs",
)
layer_norm = partial(
    option,
    help="Apply layer normalization before every activation; after convolutions, over the channels of each pixel.",
    only="no_simba",
)
clip_rewards = partial(
    option,
    help="Train on the sign of rewards; reported returns stay unclipped. none: on for Atari with protocol dqn2015.",
)
normalize_observations = partial(option, help="Standardize observations by their running mean and variance.")
network = partial(
    option,
    help="Architecture; auto chooses by the shape of the observation. package.module:Class is a custom flax "
    "module from observations to features.",
)
network_options = partial(option, help="Constructor arguments of a custom network.", sweepable=False)
memory = partial(
    option,
    help="Recurrent layer after the network, for partially observable environments: gru, lstm, or lru (a linear "
    "recurrence).",
)
MEMORIES = ("memory", "gru", "lstm", "lru")
memory_size = partial(option, help="Width of the recurrent layer.", bounds=Bounds(1, 2**16), needs=MEMORIES)
sequence_length = partial(
    option,
    help="Steps of each training sequence, over which gradients flow back in time; none: the whole rollout.",
    bounds=COUNT,
    needs=MEMORIES,
)
burn_in = partial(
    option,
    help="Steps at the start of a sequence that only compute the recurrent state, without a loss (Kapturowski et al. "
    "2019).",
    bounds=Bounds(0, MAX_STEPS),
    needs=MEMORIES,
)
observations = partial(
    option,
    help="How observations [H, W] and [H, W, C] are read: image (pixels, divided by 255), board (unscaled) or vector "
    "(unscaled and flattened). auto: image for uint8 with sides of 16 or more.",
    only="images",
)
hidden_sizes = partial(
    option,
    help="Widths of the dense layers. Default: those of the network's paper (64 64 for mlp).",
    bounds=Bounds(1, 2**16),  # wider layers overflow JAX's sizes
)
activation = partial(option, help="Activation function; auto: that of the network's paper (tanh for mlp).")
kernel_init = partial(option, help="Initialization of kernels, by its name in jax.nn.initializers.")
compute_dtype = partial(
    option, help="Dtype of the network's computation; parameters stay float32. bfloat16 is for GPUs."
)


class OnPolicy:
    """Derived values of the options of an algorithm that learns from each rollout in minibatches."""

    rollout_length: int
    num_minibatches: int
    memory: Memory
    sequence_length: int | None

    def sequence(self) -> int | None:
        """Return the length of the training sequences; None without a memory."""
        return None if self.memory == "none" else self.sequence_length or self.rollout_length

    def gradient_rows(self, num_envs: int) -> int:
        """Return the rows in a gradient step, or 0 if minibatches of equal size are not possible."""
        num_rows, rest = divmod(self.rollout_length * num_envs, self.num_minibatches)
        return 0 if rest else num_rows


class OffPolicy:
    """Derived values of the options of an algorithm that learns from a replay buffer."""

    replay_ratio: float
    batch_size: int
    learning_starts: int
    n_step: int
    replay_storage: Storage
    replay_compression: Compression

    @property
    def ratio(self) -> Fraction:
        """Return the replay ratio as the fraction that its decimal text denotes: 0.1 is 1/10."""
        return as_fraction(self.replay_ratio)

    def first_learning(self, num_envs: int) -> int:
        """Return the environment steps before the first gradient step: enough for transitions in the replay buffer."""
        return max(self.learning_starts, (self.n_step + 1) * num_envs)

    def gradient_rows(self, num_envs: int) -> int:
        """Return the rows in a gradient step."""
        return self.batch_size

    def describe(self, num_envs: int) -> str:
        """Return a sentence for the header of a run."""
        rows = "transitions" if getattr(self, "memory", "none") == "none" else "sequences"
        steps = "1 gradient step" if self.replay_ratio == 1 else f"{self.replay_ratio:g} gradient steps"
        return (
            f"{steps} per environment step, {self.batch_size:,} {rows} each, "
            f"from step {self.first_learning(num_envs):,} on"
        )


class ActorCritic(OffPolicy):
    """Derived values of the options of SAC, TD3 and DDPG."""

    crossq: bool

    def sequence(self) -> int | None:
        """Return the rows that one device must process together: the whole batch with `crossq`, else None."""
        return self.batch_size if self.crossq else None


def warn_of_targets(config: Any, num_envs: int) -> tuple[str, ...]:
    """Return a warning if targets are copied so often that they equal the online parameters."""
    steps, interval = rollout_length(config, num_envs) * num_envs, config.target_update_interval
    if config.tau < 1 or interval >= steps or config.replay_ratio * steps < 2:
        return ()
    problem = f"the target is copied several times within an update of {steps} steps, got {interval}"
    return (f"--agent.target-update-interval: {problem}; use {steps} or more",)


def unused_priorities(config: Any) -> tuple[Unused, ...]:
    """Return options that have no effect on sampling from a replay buffer."""
    are_equal = config.prioritized and config.priority_exponent == 0
    return (("importance_exponent", are_equal, "priority_exponent is 0, so that all transitions are equal"),)


def unused_epsilon(config: Any) -> tuple[Unused, ...]:
    """Return options that have no effect on epsilon-greedy exploration."""
    start, end = config.epsilon_start, config.epsilon_end
    return (
        ("epsilon_steps", start == end, "epsilon_start and epsilon_end are equal"),
        ("apex_alpha", start == end and start in (0, 1), f"epsilon is always {start:g}"),
    )


def unused_layers(config: Any) -> tuple[Unused, ...]:
    """Return options that have no effect on a custom network without dense layers after it."""
    widths = config.hidden_sizes or getattr(config, "critic_hidden_sizes", ())
    is_bare, why = (
        ":" in config.network and not widths,
        "a custom network defines its layers, unless hidden_sizes adds some",
    )
    return tuple((name, is_bare, why) for name in ("activation", "layer_norm") if hasattr(config, name))


def as_fraction(number: float) -> Fraction:
    """Return the fraction that the number's decimal text denotes: 0.1 is 1/10."""
    return Fraction(str(number))


def rollout_length(config: Any, num_envs: int) -> int:
    """Return the environment steps per update in each environment."""
    if config.rollout_length != "auto":
        return config.rollout_length
    has_memory = getattr(config, "memory", "none") != "none"
    longest = config.sequence_length - config.burn_in if has_memory else MIN_ROLLOUT
    return max(1, min(MIN_ROLLOUT // num_envs, longest))
