"""Measure the gain of `--host.async-pools` and `--host.overlap` where emulators do not use the cores that learn.

    python benchmarks/waiting.py

A stand-in replaces the emulator: 32 small environments that answer 10 ms after they receive their actions. They only
wait, as if they were stepped by other cores. PPO makes 64 steps with each, and 32 gradient steps, which take two cores
about two thirds as long. Several rounds time three variants in turn. The JSON has the median milliseconds per update:

    waits       as with `--async-pools 0`
    in_flight   as with `--async-pools 1`
    overlaps    as with `--async-pools 1 --overlap`
    emulator    time of the emulator alone, a lower bound
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import side_by_side
from jax.experimental import io_callback

from jaxrl_fast import envs, loop
from jaxrl_fast.agents import ppo
from jaxrl_fast.options.declare import configure
from jaxrl_fast.types import Env
from jaxrl_fast.types.host import AsyncPools, HostEnv

ANSWER_S = 0.01
CONFIG = configure(ppo.Config, rollout_length=64, num_minibatches=4, num_epochs=8, hidden_sizes=(512, 512))


def main():
    """Measure all variants, print the case, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("waiting", args.output)
    ways = {"waits": Waiting(), "in_flight": Waiting(in_flight=True), "overlaps": Waiting(in_flight=True, overlap=True)}
    rounds = [{name: way.update() for name, way in ways.items()} for _ in range(args.rounds + 1)][1:]
    found = {name: statistics.median(times[name] for times in rounds) for name in ways}
    found["emulator"] = ANSWER_S * CONFIG.rollout_length
    report.put("ms_per_update", {name: round(1e3 * seconds) for name, seconds in found.items()})
    print(f"written to {report.path}")


class Waiting:
    """A training with one way to wait for the emulator."""

    def __init__(self, in_flight: bool = False, overlap: bool = False):
        env = delay_answers(envs.make("CartPole-v1", 32), in_flight, overlap)
        agent = ppo.make(CONFIG, env.spec, 1000)
        self.state = jax.jit(lambda key: loop.init(env, agent, key))(jax.random.key(0))
        self.train = jax.jit(lambda state: loop.train(env, agent, state, 1)[0], donate_argnums=0)

    def update(self) -> float:
        """Make one update and return the seconds."""
        jax.block_until_ready(self.state)
        began = time.perf_counter()
        self.state = jax.block_until_ready(self.train(self.state))
        return time.perf_counter() - began


def delay_answers(env: Env, in_flight: bool, overlap: bool) -> Env:
    """Return the environments behind an emulator that answers after ANSWER_S.

    The new state holds the environments' state, a handle and the last actions.
    """
    due = [0.0]

    def sent(handle, action):
        due[0] = time.perf_counter() + ANSWER_S
        return handle, action

    def answered(handle, action):
        time.sleep(max(due[0] - time.perf_counter(), 0.0))
        return handle, action

    like = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((env.spec.num_envs,), jnp.int32)
    call = lambda function, *under_way: io_callback(function, like, *under_way)

    def reset(key):
        state, timestep = env.reset(key)
        return (state, (jnp.int32(0), jnp.zeros(env.spec.num_envs, jnp.int32))), timestep

    def send(pool, state, action):
        return state[0], call(sent, state[1][0], action)

    def receive(pool, state):
        handle, action = call(answered, *state[1])
        state, timestep = env.step(state[0], action)
        return (state, (handle, action)), timestep

    step = lambda state, action: receive(0, send(0, state, action))
    return env._replace(
        reset=reset, step=step, host=HostEnv(pools=AsyncPools(1, send, receive, overlap) if in_flight else None)
    )


if __name__ == "__main__":
    main()
