"""Declare every option and its default. Only the standard library is imported, so that `--help` is fast.

An algorithm's options are the fields of a frozen dataclass: one of ALGORITHMS, or the `Config` of a custom module. A
field is an option (`declare.option`) or holds one of several parts (`declare.choice`), each with separate options.
Every field has a default. `rollout_length` (a number, or "auto") is required. `algorithm.Algorithm` lists what a run
asks of these records; the record of a custom algorithm may define any of it.

An algorithm whose module has "shards" in SUPPORTS must define `gradient_rows`, and sum gradients over
`parallelism.grad_axis`; others run on one device.
"""

from jaxrl_fast.options.dqn import DQN
from jaxrl_fast.options.ppo import PPO
from jaxrl_fast.options.pqn import PQN
from jaxrl_fast.options.reppo import REPPO
from jaxrl_fast.options.sac import SAC
from jaxrl_fast.options.td3 import DDPG, TD3

ALGORITHMS = {"ppo": PPO, "dqn": DQN, "pqn": PQN, "sac": SAC, "td3": TD3, "ddpg": DDPG, "reppo": REPPO}
