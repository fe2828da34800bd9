"""Define the options of SAC."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_fast.agents.configs import common
from jaxrl_fast.utils.option import COUNT, POSITIVE, option


@dataclass(frozen=True)
class SAC(common.ActorCritic):
    """Soft actor-critic (Haarnoja et al. 2018) with a learned temperature and optional REDQ ensembles.

    The defaults follow the authors' second paper, table 1, with 5,000 steps of random actions as in CleanRL.
    """

    rollout_length: int | Literal["auto"] = common.rollout_off_policy()
    buffer_size: int = common.buffer_size(1_000_000)
    replay_storage: common.Storage = common.replay_storage()
    replay_compression: common.Compression = common.replay_compression()
    batch_size: int = common.batch_size(256)
    replay_ratio: float = common.replay_ratio(1.0)
    learning_starts: int = common.random_actions(5_000)
    target_update_interval: int = common.target_update_interval(1, needs=("crossq", False))
    tau: float = common.tau(0.005, needs=("crossq", False))
    learning_rate: float = common.learning_rate(3e-4)
    critic_learning_rate: float = common.critic_learning_rate(3e-4)
    anneal_lr: bool = common.anneal_lr(False)
    adam_epsilon: float = common.adam_epsilon(1e-8)
    adam_beta1: float = common.adam_beta1(0.9)
    max_grad_norm: float = common.max_grad_norm(0.0)
    gamma: float = common.gamma(0.99)
    n_step: int = common.n_step(1)
    num_critics: int = common.num_critics(2)
    policy_delay: int = common.policy_delay(
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
        needs=("learn_temperature", True),
        traced=True,
    )
    value_head: common.ValueHead = common.value_head(help=common.CRITIC_HEAD)
    num_atoms: int = common.num_atoms(25)
    v_min: float = common.v_min()
    v_max: float = common.v_max()
    top_quantiles_to_drop: int = common.top_quantiles_to_drop(2)
    crossq: bool = common.crossq(False)
    crossq_momentum: float = common.crossq_momentum(0.99)
    crossq_warmup: int = common.crossq_warmup(100_000)
    noise_theta: float = common.noise_theta(1.0)
    prioritized: bool = common.prioritized(False)
    priority_exponent: float = common.priority_exponent(0.5)
    importance_exponent: float = common.importance_exponent(0.4)
    layer_norm: bool = common.layer_norm(
        False, help="Apply layer normalization before every activation of the critics."
    )
    normalize_observations: bool = common.normalize_observations(False)
    clip_rewards: bool | None = common.clip_rewards(None)
    network: common.Network = common.network("auto")
    network_options: dict[str, Any] = common.network_options({})
    observations: common.Observations = common.observations("auto")
    hidden_sizes: tuple[int, ...] = common.hidden_sizes((256, 256), help=common.ACTOR_CRITIC_WIDTHS)
    critic_hidden_sizes: tuple[int, ...] = common.hidden_sizes((), help=common.CRITIC_WIDTHS)
    activation: common.Activation = common.activation("relu")
    kernel_init: common.KernelInit = common.kernel_init("lecun_normal")
    compute_dtype: common.Dtype = common.compute_dtype("float32")

    def unused(self) -> tuple[common.Unused, ...]:
        """Return options that other options may disable."""
        return *common.unused_priorities(self), *common.unused_layers(self)

    def warnings(self, num_envs: int) -> tuple[str, ...]:
        """Return warnings about combinations of options that are probably mistakes."""
        found = common.warn_of_targets(self, num_envs)
        if self.target_entropy is not None and self.target_entropy > 0:
            problem = f"actions in [-1, 1] have an entropy of at most 0.69 per dimension, got {self.target_entropy:g}"
            found += (f"--agent.target-entropy: {problem}; use a negative number",)
        return found
