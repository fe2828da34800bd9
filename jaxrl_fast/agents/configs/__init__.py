"""The hyperparameters of every algorithm and their defaults. Standard library only, so that `--help` is quick.

An algorithm's options are the fields of a frozen dataclass, all with a default, each with its docstring below it, in
CONFIGS or as the `Config` of a module of one's own. `rollout_length` (a number, or "auto") must be among them. What
else is reckoned with, where it is there:

- `gradient_rows(num_envs)`: rows in a gradient step, for how many devices there is work. An algorithm whose module has
  "shards" in SUPPORTS must sum its gradients over `parallelism.axis_name` (`jax.lax.psum`); others learn on one device.
- `network`: one of `networks.KINDS`, or "auto", which decides how much work a row is.
- `capacity`: transitions in a replay; `first_learning(num_envs)`: environment steps before the first gradient step.
- `traced`: names of real numbers that `make` and its functions only calculate with. A sweep over them is one program,
  in which they are JAX's; over others, each value is compiled for.
- `describe(num_envs)`: a sentence for a run's header.

Options that do nothing by themselves are in NEEDS.
"""

from typing import Any

from jaxrl_fast.agents.configs.dqn import DQN
from jaxrl_fast.agents.configs.ppo import PPO
from jaxrl_fast.agents.configs.pqn import PQN

CONFIGS = {"ppo": PPO, "dqn": DQN, "pqn": PQN}
# Options that do nothing unless another has one of these values. A name means the same in every algorithm.
NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("priority_exponent", "importance_exponent"), ("prioritized", (True,))),
    **dict.fromkeys(("munchausen_alpha", "munchausen_temperature", "munchausen_clip"), ("munchausen", (True,))),
    **dict.fromkeys(("v_min", "v_max"), ("distribution", ("c51",))),
    "num_atoms": ("distribution", ("c51", "quantile")),
    "loss": ("distribution", ("none", "quantile")),
}
CONTINUOUS = ("squash", "log_std_init")  # do nothing where actions are discrete
