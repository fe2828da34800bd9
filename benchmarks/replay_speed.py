"""Measure replay buffers in turn in one process: jaxrl_fast, a ring of full observations, and flashbax.

    python benchmarks/replay_speed.py

Each contender is filled with the same rows. Then it alternates between adding one row of every environment and drawing
batches, inside one compiled loop that owns its buffers. Every byte drawn is read, by summing it. `samples_per_s` counts
transitions drawn, with both observations. `bytes` is the size of the filled buffer on the device. "pairs" keeps obs and
next_obs of each transition, as most programs do. New priorities are computed from the drawn ones.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import side_by_side
from jax import ShapeDtypeStruct

from jaxrl_fast.replay import ring as replay_ring
from jaxrl_fast.replay import sum_tree
from jaxrl_fast.types import Discrete, Transition
from jaxrl_fast.utils import devices

devices.configure_cpu_devices(1)

BATCH, DRAWS_PER_ROW, GAMMA, EXPONENT, TRIAL = 32, 4, 0.99, 0.6, 400


class Contender(NamedTuple):
    """A buffer as three functions of its state."""

    state: Any
    add: Callable[[Any, Any], Any]  # one row of all environments
    draw: Callable[[Any, jax.Array], tuple[Any, Any]]  # a sample, and the state after it


class Case(NamedTuple):
    """The transitions to be stored."""

    name: str
    obs: ShapeDtypeStruct  # of one environment
    frame_stack: int
    capacity: int
    num_envs: int


CASES = (
    Case("84x84x4 frames", ShapeDtypeStruct((84, 84, 4), jnp.uint8), 4, 50_000, 8),
    Case("10x10x4 board", ShapeDtypeStruct((10, 10, 4), bool), 0, 1_000_000, 64),
    Case("vector of 4", ShapeDtypeStruct((4,), jnp.float32), 0, 1_000_000, 64),
)


def make_jaxrl_fast(case: Case, prioritized: bool) -> Contender:
    """Return the contender of jaxrl_fast: its ring, with its sum tree if prioritized."""
    layout = replay_ring.ReplayConfig(case.capacity // case.num_envs, case.num_envs, frame_stack=case.frame_stack)
    ring = replay_ring.init(layout, case.obs, Discrete(4))
    tree = sum_tree.init(layout.num_rows * layout.num_envs) if prioritized else ()

    def add(state, row):
        ring, tree = state
        ring = replay_ring.add(layout, ring, jax.tree.map(lambda x: x[None], row))
        if prioritized:
            written = ((ring.head - 2) % layout.num_rows) * layout.num_envs + jnp.arange(layout.num_envs)
            tree = sum_tree.update(tree, written, jnp.ones(layout.num_envs))
        return ring, tree

    def draw(state, key):
        ring, tree = state
        if not prioritized:
            row, env, _ = replay_ring.draw(layout, ring, key, BATCH)
            return state, replay_ring.read(layout, ring, row, env, GAMMA)
        item, priority = sum_tree.draw(tree, key, BATCH)
        sample = replay_ring.read(layout, ring, item // layout.num_envs, item % layout.num_envs, GAMMA)
        return (ring, sum_tree.update(tree, item, new_priorities(priority))), sample

    return Contender((ring, tree), add, draw)


def pairs(case: Case) -> Contender:
    """Return the contender that keeps full observations in a ring, as most programs do."""
    num_rows = case.capacity // case.num_envs
    zeros = lambda shape, dtype: jnp.zeros((num_rows, case.num_envs, *shape), dtype)
    rows = {
        "obs": zeros(case.obs.shape, case.obs.dtype),
        "action": zeros((), jnp.int32),
        "reward": zeros((), jnp.float32),
        "discount": zeros((), jnp.float32),
        "next_obs": zeros(case.obs.shape, case.obs.dtype),
    }

    def add(state, row):
        rows, head, size = state
        new = {"obs": row.obs, "action": row.action, "reward": row.reward, "discount": row.discount}
        new["next_obs"] = row.obs
        rows = {k: x.at[head].set(new[k]) for k, x in rows.items()}
        return rows, (head + 1) % num_rows, jnp.minimum(size + 1, num_rows)

    def draw(state, key):
        rows, _, size = state
        key_row, key_env = jax.random.split(key)
        row = jax.random.randint(key_row, (BATCH,), 0, jnp.maximum(size, 1))
        env = jax.random.randint(key_env, (BATCH,), 0, case.num_envs)
        return state, jax.tree.map(lambda x: x[row, env], rows)

    return Contender((rows, jnp.int32(0), jnp.int32(0)), add, draw)


def make_flashbax(case: Case, prioritized: bool) -> Contender:
    """Return a flat buffer of flashbax, which keeps each (whole) observation once."""
    import flashbax

    sizes = dict(max_length=case.capacity, min_length=1, sample_batch_size=BATCH, add_batch_size=case.num_envs)
    if prioritized:
        buffer = flashbax.make_prioritized_flat_buffer(
            **sizes, priority_exponent=EXPONENT, device=jax.default_backend()
        )
    else:
        buffer = flashbax.make_flat_buffer(**sizes)
    one = {
        "obs": jnp.zeros(case.obs.shape, case.obs.dtype),
        "action": jnp.int32(0),
        "reward": jnp.float32(0),
        "discount": jnp.float32(0),
    }

    def add(state, row):
        return buffer.add(state, {k: getattr(row, k) for k in one})

    def draw(state, key):
        sample = buffer.sample(state, key)
        if prioritized:
            state = buffer.set_priorities(state, sample.indices, new_priorities(sample.probabilities))
        first, second = sample.experience.first, sample.experience.second
        return state, (first, second["obs"])

    return Contender(buffer.init(one), add, draw)


def new_priorities(priority: jax.Array) -> jax.Array:
    """Return priorities that differ from these."""
    return 0.1 + (priority * 7919) % 1


def row_of(case: Case, i: jax.Array) -> Transition:
    """Return a row of all environments whose bytes depend on i. It is cheap to make."""
    value = (i % 2 == 0) if case.obs.dtype == bool else i
    obs = jnp.full((case.num_envs, *case.obs.shape), value).astype(case.obs.dtype)
    each = jnp.arange(case.num_envs)
    return Transition(
        obs=obs,
        action=each % 4,
        reward=each + i.astype(jnp.float32),
        discount=jnp.ones(case.num_envs),
        last=jnp.zeros(case.num_envs, bool),
        valid=jnp.ones(case.num_envs, bool),
        extras=(),
    )


def fill(case: Case, contender: Contender) -> Any:
    """Write all rows of the ring once. Return the state."""
    body = lambda i, state: contender.add(state, row_of(case, i))
    loop = jax.jit(
        lambda state: jax.lax.fori_loop(0, case.capacity // case.num_envs + 1, body, state), donate_argnums=0
    )
    return jax.block_until_ready(loop(contender.state))


def work(case: Case, contender: Contender, num_draws: int) -> Any:
    """Return a jitted loop of `num_draws` draws, which sums everything it draws."""

    def one(carry, key):
        state, total = carry
        state, sample = contender.draw(state, key)
        return (state, total + sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(sample))), None

    def step(i, carry):
        state, total, key = carry
        state = contender.add(state, row_of(case, i))
        key, key_draws = jax.random.split(key)
        (state, total), _ = jax.lax.scan(one, (state, total), jax.random.split(key_draws, DRAWS_PER_ROW))
        return state, total, key

    def run(state, key):
        state, total, _ = jax.lax.fori_loop(0, num_draws // DRAWS_PER_ROW, step, (state, jnp.float32(0), key))
        return state, total

    return jax.jit(run, donate_argnums=0)


def measure(case: Case, contenders: dict[str, Callable[[], Contender]], rounds: int, seconds: float) -> list[dict]:
    """Return a line for each contender. Each round times all of them in turn."""
    states, loops, counts, sizes = {}, {}, {}, {}
    for name, make in contenders.items():
        contender = make()
        sizes[name] = sum(x.nbytes for x in jax.tree.leaves(contender.state))
        state, trial_s = timed(compiled(work(case, contender, TRIAL), contender.state), fill(case, contender))
        counts[name] = max(DRAWS_PER_ROW, int(TRIAL * seconds / trial_s) // DRAWS_PER_ROW * DRAWS_PER_ROW)
        loops[name] = compiled(work(case, contender, counts[name]), state)
        states[name], _ = timed(loops[name], state)
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, loop in loops.items():
            states[name], elapsed = timed(loop, states[name])
            speeds[name].append(counts[name] * BATCH / elapsed)
    return [
        {
            "case": case.name,
            "capacity": case.capacity,
            "num_envs": case.num_envs,
            "batch_size": BATCH,
            "buffer": name,
            "samples_per_s": round(statistics.median(speeds[name])),
            "bytes": sizes[name],
        }
        for name in contenders
    ]


def compiled(loop: Any, state: Any) -> Callable:
    """Compile a loop ahead of time, for states like this one."""
    like = jax.tree.map(lambda x: ShapeDtypeStruct(x.shape, x.dtype), state)
    return loop.lower(like, jax.random.key(0)).compile()


def timed(loop: Callable, state: Any) -> tuple[Any, float]:
    """Run a loop. Return the state after it, and the seconds."""
    start = time.perf_counter()
    state, total = jax.block_until_ready(loop(state, jax.random.key(1)))
    elapsed = time.perf_counter() - start
    assert jnp.isfinite(total)
    return state, elapsed


def main() -> None:
    """Measure all contenders, print a line for each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="intended length of one timed loop")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    report = side_by_side.Report("replay_speed", args.output)
    with_flashbax = importlib.util.find_spec("flashbax") is not None
    if not with_flashbax:
        report.put("left_out", {"flashbax": "it is not installed here"})
    for case in CASES:
        uniform = {
            "ours": lambda case=case: make_jaxrl_fast(case, False),
            "pairs": lambda case=case: pairs(case),
            "flashbax flat": lambda case=case: make_flashbax(case, False),
        }
        prioritized = {
            "ours, prioritized": lambda case=case: make_jaxrl_fast(case, True),
            "flashbax prioritized flat": lambda case=case: make_flashbax(case, True),
        }
        for contenders in (uniform, prioritized):
            contenders = {name: make for name, make in contenders.items() if with_flashbax or "flashbax" not in name}
            for line in measure(case, contenders, args.rounds, args.seconds):
                report.add("cases", line)
    print(f"written to {report.path}")


if __name__ == "__main__":
    main()
