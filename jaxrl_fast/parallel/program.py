"""The compiled functions of a run, `init`, `chunk` and perhaps `restart`: over members, on one device or several.

How many updates a chunk makes is an argument, so one program serves any length and the host may choose lengths by
the clock: the parameters after 100 updates are the same bits however they were divided into chunks.

Members have seeds of their own, and perhaps hyperparameters (`members.Varied`): those are arguments of the program, and
the agent is made of them while it is traced. Where only seeds differ they are called seeds.

Environments may be dealt into shards: each acts and computes gradients on its own, and every gradient step takes the
sum of all. On several devices a single seed has a shard on each, and so have seeds that take turns; seeds that advance
together are dealt to the devices whole, their shards side by side (`Placement`). The numbers are those of the same
algorithm either way.

Where there is too little work for that, a CPU's cores may be hands of a single seed: each has the whole state and does
all that there is to do, but of each gradient step only its part of the rows.
"""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_fast import async_rollout, loop
from jaxrl_fast.parallel.placement import SEEDS, SHARDS, SINGLE_DEVICE, Placement
from jaxrl_fast.parallel.population import Varied
from jaxrl_fast.types import Agent, Array, Env, Metrics, PyTree

PARAMETERS = "params"  # in the names of what is to stay finite in an agent's state
NONFINITE_KEY = "parameters_not_finite"  # [capacity] bool beside the metrics: when the chunk was done
RESET_FOLD = 1_000_003  # folded into a state's key, for games that begin anew
MAX_ROWS = 2**14  # of metrics that a chunk can hold, over all seeds

Values = Mapping[str, Array]  # of hyperparameters: [S], or one member's
Make = Callable[[Values], Agent]
Function = Callable[..., Any]


class Program(NamedTuple):
    """What the host runs. States carry a seed axis where there are several seeds, then a shard axis.

    There may be more than the seeds on that axis of states and metrics, after them (`Placement.num_padded_seeds`). What
    `init` and `place` take, what `learner` gives, and `like` have the seeds alone.
    """

    init: Callable[[np.ndarray], loop.TrainState]  # seeds [S] or one
    chunk: Callable[[loop.TrainState, np.ndarray], tuple[loop.TrainState, Metrics]]  # metrics [S, capacity], or less S
    learner: Callable[[loop.TrainState], PyTree]  # what acting needs of it, [S, ...] or one, without shards
    shard_state: Callable[[loop.TrainState], loop.TrainState]  # a state from the host to where `chunk` wants it
    restart: Callable[
        [loop.TrainState], loop.TrainState
    ]  # the same state, all of its games beginning; compiled if used
    state_spec: loop.TrainState  # shapes and dtypes of a state
    capacity: int  # the most updates of one chunk
    compile_time_s: float
    memory: int  # bytes while training: what stays and what is needed in between


class PartitionedFns(NamedTuple):
    """A program's functions over all seeds and shards, and where their arguments and results lie."""

    init: Function
    advance: Function
    restart: Function
    seeds: NamedSharding  # metrics too
    state: NamedSharding
    limit: NamedSharding


