"""Define the options of PPO."""

from dataclasses import dataclass
from typing import Any

from jaxrl_fast.agents.configs import common
from jaxrl_fast.utils.option import COUNT, FRACTION, NON_NEGATIVE, POSITIVE, option


@dataclass(frozen=True)
class PPO(common.OnPolicy):
    """Proximal policy optimization (Schulman et al. 2017), with the defaults of CleanRL's classic-control runs."""

    rollout_length: int = common.rollout(128)
    num_minibatches: int = common.num_minibatches(4)
    num_epochs: int = common.num_epochs(4)
    learning_rate: float = common.learning_rate(2.5e-4)
    anneal_lr: bool = common.anneal_lr(True)
    adam_epsilon: float = common.adam_epsilon(1e-5)
    max_grad_norm: float = common.max_grad_norm(0.5)
    gamma: float = common.gamma(0.99)
    gae_lambda: float = option(0.95, "Lambda of the advantage estimate (GAE).", bounds=FRACTION, traced=True)
    clip_coef: float = option(
        0.2, "Clip range of the policy ratio (equation 7).", bounds=POSITIVE, traced=True, only="several_steps"
    )
    clip_vloss: bool = option(
        True, "Clip new values to within clip_coef of the old ones in the value loss.", only="several_steps"
    )
    value_coef: float = option(0.5, "Weight of the value loss (c1 in equation 9).", bounds=NON_NEGATIVE, traced=True)
    entropy_coef: float = option(0.01, "Weight of the entropy (c2 in equation 9).", bounds=NON_NEGATIVE, traced=True)
    normalize_advantage: bool = option(True, "Standardize advantages in each minibatch.")
    target_kl: float | None = option(
        None,
        "Skip the remaining gradient steps of an update once its approximate KL exceeds 1.5 times this. none: never.",
        bounds=POSITIVE,
        traced=True,
        only="several_steps",
    )
    adaptive_kl: float | None = option(
        None,
        "Multiply or divide the learning rate by 1.5 before each gradient step but the first of an update, so that the "
        "approximate KL stays between half and twice this (code of Rudin et al. 2022). The rate stays between 1e-5 and "
        "1e-2; a learning_rate outside replaces the bound that it exceeds. none: off.",
        bounds=POSITIVE,
        needs=("anneal_lr", False),
        traced=True,
        only="several_steps",
    )
    normalize_observations: bool = common.normalize_observations(False)
    normalize_rewards: bool = option(False, "Divide rewards by the running standard deviation of their discounted sum.")
    clip_rewards: bool | None = common.clip_rewards(None)
    network: common.Network = common.network("auto")
    network_options: dict[str, Any] = common.network_options({})
    observations: common.Observations = common.observations("auto")
    hidden_sizes: tuple[int, ...] = common.hidden_sizes(())
    memory: common.Memory = common.memory("none")
    memory_size: int = common.memory_size(128)
    sequence_length: int | None = common.sequence_length(None)
    activation: common.Activation = common.activation("auto")
    kernel_init: common.KernelInit = common.kernel_init("orthogonal")
    compute_dtype: common.Dtype = common.compute_dtype("float32")
    tanh_squash: bool = option(False, "Use a tanh-Gaussian policy instead of a clipped Gaussian.", only="continuous")
    log_std_init: float = option(0.0, "Initial log standard deviation of the policy.", traced=True, only="continuous")
    state_dependent_std: bool = option(
        False, "Predict the standard deviation from the observation, as an output of the network.", only="continuous"
    )
    gsde: bool = option(
        False,
        "Explore by noise that is a function of the policy's features, sampled once per episode (gSDE, Raffin et al. "
        "2021).",
        only="continuous",
    )
    sde_sample_freq: int | None = option(
        None,
        "Environment steps between samples of this function within an episode; none: one sample per episode.",
        bounds=COUNT,
        needs=("gsde", True),
        only="continuous",
    )

    def unused(self) -> tuple[common.Unused, ...]:
        """Return options that other options may disable."""
        return common.unused_layers(self)
