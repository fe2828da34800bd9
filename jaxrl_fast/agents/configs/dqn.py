"""Define the options of DQN and its extensions."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jaxrl_fast.agents.configs import common
from jaxrl_fast.utils.option import NON_NEGATIVE, POSITIVE, Bounds, option

_munchausen = partial(option, needs=("munchausen", True), traced=True)


@dataclass(frozen=True)
class DQN(common.OffPolicy):
    """Deep Q-learning (Mnih et al. 2015), with optional extensions such as those of Rainbow (Hessel et al. 2018).

    The defaults follow CleanRL's classic-control runs, except for the gradient bound, a larger replay buffer and the
    network's widths.
    """

    rollout_length: int | Literal["auto"] = common.rollout_off_policy(
        help="Environment steps per update in each environment; auto: 32 divided by num_envs, at least 1, and with "
        "memory at most the steps of a sequence after its burn_in."
    )
    buffer_size: int = common.buffer_size(100_000)
    replay_storage: common.Storage = common.replay_storage()
    replay_compression: common.Compression = common.replay_compression()
    batch_size: int = common.batch_size(128)
    replay_ratio: float = common.replay_ratio(0.1)
    learning_starts: int = common.learning_starts(10_000)
    target_update_interval: int = common.target_update_interval(500)
    tau: float = common.tau(1.0)
    learning_rate: float = common.learning_rate(2.5e-4)
    anneal_lr: bool = common.anneal_lr(False)
    adam_epsilon: float = common.adam_epsilon(1e-8)
    max_grad_norm: float = common.max_grad_norm(10.0)
    gamma: float = common.gamma(0.99)
    n_step: int = common.n_step(1)
    loss: Literal["squared", "huber"] = option(
        "squared",
        "Loss of the temporal-difference error. huber is linear beyond errors of 1, so keep rewards near 1.",
        needs=("value_head", "none", "quantile"),
    )
    double: bool = option(
        False, "Choose the next action by the online network, not by the target network (van Hasselt et al. 2016)."
    )
    dueling: bool = option(False, "Use separate streams for state value and advantages (Wang et al. 2016).")
    noisy: bool = option(False, "Explore by noise in the dense layers, in addition to epsilon (Fortunato et al. 2018).")
    value_head: common.ValueHead = common.value_head()
    num_atoms: int = common.num_atoms(51)
    v_min: float = common.v_min()
    v_max: float = common.v_max()
    munchausen: bool = option(False, "Add the scaled log-policy to the reward (Vieillard et al. 2020).")
    munchausen_alpha: float = _munchausen(0.9, "Scale of the log-policy.", bounds=NON_NEGATIVE)
    munchausen_temperature: float = _munchausen(0.03, "Temperature of the softmax policy.", bounds=POSITIVE)
    munchausen_clip: float = _munchausen(
        -1.0, "Lower bound of temperature times log-policy.", bounds=Bounds(float("-inf"), 0)
    )
    value_rescaling: bool = option(
        False,
        "Learn h(Q), close to sign(Q) sqrt|Q|, instead of Q: large rewards need no clipping (Pohlen et al. 2018).",
        needs=("value_head", "none"),
    )
    prioritized: bool = common.prioritized(False)
    priority_exponent: float = common.priority_exponent(0.5)
    importance_exponent: float = common.importance_exponent(0.4)
    epsilon_start: float = common.epsilon_start(1.0)
    epsilon_end: float = common.epsilon_end(0.05)
    epsilon_steps: int = common.epsilon_steps(250_000)
    apex_alpha: float = common.apex_alpha(0.0)
    layer_norm: bool = common.layer_norm(False)
    clip_rewards: bool | None = common.clip_rewards(None)
    network: common.Network = common.network("auto")
    network_options: dict[str, Any] = common.network_options({})
    observations: common.Observations = common.observations("auto")
    hidden_sizes: tuple[int, ...] = common.hidden_sizes(())
    memory: common.Memory = common.memory("none")
    memory_size: int = common.memory_size(128)
    sequence_length: int = common.sequence_length(
        40, help="Steps of each sampled sequence, burn_in included; batch_size then counts sequences."
    )
    burn_in: int = common.burn_in(8)
    activation: common.Activation = common.activation("relu")
    kernel_init: common.KernelInit = common.kernel_init("lecun_normal")
    compute_dtype: common.Dtype = common.compute_dtype("float32")

    def sequence(self) -> int | None:
        """Return the length of the training sequences; None without a memory."""
        return None if self.memory == "none" else self.sequence_length

    def first_learning(self, num_envs: int) -> int:
        """Return the environment steps before the first gradient step: enough for a transition or a sequence."""
        rows = 1 if self.memory == "none" else self.sequence_length
        return max(self.learning_starts, (self.n_step + rows) * num_envs)

    def gradient_rows(self, num_envs: int) -> int:
        """Return the rows in a gradient step, burn-in included."""
        return self.batch_size * (self.sequence() or 1)

    def sequence_period(self, rollout_length: int) -> int:
        """Return the rows between the starts of two sequences: whole rollouts, one without a memory.

        These are about half a sequence, and at most the steps that it has after its burn-in, if one rollout fits there:
        then every row is learned from.
        """
        if self.memory == "none":
            return rollout_length
        half, num_learned = self.sequence_length // 2, self.sequence_length - self.burn_in
        return max(1, min(-(-half // rollout_length), num_learned // rollout_length)) * rollout_length

    def unused(self) -> tuple[common.Unused, ...]:
        """Return options that other options may disable."""
        return (
            ("munchausen_alpha", self.munchausen and self.munchausen_clip == 0, "munchausen_clip is 0"),
            ("munchausen_clip", self.munchausen and self.munchausen_alpha == 0, "munchausen_alpha is 0"),
            *common.unused_priorities(self),
            *common.unused_epsilon(self),
            *common.unused_layers(self),
        )

    def warnings(self, num_envs: int) -> tuple[str, ...]:
        """Return warnings about combinations of options that are probably mistakes."""
        return common.warn_of_targets(self, num_envs)
