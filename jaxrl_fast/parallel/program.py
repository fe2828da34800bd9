"""Compile the functions of a run, `init`, `chunk` and `restart`, for all members, on one device or several.

The number of updates of a chunk is an argument. So one program serves any length, and the host may choose lengths by
the clock. The parameters after 100 updates do not depend on the division into chunks.

Each member has its own seed, and may have its own hyperparameters (`population.Varied`). Both are arguments of the
program, and the agent is made from the hyperparameters while the program is traced. Members that differ only in their
seeds are called seeds.

Environments may be split into shards. Each shard acts and computes gradients separately, and every gradient step uses
the sum over all shards. On several devices, a single seed, or each of several sequential seeds, has a shard on every
device. Seeds that advance together are assigned to devices whole, each with all its shards (`Placement`). The algorithm
is the same in each case.

If there is too little work for shards, a CPU's cores may be gradient workers of a single seed. Each worker has the
whole state and repeats all work, except that it computes each gradient step on its part of the rows only.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast import async_rollout, loop
from jaxrl_fast.kernels import rows as packing
from jaxrl_fast.parallel import arrays, partition
from jaxrl_fast.parallel.partition import PartitionedFns, Values
from jaxrl_fast.parallel.placement import SINGLE_DEVICE, Placement
from jaxrl_fast.parallel.population import Varied
from jaxrl_fast.types import Agent, Array, Env, Metrics, PyTree
from jaxrl_fast.utils.memory import nbytes
from jaxrl_fast.utils.random import key_of_seed
from jaxrl_fast.utils.signals import interruptible

NONFINITE_KEY = "parameters_not_finite"  # [capacity] bool among the metrics: at the end of the chunk
RESET_FOLD = 1_000_003  # folded into a state's key when all environments are reset
MAX_KEPT = 2**28  # bytes of a state that is kept during a chunk that may fail
MAX_ROWS = 2**14  # rows of metrics in a chunk, over all seeds

Make = Callable[[Values], Agent]


class Program(NamedTuple):
    """The functions that the host calls. With several seeds, states have a seed axis; a shard axis follows.

    The seed axis of states and metrics may be padded with further seeds at its end (`Placement.num_padded_seeds`). The
    arguments of `init` and `shard_state`, the result of `learner`, and `state_spec` are not padded.
    """

    init: Callable[[np.ndarray], loop.TrainState]  # seeds [S] or one
    chunk: Callable[[loop.TrainState, np.ndarray], tuple[loop.TrainState, Metrics]]  # metrics [S, capacity]; no S if 1
    learner: Callable[[loop.TrainState], PyTree]  # the part that acting requires, [S, ...] or one, without shards
    shard_state: Callable[[loop.TrainState], loop.TrainState]  # move a state from the host to the devices of `chunk`
    restart: Callable[
        [loop.TrainState], loop.TrainState
    ]  # the same state with all environments reset; compiled on first use
    state_spec: loop.TrainState  # shapes and dtypes of a state
    capacity: int  # the most updates of one chunk
    compile_time_s: float
    memory: int  # bytes on each device while training, temporary arrays included
    keeps_state: bool  # `chunk` leaves its argument valid, so that a failed chunk loses nothing before it
    compiled: "Compiled"  # the same functions with the members' hyperparameters as arguments


class Compiled(NamedTuple):
    """The compiled functions of a program, which do not depend on the values of hyperparameters that members have."""

    init: Callable[..., loop.TrainState]
    chunk: Any
    restart: Callable[..., loop.TrainState]
    learners: Callable[[PyTree], PyTree]
    state: loop.TrainState  # shapes and dtypes, padded
    keeps_state: bool


def build(
    env: Env,
    agent: Agent,
    num_updates: int,
    placement: Placement = SINGLE_DEVICE,
    varied: Varied | None = None,
    compiled: Compiled | None = None,
) -> Program:
    """Compile `init` and `chunk` ahead of time; `restart` and `learner` are compiled on their first use.

    With several shards, `env` is one shard, and its `parallelism` has the placement's axis_name. `varied` has the
    hyperparameters of each seed. Its data are arguments of `chunk` too, which are whole on every device. `compiled` are
    the functions of an earlier program that differs in these values only; its environments are on the device.
    """
    start = time.perf_counter()
    num_seeds, num_padded_seeds = placement.num_seeds, placement.num_padded_seeds
    capacity = capacity_of(num_updates, num_seeds)
    values, make, data = varied or Varied({}, lambda _: agent)
    fill = lambda x: x[np.minimum(np.arange(num_padded_seeds), num_seeds - 1)] if num_padded_seeds > num_seeds else x
    spread = partitioned(env, make, capacity, placement)
    values = jax.tree.map(lambda x: arrays.put(fill(x), spread.seeds), values)
    data = jax.tree.map(lambda x: arrays.put(x, spread.limit), dict(data))
    found = compiled or _compile(env, agent, spread, placement, values, data)
    return Program(
        init=lambda seeds: found.init(arrays.put(fill(seeds), spread.seeds), values),
        chunk=lambda state, num_updates: found.chunk(state, values, (arrays.put(num_updates, spread.limit), data)),
        learner=lambda state: found.learners(agent.policy_state(state.agent)),
        shard_state=partial(jax.tree.map, lambda x: arrays.put(fill(x), spread.state)),
        restart=lambda state: found.restart(state, values),
        state_spec=_of_seeds(found.state, placement),
        capacity=capacity,
        compile_time_s=time.perf_counter() - start,
        memory=most_bytes(found.chunk),
        keeps_state=found.keeps_state,
        compiled=found,
    )


def _compile(
    env: Env, agent: Agent, spread: PartitionedFns, placement: Placement, values: Mapping[str, Array], data: PyTree
) -> Compiled:
    """Compile the functions of a program for hyperparameters and data of these shapes."""
    seeds, limit = _seeds(placement.num_padded_seeds), jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(spread.init, seeds, values)
    init = jax.jit(spread.init, in_shardings=(spread.seeds, spread.seeds), out_shardings=spread.state)
    compiled_init = interruptible(init.lower(seeds, values).compile)
    # An earlier state is useless if a part of it lies on the host, since that part has changed.
    keeps_state = not env.on_device and not agent.learning.resources and nbytes(state) <= MAX_KEPT
    advance = jax.jit(
        spread.advance,
        in_shardings=(spread.state, spread.seeds, spread.limit),
        out_shardings=(spread.state, spread.metrics),
        donate_argnums=() if keeps_state else 0,
    )
    compiled_chunk = interruptible(advance.lower(state, values, (limit, data)).compile)
    restart = jax.jit(
        spread.restart, in_shardings=(spread.state, spread.seeds), out_shardings=spread.state, donate_argnums=0
    )
    return Compiled(compiled_init, compiled_chunk, restart, partition.learners(placement), state, keeps_state)


def lower(
    env: Env, agent: Agent, num_updates: int, placement: Placement = SINGLE_DEVICE, varied: Varied | None = None
) -> jax.stages.Lowered:
    """Return `chunk` as `build` compiles it, for devices that may belong to another machine (`utils.target`).

    Members may differ in their seeds only.
    """
    _, make, data = varied or Varied({}, lambda _: agent)
    capacity = capacity_of(num_updates, placement.num_seeds)
    spread, seeds = partitioned(env, make, capacity, placement), _seeds(placement.num_padded_seeds)
    values: Values = {}
    shared = jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: dict(data))
    arguments = jax.eval_shape(spread.init, seeds, values), values, shared
    shardings = (spread.state, spread.seeds, spread.limit), (spread.state, spread.metrics)
    advance = jax.jit(spread.advance, in_shardings=shardings[0], out_shardings=shardings[1], donate_argnums=0)
    return advance.lower(*arguments)


def capacity_of(num_updates: int, num_seeds: int) -> int:
    """Return the most updates of one chunk."""
    return min(num_updates, max(MAX_ROWS // num_seeds, 64))


def shapes(
    env: Env, agent: Agent, placement: Placement = SINGLE_DEVICE, varied: Varied | None = None
) -> loop.TrainState:
    """Return shapes and dtypes of a state of the program with the same arguments. Nothing is compiled."""
    values, make, _ = varied or Varied({}, lambda _: agent)
    num_padded_seeds = placement.num_padded_seeds
    init = partitioned(async_rollout.on_paper(env), make, 1, placement).init
    values = {name: jax.ShapeDtypeStruct((num_padded_seeds,), x.dtype) for name, x in values.items()}
    state: loop.TrainState = _of_seeds(jax.eval_shape(init, _seeds(num_padded_seeds), values), placement)
    return state


def shapes_of_update(env: Env, agent: Agent) -> tuple[PyTree, Any]:
    """Return shapes and dtypes of an agent's state, and of the result of an update. Nothing is compiled."""
    key = key_of_seed(0)

    def run(env: Env) -> tuple[PyTree, Any]:
        state = loop.init(env, agent, key)
        rollout = loop.act(env, agent, state.agent, state.actors, key)[1]
        return state.agent, agent.update(state.agent, rollout, key)

    shapes: tuple[PyTree, Any] = abstract(env, run)
    if env.parallelism.axis_name is None:
        return shapes
    one_shard: tuple[PyTree, Any] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)
    return one_shard


