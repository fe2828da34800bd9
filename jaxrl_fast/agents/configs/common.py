"""Options and helpers that several algorithms share. Each algorithm states its own default."""

from fractions import Fraction
from functools import partial
from typing import Any, Literal

from jaxrl_fast.utils.option import COUNT, FRACTION, MAX_STEPS, NON_NEGATIVE, POSITIVE, Bounds, Importable, option

MIN_ROLLOUT = 32  # environment steps per update over all environments if rollout_length is auto

Network = Literal["auto", "mlp", "minatar", "nature", "dqn2013", "impala"] | Importable
Observations = Literal["auto", "image", "board", "vector"]
Activation = Literal["auto", "tanh", "relu"]
KernelInit = Literal["orthogonal", "lecun_normal", "lecun_uniform", "he_normal", "he_uniform"]
Dtype = Literal["float32", "bfloat16"]

rollout = partial(option, help="Environment steps per update in each environment.", bounds=COUNT)
num_minibatches = partial(option, help="Minibatches per epoch; each is one gradient step.", bounds=COUNT)
num_epochs = partial(option, help="Passes over the rollout per update.", bounds=COUNT)
learning_rate = partial(option, help="Initial step size of the optimizer.", bounds=POSITIVE, traced=True)
anneal_lr = partial(option, help="Decay the learning rate linearly to 0 over all gradient steps.")
adam_epsilon = partial(option, help="Epsilon of the optimizer.", bounds=POSITIVE, traced=True)
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
    help="Give environment i of N the exploration rate epsilon^(1 + alpha i / (N - 1)) (Horgan et al. 2018 use 7); "
    "0 gives all the same.",
    bounds=NON_NEGATIVE,
    traced=True,
    only="several_envs",
)
layer_norm = partial(
    option, help="Normalize before every activation; convolutions normalize over the channels of a pixel."
)
clip_rewards = partial(
    option,
    help="Train on the sign of rewards; reported returns stay unclipped. none: on for Atari with protocol dqn2015.",
)
network = partial(
    option,
    help="Architecture; auto chooses by the shape of the observation. package.module:Class is a custom flax "
    "module from observations to features.",
)
network_options = partial(option, help="Arguments of a custom network.", sweepable=False)
observations = partial(
    option,
    help="How observations [H, W, C] are read: image (shades, divided by 255), board or vector (numbers, as they are). "
    "auto: bytes with sides of 16 or more are images.",
)
hidden_sizes = partial(
    option,
    help="Widths of the dense layers. Default: those of the network's paper (64 64 for mlp).",
    bounds=Bounds(1, 2**16),  # wider layers overflow JAX's sizes
)
activation = partial(option, help="Activation function; auto takes that of the network's paper.")
kernel_init = partial(option, help="Initial kernels: orthogonal, or independent numbers as in jax.nn.initializers.")
compute_dtype = partial(
    option, help="Dtype of the network's computation; parameters stay float32. bfloat16 is for GPUs."
)


def as_fraction(number: float) -> Fraction:
    """Return the fraction that the number's decimal text denotes: 0.1 is 1/10."""
    return Fraction(str(number))


def rollout_length(config: Any, num_envs: int) -> int:
    """Return the environment steps per update in each environment."""
    return max(1, MIN_ROLLOUT // num_envs) if config.rollout_length == "auto" else config.rollout_length
