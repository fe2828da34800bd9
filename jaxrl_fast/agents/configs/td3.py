"""Define the options of TD3 and DDPG."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jaxrl_fast.agents.configs import common
from jaxrl_fast.utils.option import NON_NEGATIVE, option

_policy_delay = partial(
    common.policy_delay, help="Gradient steps of the critics per gradient step of the policy and update of the targets."
)
_noise = partial(option, bounds=NON_NEGATIVE, traced=True)
_target_noise = partial(_noise, help="Standard deviation of noise on the target policy's actions in [-1, 1].")


@dataclass(frozen=True)
class TD3(common.ActorCritic):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018).

    The defaults follow the authors' published code, except that random actions last 5,000 steps.
    """

    rollout_length: int | Literal["auto"] = common.rollout_off_policy()
    buffer_size: int = common.buffer_size(1_000_000)
    replay_storage: common.Storage = common.replay_storage()
    replay_compression: common.Compression = common.replay_compression()
    batch_size: int = common.batch_size(256)
    replay_ratio: float = common.replay_ratio(1.0)
    learning_starts: int = common.random_actions(5_000)
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
    policy_delay: int = _policy_delay(2)
    target_noise: float = _target_noise(0.2)
    target_noise_clip: float = _noise(0.5, "Clip target noise to plus or minus this.")
    exploration_noise: float = _noise(0.1, "Standard deviation of exploration noise on actions in [-1, 1].")
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
        return (
            ("target_noise", self.target_noise_clip == 0, "target_noise_clip is 0"),
            ("target_noise_clip", self.target_noise == 0, "target_noise is 0"),
            ("noise_theta", self.exploration_noise == 0, "exploration_noise is 0"),
            *common.unused_priorities(self),
            *common.unused_layers(self),
        )


@dataclass(frozen=True)
class DDPG(TD3):
    """Deep deterministic policy gradient (Lillicrap et al. 2016): TD3 with one critic, no delay and no target noise.

    The other defaults are TD3's. The paper's noise is `noise_theta` 0.15 with `exploration_noise` 0.38.
    """

    num_critics: int = common.num_critics(1)
    policy_delay: int = _policy_delay(1)
    target_noise: float = _target_noise(0.0)