def abstract(env: Env, function: Callable[[Env], PyTree]) -> PyTree:
    """Return shapes and dtypes of a function's result, given an environment: [num_shards, ...] if it is sharded."""
    env, (axis_name, num_shards, *_) = async_rollout.on_paper(env), env.parallelism
    if axis_name is None:
        return jax.eval_shape(lambda: function(env))
    return jax.eval_shape(jax.vmap(lambda _: function(env), axis_name=axis_name), jnp.arange(num_shards))


def partitioned(env: Env, make: Make, capacity: int, placement: Placement) -> PartitionedFns:
    """Return `begin`, `chunk` and `restart_envs` over all seeds and shards."""
    return partition.partition(
        partial(begin, env, make), partial(chunk, env, make, capacity), partial(restart_envs, env, make), placement
    )


def begin(env: Env, make: Make, seed: Array, values: Values) -> loop.TrainState:
    """Return the state before training, from a seed [] and a member's hyperparameters."""
    return loop.init(env, make(values), key_of_seed(seed))


def restart_envs(env: Env, make: Make, state: loop.TrainState, values: Values) -> loop.TrainState:
    """Return the state with all environments reset, since checkpoints do not store the state of host environments."""
    agent = make(values)
    if state.rollout:  # the agent learns from it before it learns from the new episodes
        state = state._replace(rollout=loop.cut(state.rollout))
    else:
        state = state._replace(agent=agent.learning.on_env_restart(state.agent))
    key = loop.key_of_shard(env, jax.random.fold_in(state.key, RESET_FOLD))
    return state._replace(actors=loop.restart_envs(env, agent, state.agent, key))


