"""build: what of its environments' split an algorithm is told, and what it is split into."""

from types import SimpleNamespace

import pytest

from jaxrl_fast.agents import ppo
from jaxrl_fast.config import load
from jaxrl_fast.training import build
from jaxrl_fast.types import Parallelism

LINE = "ppo --env CartPole-v1 --num-envs 1024"  # work enough for several devices


def algorithm(supports=None):
    """PPO under another name, which notes what its `make` is given beside the first three."""
    given = []

    def make(config, spec, num_updates, *more):
        given.append(more)
        return ppo.make(config, spec, num_updates, *more)

    declared = {} if supports is None else {"SUPPORTS": frozenset(supports)}
    return SimpleNamespace(__name__="mine", make=make, given=given, **declared)


def shard_env(algorithm, *more):
    return build.shard_env(load.from_command_line([*LINE.split(), *more]), algorithm, num_updates=2)


def test_make_agent_tells_parallelism_to_who_supports_it():
    env, _, placement = shard_env(mine := algorithm({"shards"}))
    assert placement.num_shards > 1 and env.parallelism == Parallelism(placement.axis_name, placement.num_shards)
    assert env.spec.num_envs * placement.num_shards == 1024
    assert mine.given[0] == (Parallelism(),) and mine.given[-1] == (env.parallelism,)


def test_shard_env_does_not_split_what_does_not_support_it():
    """Each shard would learn parameters of its own."""
    env, _, placement = shard_env(mine := algorithm())
    assert (placement.num_shards, env.parallelism, env.spec.num_envs) == (1, Parallelism(), 1024)
    assert set(mine.given) == {()}
    with pytest.raises(ValueError, match=r"^--devices 2: ppo does not support shards, so it learns on one device$"):
        shard_env(mine, "--devices", "2")