def build(
    env: Env, agent: Agent, num_updates: int, placement: Placement = SINGLE_DEVICE, varied: Varied | None = None
) -> Program:
    """Compile `init` and `chunk` ahead of time; `restart` and `learner` are compiled on their first use.

    With several shards `env` is one of them, and its spec has the placement's axis_name. `varied` has values for
    several seeds.
    """
    start = time.perf_counter()
    num_seeds, num_padded_seeds = placement.num_seeds, placement.num_padded_seeds
    capacity = min(num_updates, max(MAX_ROWS // num_seeds, 64))
    values, make = varied or ({}, lambda _: agent)
    fill = lambda x: x[np.minimum(np.arange(num_padded_seeds), num_seeds - 1)] if num_padded_seeds > num_seeds else x
    spread, seeds = partition(env, make, capacity, placement), _seeds(num_padded_seeds)
    values = jax.device_put(jax.tree.map(fill, values), spread.seeds)
    state, limit = jax.eval_shape(spread.init, seeds, values), jax.ShapeDtypeStruct((), jnp.int32)
    compiled_init = (
        jax.jit(spread.init, in_shardings=(spread.seeds, spread.seeds), out_shardings=spread.state)
        .lower(seeds, values)
        .compile()
    )
    compiled_chunk = (
        jax.jit(
            spread.advance,
            in_shardings=(spread.state, spread.seeds, spread.limit),
            out_shardings=(spread.state, spread.seeds),
            donate_argnums=0,
        )
        .lower(state, values, limit)
        .compile()
    )
    learners = _learners(placement)
    learner = lambda state: learners(agent.policy_state(state.agent))
    shard_state = partial(jax.tree.map, lambda x: jax.device_put(fill(x), spread.state))
    duration = time.perf_counter() - start
    start_all = lambda seeds: compiled_init(fill(seeds), values)
    run = lambda state, num_updates: compiled_chunk(state, values, jax.device_put(num_updates, spread.limit))
    compiled_restart = jax.jit(
        spread.restart, in_shardings=(spread.state, spread.seeds), out_shardings=spread.state, donate_argnums=0
    )
    restart = lambda state: compiled_restart(state, values)
    state_spec = _of_seeds(state, placement)
    return Program(
        start_all, run, learner, shard_state, restart, state_spec, capacity, duration, _most_bytes(compiled_chunk)
    )


def shapes(
    env: Env, agent: Agent, placement: Placement = SINGLE_DEVICE, varied: Varied | None = None
) -> loop.TrainState:
    """Shapes and dtypes of a state, as the program of the same arguments will have it. Nothing is compiled."""
    values, make = varied or ({}, lambda _: agent)
    num_padded_seeds = placement.num_padded_seeds
    init = partition(async_rollout.on_paper(env), make, 1, placement).init
    values = {name: jax.ShapeDtypeStruct((num_padded_seeds,), x.dtype) for name, x in values.items()}
    state: loop.TrainState = _of_seeds(jax.eval_shape(init, _seeds(num_padded_seeds), values), placement)
    return state


def shapes_of_update(env: Env, agent: Agent) -> tuple[PyTree, Any]:
    """Shapes and dtypes of an agent's state, and of what an update gives. Nothing is compiled."""
    env, key = async_rollout.on_paper(env), jax.random.key(0)
    state = jax.eval_shape(lambda: loop.init(env, agent, key))
    act = lambda state: loop.act(env, agent, state.agent, state.actors, key)[1]
    return state.agent, jax.eval_shape(lambda state: agent.update(state.agent, act(state), key), state)


def partition(env: Env, make: Callable[..., Agent], capacity: int, placement: Placement) -> PartitionedFns:
    """The functions of all seeds that are trained, each group of devices with as many, and where they are computed."""
    init: Function = partial(begin, env, make)
    advance: Function = partial(chunk, env, make, capacity)
    restart: Function = partial(restart_envs, env, make)
    several, apart, num_shards = placement.num_seeds > 1, placement.sharded, placement.num_shards
    if num_shards > 1 and not apart:
        init = jax.vmap(init, in_axes=(None, None), axis_size=num_shards, axis_name=SHARDS)
        advance = _first_metrics(jax.vmap(advance, in_axes=(0, None, None), axis_name=SHARDS))
        restart = jax.vmap(restart, in_axes=(0, None), axis_name=SHARDS)
    one_at_a_time = placement.sequential_seeds or placement.seeds_per_device == 1
    mesh = _mesh({SEEDS: placement.num_groups} | placement.grad_axes)
    one, seeds = P(), P(SEEDS) if several else P()
    state = P(*seeds, placement.axis_name) if apart else seeds
    if several:
        init, restart = _one_by_one(init), _one_by_one(restart)
        advance = _sequential_seeds(advance) if one_at_a_time else jax.vmap(advance, in_axes=(0, 0, None))
    if apart:
        init, advance, restart = _with_shard_axis(int(several), init, advance, restart)
    if several or placement.grad_axes:
        init = _shard_map(init, mesh, (seeds, seeds), state)
        advance = _shard_map(advance, mesh, (state, seeds, one), (state, seeds))
        restart = _shard_map(restart, mesh, (state, seeds), state)
    on = partial(NamedSharding, mesh)
    return PartitionedFns(init, advance, restart, on(seeds), on(state), on(one))


def begin(env: Env, make: Make, seed: Array, values: Values) -> loop.TrainState:
    """The state before training, from a number."""
    return loop.init(env, make(values), jax.random.key(seed))


def restart_envs(env: Env, make: Make, state: loop.TrainState, values: Values) -> loop.TrainState:
    """The state with all games beginning, for where environments stand is not in what was saved of it."""
    agent = make(values)
    if state.rollout:  # which is to be learned from before the agent meets the new games
        state = state._replace(rollout=loop.cut(state.rollout))
    else:
        state = state._replace(agent=agent.on_env_restart(state.agent))
    key = loop.key_of_shard(env, jax.random.fold_in(state.key, RESET_FOLD))
    return state._replace(actors=loop.restart_envs(env, agent, state.agent, key))


def chunk(
    env: Env, make: Make, capacity: int, state: loop.TrainState, values: Values, num_updates: Array
) -> tuple[loop.TrainState, Metrics]:
    """`num_updates` updates, and their metrics as the first rows of [capacity]; the other rows are 0. And WRONG."""

    agent = make(values)
    train_once = jax.jit(partial(loop.train_once, env, agent), inline=True)  # so that it is traced once

    def body(i: Array, carry: Any) -> Any:
        state, rows = carry
        state, row = train_once(state)
        return state, jax.tree.map(lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, x, i, axis=0), rows, row)

    _, row = jax.eval_shape(train_once, state)
    rows = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), row)
    state, rows = jax.lax.fori_loop(0, num_updates, body, (state, rows))
    return state, {**loop.combine_shards(env, *rows), NONFINITE_KEY: jnp.full(capacity, ~_is_finite(state.agent))}


