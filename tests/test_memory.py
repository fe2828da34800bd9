"""memory: what a run says that it needs is what it takes, and the capacity it proposes is the largest that fits."""

import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_fast import agents, config, envs, loop, memory

SMALL = dict(capacity=4096, learning_starts=64)


def both(algo, **agent):
    settings = config.from_keywords(algo=algo, agent=agent)
    env = envs.make("CartPole-v1", 8)
    return env, agents.load(algo).make(settings.agent, env.spec, 10)


@pytest.mark.parametrize("num_seeds", [1, 3])
@pytest.mark.parametrize(("algo", "options"), [("ppo", {}), ("dqn", SMALL), ("dqn", SMALL | dict(prioritised=True))])
def test_what_it_says_is_what_it_takes(algo, options, num_seeds):
    """All but the key and the counter of updates, 12 bytes."""
    env, agent = both(algo, **options)
    said = memory.need(env, agent, num_seeds)
    state = jax.eval_shape(lambda: loop.init(env, agent, jax.random.key(0)))
    kept = jax.tree.leaves((state.agent, state.actors))
    kept = [
        jax.eval_shape(jax.random.key_data, x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in kept
    ]
    assert said.parameters + said.replay + said.environments == num_seeds * sum(x.size * x.dtype.itemsize for x in kept)
    assert said.total == said.copies * (said.parameters + said.replay + said.environments)
    assert (said.replay > 0) == (algo == "dqn") and said.parameters > 0 and said.environments > 0
    assert said.free is None or said.free > 0


def test_a_million_frames_take_a_byte_a_pixel():
    """1,000,000 x 84 x 84 bytes, with 15 beside each: age, action, reward, discount, last, valid."""
    from jaxrl_fast import replay
    from jaxrl_fast.types import Discrete

    obs = jax.ShapeDtypeStruct((84, 84, 4), "uint8")
    ring = jax.eval_shape(lambda: replay.init(replay.Layout(125_000, 8, frame_stack=4), obs, Discrete(4)))
    assert memory.size(ring) == 10**6 * (84 * 84 + 15) + 8
    assert memory.readable(memory.size(ring)) == "7.1 GB"


@given(
    parameters=st.integers(0, 10**6),
    replay=st.integers(10**6, 10**9),
    environments=st.integers(0, 10**6),
    free=st.integers(10**6, 10**9),
    copies=st.sampled_from([1, 2]),
    capacity=st.integers(10, 10**6),
)
def test_the_capacity_that_is_proposed_fits_and_little_more_would(
    parameters, replay, environments, free, copies, capacity
):
    needed = memory.Need(parameters, replay, environments, free, copies)
    try:
        memory.check(needed, capacity)
    except ValueError as error:
        assert needed.total > free
        proposed = re.search(r"the largest capacity that fits is (\d+)$", str(error))
        if proposed is None:
            assert copies * (parameters + environments) + copies * replay / capacity > free - 2 * copies
            return
        fits = int(proposed[1])
        size = lambda capacity_: copies * (parameters + environments + replay * capacity_ / capacity)
        assert size(fits) <= free
        assert size(fits + 10 ** max(len(str(fits)) - 2, 0) + 1) > free - 2 * copies
    else:
        assert needed.total <= free


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_000_000, "2.0 MB"), (7_071_000_000, "7.1 GB")]
)
def test_bytes_as_people_read_them(count, said):
    assert memory.readable(count) == said