def chunk(
    env: Env,
    make: Make,
    capacity: int,
    state: loop.TrainState,
    values: Values,
    shared: tuple[Array, Mapping[str, PyTree]],
) -> tuple[loop.TrainState, Metrics]:
    """Make some updates. Return the state and metrics [capacity], 0 beyond the first rows, one for each update.

    The same for all members are the number of updates and the data that agents learn from, by name. NONFINITE_KEY is
    added to the metrics, with the same value in all rows.
    """
    num_updates, data = shared
    agent = make({**values, **data})
    train_once = jax.jit(partial(loop.train_once, env, agent), inline=True)  # so that it is traced once

    def body(i: Array, carry: Any) -> Any:
        state, rows = carry
        state, row = train_once(state)
        put = lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, x, i, axis=0)
        return state, jax.tree.map(put, rows, packing.pack(row))

    _, like = jax.eval_shape(train_once, state)
    rows = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), jax.eval_shape(packing.pack, like))
    state, rows = jax.lax.fori_loop(0, num_updates, body, (state, rows))
    return state, {
        **loop.combine_shards(env, *packing.unpack(rows, like)),
        NONFINITE_KEY: jnp.full(capacity, ~_is_finite(agent.parameters(state.agent))),
    }


def _is_finite(parameters: PyTree) -> Array:
    """Return whether all parameters are finite, bool []."""
    floats = [x for x in jax.tree.leaves(parameters) if jnp.issubdtype(x.dtype, jnp.floating)]
    are_finite: Array = jnp.bool_(True)
    if floats:  # an array without elements would be a constant, see _shard_map
        are_finite = jnp.array([jnp.isfinite(x).all() for x in floats]).all()
    return are_finite


def most_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes that a program needs on each device, as the compiler reports them; 0 without a report.

    Results that reuse the memory of arguments are counted once.
    """
    memory = compiled.memory_analysis()
    if not memory:
        return 0
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes
    return int(sum(sizes) - memory.alias_size_in_bytes)


def _seeds(num_seeds: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_seeds,) if num_seeds > 1 else (), jnp.int32)


def _of_seeds(like: PyTree, placement: Placement) -> PyTree:
    """Return shapes without the padding of the seed axis."""
    if placement.num_padded_seeds == placement.num_seeds:
        return like
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((placement.num_seeds, *x.shape[1:]), x.dtype), like)
