"""Declare the options of every algorithm and their defaults.

Only the standard library is imported, so that `--help` is fast.

An algorithm's options are the fields of a frozen dataclass: in CONFIGS, or the `Config` of a custom module. Every field
has a default, and `jaxrl_fast.option` declares its meaning, bounds and needs. `rollout_length` (a number, or "auto") is
required. Optional members:

- `gradient_rows(num_envs)`: rows in a gradient step, from which the number of devices is chosen. An algorithm whose
  module has "shards" in SUPPORTS must sum gradients over `parallelism.grad_axis`; others run on one device.
- `sequence()`: steps that stay together in a gradient step, on one device; None if they may be split.
- `network`: one of `networks.KINDS`, or "auto".
- `buffer_size`: transitions in a replay buffer.
- `first_learning(num_envs)`: environment steps before the first gradient step.
- `describe(num_envs)`: a sentence for the header of a run.
- `warnings(num_envs)`: warnings about combinations of options that are probably mistakes.
- `unused()`: options that other options may disable, as rows of `common.Unused`.
"""

from jaxrl_fast.agents.configs.dqn import DQN
from jaxrl_fast.agents.configs.ppo import PPO
from jaxrl_fast.agents.configs.pqn import PQN
from jaxrl_fast.agents.configs.sac import SAC
from jaxrl_fast.agents.configs.td3 import DDPG, TD3

CONFIGS = {"ppo": PPO, "dqn": DQN, "pqn": PQN, "sac": SAC, "td3": TD3, "ddpg": DDPG}