def _is_finite(learner: PyTree) -> Array:
    """[] bool: all of its parameters are."""
    named = jax.tree_util.tree_leaves_with_path(learner)
    of_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    parameters = [x for path, x in named if PARAMETERS in jax.tree_util.keystr(path) and of_float(x)]
    are_finite: Array = jnp.bool_(True)
    if parameters:  # an array of none would be a constant, see _on_devices
        are_finite = jnp.array([jnp.isfinite(x).all() for x in parameters]).all()
    return are_finite


def _most_bytes(compiled: jax.stages.Compiled) -> int:
    """What a program needs on each device, by the compiler's own report: 0 where there is none.

    Results that take the place of arguments are counted once.
    """
    memory = compiled.memory_analysis()
    if not memory:
        return 0
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes
    return int(sum(sizes) - memory.alias_size_in_bytes)


def _seeds(num_seeds: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_seeds,) if num_seeds > 1 else (), jnp.int32)


def _of_seeds(like: PyTree, placement: Placement) -> PyTree:
    """Shapes of the seeds alone."""
    if placement.num_padded_seeds == placement.num_seeds:
        return like
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((placement.num_seeds, *x.shape[1:]), x.dtype), like)


def _mesh(axes: dict[str, int]) -> jax.sharding.Mesh:
    devices = jax.local_devices()[: math.prod(axes.values())]
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


