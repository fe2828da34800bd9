"""Options of DQN and its extensions."""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from jaxrl_fast.agents.configs import common
from jaxrl_fast.utils.option import COUNT, FRACTION, MAX_STEPS, NON_NEGATIVE, POSITIVE, Bounds, option

_munchausen = partial(option, needs=("munchausen", True), traced=True)
_prioritized = partial(option, bounds=FRACTION, needs=("prioritized", True), traced=True)
_c51 = partial(option, needs=("value_head", "c51"))


@dataclass(frozen=True)
class DQN:
    """Deep Q-learning (Mnih et al. 2015) with the extensions of Rainbow (Hessel et al. 2018) and others as switches.

    The defaults are those of CleanRL's classic-control runs, except for the gradient bound, a larger replay buffer and
    the network's widths.
    """

    rollout_length: int | Literal["auto"] = common.rollout(
        "auto", help="Environment steps per update in each environment; auto: at most 32 in all, at least one each."
    )
    buffer_size: int = option(
        100_000,
        "Transitions in the replay buffer over all environments, rounded down to whole rollouts.",
        bounds=Bounds(1, 2**30),  # indices are int32, and so is the sum of two
    )
    batch_size: int = option(128, "Transitions in a gradient step.", bounds=COUNT)
    replay_ratio: float = option(
        0.1, "Gradient steps per environment step, exact for any number of environments.", bounds=POSITIVE
    )  # not traced: counted as a fraction
    learning_starts: int = option(
        10_000, "Environment steps before the first gradient step.", bounds=Bounds(0, MAX_STEPS)
    )
    target_update_interval: int = option(
        500,
        "Environment steps between target updates; if shorter than one gradient step, update after every gradient "
        "step.",
        bounds=Bounds(1, MAX_STEPS),
    )
    tau: float = option(
        1.0,
        "Step size of a target update: 1 copies the online parameters, less averages.",
        bounds=Bounds(0, 1, exclusive_min=True),
        traced=True,
    )
    learning_rate: float = common.learning_rate(2.5e-4)
    anneal_lr: bool = common.anneal_lr(False)
    adam_epsilon: float = common.adam_epsilon(1e-8)
    max_grad_norm: float = common.max_grad_norm(10.0)
    gamma: float = common.gamma(0.99)
    n_step: int = option(1, "Rewards summed before bootstrapping.", bounds=COUNT)
    loss: Literal["squared", "huber"] = option(
        "squared",
        "Loss of the temporal-difference error. huber regresses on the median: keep rewards near 1.",
        needs=("value_head", "none", "quantile"),
    )
    double: bool = option(False, "Choose the next action by the online parameters (van Hasselt et al. 2016).")
    dueling: bool = option(False, "Separate streams for state value and advantages (Wang et al. 2016).")
    noisy: bool = option(
        False, "Explore by noise in the dense layers (Fortunato et al. 2018); epsilon applies as well."
    )
    value_head: Literal["none", "c51", "quantile"] = option(
        "none",
        "Learn mean returns (none), distributions on fixed atoms (c51, Bellemare et al. 2017) or quantiles (Dabney et "
        "al. 2018).",
    )
    num_atoms: int = option(51, "Atoms or quantiles.", bounds=Bounds(2, 2**16), needs=("value_head", "c51", "quantile"))
    v_min: float = _c51(-10.0, "Lowest return that the atoms represent.")  # not traced: compared with v_max
    v_max: float = _c51(10.0, "Highest return that the atoms represent.")
    munchausen: bool = option(False, "Add the scaled log-policy to the reward (Vieillard et al. 2020).")
    munchausen_alpha: float = _munchausen(0.9, "Scale of the log-policy.", bounds=NON_NEGATIVE)
    munchausen_temperature: float = _munchausen(0.03, "Temperature of the softmax policy.", bounds=POSITIVE)
    munchausen_clip: float = _munchausen(
        -1.0, "Lower bound of temperature times log-policy.", bounds=Bounds(float("-inf"), 0)
    )
    prioritized: bool = option(False, "Draw transitions in proportion to their errors (Schaul et al. 2016).")
    priority_exponent: float = _prioritized(0.5, "Exponent of the errors as priorities.")
    importance_exponent: float = _prioritized(0.4, "Initial exponent of the importance weights; it rises to 1.")
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
    activation: common.Activation = common.activation("relu")
    kernel_init: common.KernelInit = common.kernel_init("lecun_normal")
    compute_dtype: common.Dtype = common.compute_dtype("float32")

    @property
    def ratio(self) -> Fraction:
        """Return the replay ratio as the fraction that its decimal text denotes: 0.1 is 1/10."""
        return common.as_fraction(self.replay_ratio)

    def first_learning(self, num_envs: int) -> int:
        """Return the environment steps before the first gradient step: enough for transitions in the replay buffer."""
        return max(self.learning_starts, (self.n_step + 1) * num_envs)

    def gradient_rows(self, num_envs: int) -> int:
        """Return the rows in a gradient step."""
        return self.batch_size

    def describe(self, num_envs: int) -> str:
        """Return a sentence for the header of a run."""
        return (
            f"{self.replay_ratio:g} gradient steps per environment step, {self.batch_size:,} transitions each, "
            f"from step {self.first_learning(num_envs):,} on"
        )

    def warnings(self, num_envs: int) -> tuple[str, ...]:
        """Return warnings about options that do not go together."""
        steps, interval = common.rollout_length(self, num_envs) * num_envs, self.target_update_interval
        if self.tau < 1 or interval >= steps or self.replay_ratio * steps < 2:
            return ()
        problem = f"the target is copied several times within an update of {steps} steps, got {interval}"
        return (f"--agent.target-update-interval: {problem}; use {steps} or more",)
