"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2016), as a setting of TD3."""

from jaxrl_fast.agents.td3 import SUPPORTS, make
from jaxrl_fast.options.td3 import DDPG as Config

__all__ = ["SUPPORTS", "Config", "make"]
