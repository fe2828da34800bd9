"""Define the options of PQN."""

from dataclasses import dataclass
from typing import Any

from jaxrl_fast.agents.configs import common
from jaxrl_fast.utils.option import FRACTION, option


@dataclass(frozen=True)
class PQN(common.OnPolicy):
    """Parallelized Q-network (Gallici et al. 2025).

    The defaults follow CleanRL's classic-control runs, except for the network's widths and the gradient bound. The
    gradient bound differs because CleanRL's loss is twice as large.
    """

    rollout_length: int = common.rollout(128)
    num_minibatches: int = common.num_minibatches(4)
    num_epochs: int = common.num_epochs(4)
    learning_rate: float = common.learning_rate(2.5e-4)
    anneal_lr: bool = common.anneal_lr(True)
    adam_epsilon: float = common.adam_epsilon(1e-8)
    max_grad_norm: float = common.max_grad_norm(10.0)
    gamma: float = common.gamma(0.99)
    q_lambda: float = option(0.65, "Lambda of Peng's Q(lambda) returns.", bounds=FRACTION, traced=True)
    epsilon_start: float = common.epsilon_start(1.0)
    epsilon_end: float = common.epsilon_end(0.05)
    epsilon_steps: int = common.epsilon_steps(250_000)
    apex_alpha: float = common.apex_alpha(0.0)
    layer_norm: bool = common.layer_norm(True)
    clip_rewards: bool | None = common.clip_rewards(None)
    network: common.Network = common.network("auto")
    network_options: dict[str, Any] = common.network_options({})
    observations: common.Observations = common.observations("auto")
    hidden_sizes: tuple[int, ...] = common.hidden_sizes(())
    memory: common.Memory = common.memory("none")
    memory_size: int = common.memory_size(128)
    sequence_length: int | None = common.sequence_length(None)
    burn_in: int = common.burn_in(0)
    activation: common.Activation = common.activation("relu")
    kernel_init: common.KernelInit = common.kernel_init("orthogonal")
    compute_dtype: common.Dtype = common.compute_dtype("float32")

    def unused(self) -> tuple[common.Unused, ...]:
        """Return options that other options may disable."""
        return *common.unused_epsilon(self), *common.unused_layers(self)