def _shard_map(function: Function, mesh: jax.sharding.Mesh, in_specs: Any, out_specs: Any) -> Function:
    """The function of each device's part of the arguments.

    Arrays of no elements are made there: given to `shard_map`, as arguments or constants, they crash jaxlib 0.11.
    """

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        specs = [spec for spec, argument in zip(in_specs, arguments) for _ in jax.tree.leaves(argument)]
        given = [i for i, x in enumerate(leaves) if x.size]

        def of_parts(*parts: Array) -> Any:
            there = dict(zip(given, parts))
            empty = lambda i: NamedSharding(mesh, specs[i]).shard_shape(leaves[i].shape)
            all_parts = [there[i] if i in there else jnp.zeros(empty(i), x.dtype) for i, x in enumerate(leaves)]
            return function(*jax.tree.unflatten(structure, all_parts))

        of_given = tuple(specs[i] for i in given)
        mapped = jax.shard_map(of_parts, mesh=mesh, in_specs=of_given, out_specs=out_specs, check_vma=False)
        return mapped(*(leaves[i] for i in given))

    return run


def _with_shard_axis(
    axis: int, init: Function, advance: Function, restart: Function
) -> tuple[Function, Function, Function]:
    """The three functions for states with an axis of shards, of which a device sees only its own."""
    add_axis = partial(jax.tree.map, lambda x: jnp.expand_dims(x, axis))
    drop_axis = partial(jax.tree.map, lambda x: jnp.squeeze(x, axis))

    def advance_shard(state: PyTree, values: Values, num_updates: Array) -> tuple[PyTree, PyTree]:
        state, metrics = advance(drop_axis(state), values, num_updates)
        return add_axis(state), metrics

    return (
        lambda seed, values: add_axis(init(seed, values)),
        advance_shard,
        lambda state, values: add_axis(restart(drop_axis(state), values)),
    )


def _one_by_one(function: Function) -> Function:
    """Over members in turn. Not by `vmap`: batched orthogonal matrices have been seen to deadlock JAX on two cores."""
    return lambda *members: jax.lax.map(lambda member: function(*member), members)


def _sequential_seeds(advance: Function) -> Function:
    """What `vmap` over members computes, one after another. A member's state is copied out of that of all, and back."""

    def run(states: PyTree, values: Values, num_updates: Array) -> Any:
        member = lambda tree, i: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)
        put = lambda trees, tree, i: jax.tree.map(
            lambda xs, x: jax.lax.dynamic_update_index_in_dim(xs, x, i, axis=0), trees, tree
        )

        def body(i: Array, carry: Any) -> Any:
            states, metrics = carry
            state, rows = advance(member(states, i), member(values, i), num_updates)
            return put(states, state, i), put(metrics, rows, i)

        _, rows = jax.eval_shape(advance, member(states, 0), member(values, 0), num_updates)
        num_members = len(jax.tree.leaves(states)[0])
        metrics = jax.tree.map(lambda x: jnp.zeros((num_members, *x.shape), x.dtype), rows)
        return jax.lax.fori_loop(0, num_members, body, (states, metrics))

    return run


def _first_metrics(advance: Function) -> Function:
    """Metrics are of all shards together, so any shard's will do."""

    def run(state: PyTree, values: Values, num_updates: Array) -> tuple[PyTree, PyTree]:
        state, rows = advance(state, values, num_updates)
        return state, jax.tree.map(lambda x: x[0], rows)

    return run


def _learners(placement: Placement) -> Callable[[PyTree], PyTree]:
    """From the agents' states to those of the seeds, without shards: parameters are the same bits in each."""
    num_seeds, num_shards = placement.num_seeds, placement.num_shards
    if num_seeds == 1:
        first = lambda x: x.addressable_shards[0].data
        return partial(jax.tree.map, (lambda x: first(x)[0]) if num_shards > 1 else first)
    if num_shards == 1 and placement.num_padded_seeds == num_seeds:
        return lambda learner: learner
    of_seeds = lambda x: x[:num_seeds, 0] if num_shards > 1 else x[:num_seeds]
    hands = max(hands for hands in range(1, jax.local_device_count() + 1) if num_seeds % hands == 0)
    dealt = NamedSharding(_mesh({SEEDS: hands}), P(SEEDS))
    cut = jax.jit(lambda learner: jax.tree.map(of_seeds, learner))
    return lambda learner: jax.device_put(cut(learner), dealt)
