"""Test build: how environments are sharded, and the parallelism that an algorithm receives."""

from types import SimpleNamespace

import pytest

from jaxrl_fast.agents import ppo
from jaxrl_fast.config import load
from jaxrl_fast.training import build
from jaxrl_fast.types import Parallelism

LINE = "ppo --env CartPole-v1 --num-envs 1024"  # enough work for several devices


def algorithm(supports=None):
    """Return PPO under another name; it records the arguments of `make` after the first three."""
    given = []

    def make(config, spec, num_updates, *more):
        given.append(more)
        return ppo.make(config, spec, num_updates, *more)

    declared = {} if supports is None else {"SUPPORTS": frozenset(supports)}
    return SimpleNamespace(__name__="mine", make=make, given=given, **declared)


def built(algorithm, *more):
    """Return the environment and the placement."""
    return build.build(load.from_command_line([*LINE.split(), *more]), algorithm, num_updates=2)[1::2]


def test_make_agent_gets_parallelism_if_supported():
    env, placement = built(mine := algorithm({"shards"}))
    assert placement.num_shards > 1 and env.parallelism == Parallelism(placement.axis_name, placement.num_shards)
    assert env.spec.num_envs * placement.num_shards == 1024
    assert mine.given == [(env.parallelism,)]


def test_build_does_not_shard_an_unsupported_algorithm():
    """Each shard would otherwise learn separate parameters."""
    env, placement = built(mine := algorithm())
    assert (placement.num_shards, env.parallelism, env.spec.num_envs) == (1, Parallelism(), 1024)
    assert mine.given == [()]
    with pytest.raises(ValueError, match=r"^devices: ppo must declare SUPPORTS = \{\"shards\"\}, got 2; use 1$"):
        built(mine, "--devices", "2")


@pytest.mark.parametrize("line", ["ppo --num-envs 1024", "ppo --num-envs 8 --devices 1", "dqn --num-envs 8"])
def test_validate_plan_builds_environments_and_agent_once(line, monkeypatch):
    """Check shards, one device and gradient workers; training and evaluation share what is built."""
    from jaxrl_fast import agents
    from jaxrl_fast.envs.gymnax import adapter
    from jaxrl_fast.training import plan

    settings = load.from_command_line([*line.split(), "--env", "CartPole-v1", "--total-steps", "200k"])
    algorithm, calls = agents.load(settings.algo), []
    traced, make = adapter.traced, algorithm.make
    monkeypatch.setattr(adapter, "traced", lambda *given: (calls.append("env"), traced(*given))[1])
    monkeypatch.setattr(algorithm, "make", lambda *given: (calls.append("agent"), make(*given))[1])
    plan.validate_plan(settings)
    assert sorted(calls) == ["agent", "env"]
