"""Apply the functions of one member to all members, and divide seeds and shards among devices.

A program's `init`, `advance` and `restart` are written for one shard of one member. `partition` returns the same three
functions for a whole placement. It uses `vmap`, a loop over sequential seeds, or a part on each device (`shard_map`).
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_fast.parallel import arrays, team
from jaxrl_fast.parallel.placement import SEEDS, SHARDS, Placement
from jaxrl_fast.types import Array, PyTree
from jaxrl_fast.utils import target

Values = Mapping[str, Array]  # of hyperparameters: [S], or of one member []
Function = Callable[..., Any]


class PartitionedFns(NamedTuple):
    """A program's functions over all seeds and shards, and the shardings of their arguments and results."""

    init: Function
    advance: Function
    restart: Function
    seeds: NamedSharding
    state: NamedSharding
    limit: NamedSharding
    metrics: NamedSharding  # with several processes, every device has all


def partition(init: Function, advance: Function, restart: Function, placement: Placement) -> PartitionedFns:
    """Return the functions over all seeds, with equally many seeds on each group of devices, and their shardings.

    The arguments are functions of one shard of one member: (seed, values) -> state, (state, values, num_updates) ->
    (state, metrics) and (state, values) -> state.
    """
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
    metrics = on(seeds if team.current().count == 1 else one)
    return PartitionedFns(init, advance, restart, on(seeds), on(state), on(one), metrics)


def learners(placement: Placement) -> Callable[[PyTree], PyTree]:
    """Return a function that removes padding and the shard axis. Parameters are the same bits in each shard."""
    num_seeds, num_shards = placement.num_seeds, placement.num_shards
    if num_seeds > 1 and team.current().count > 1:
        mesh = _mesh({SEEDS: placement.num_groups} | placement.grad_axes)
        first_shard = lambda x: x[:, 0] if num_shards > 1 else x
        return lambda learner: jax.tree.map(first_shard, arrays.whole(learner, mesh))
    if num_seeds == 1:
        first = lambda x: x.addressable_shards[0].data
        return partial(jax.tree.map, (lambda x: first(x)[0]) if num_shards > 1 else first)
    if num_shards == 1 and placement.num_padded_seeds == num_seeds:
        return lambda learner: learner
    of_seeds = lambda x: x[:num_seeds, 0] if num_shards > 1 else x[:num_seeds]
    num_devices = max(number for number in range(1, jax.local_device_count() + 1) if num_seeds % number == 0)
    divided = NamedSharding(_mesh({SEEDS: num_devices}), P(SEEDS))
    cut = jax.jit(lambda learner: jax.tree.map(of_seeds, learner))
    return lambda learner: jax.device_put(cut(learner), divided)


def _mesh(axes: dict[str, int]) -> jax.sharding.Mesh:
    chosen = target.devices()[: math.prod(axes.values())]
    return jax.make_mesh((*axes.values(),), (*axes,), axis_types=(AxisType.Auto,) * len(axes), devices=chosen)


def _shard_map(function: Function, mesh: jax.sharding.Mesh, in_specs: Any, out_specs: Any) -> Function:
    """Return a function that applies `function` to each device's part of the arguments.

    Arrays without elements are created inside, since jaxlib 0.11 crashes if `shard_map` has them as arguments or
    constants.
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
    """Return the three functions for states with a shard axis, of which each device has one shard."""
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
    """Apply a function to one member after another, since `vmap` over orthogonal matrices can deadlock JAX.

    The deadlock occurred on two cores.
    """
    return lambda *members: jax.lax.map(lambda member: function(*member), members)


def _sequential_seeds(advance: Function) -> Function:
    """Compute the same as `vmap` over members, one after another, by copying each member's state out and back."""

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
    """Return a function with the metrics of the first shard, since metrics are equal on all shards."""

    def run(state: PyTree, values: Values, num_updates: Array) -> tuple[PyTree, PyTree]:
        state, rows = advance(state, values, num_updates)
        return state, jax.tree.map(lambda x: x[0], rows)

    return run
