"""Environments on the host dealt to shards: each shard of a program steps pools of its own.

One program runs in all shards and finds its own by its place on the axis that they are joined along. Shards on devices
of their own work at the same time; side by side on one device, in turn. The environments are the same either way.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_fast.types import Env, PyTree


def join(parts: Sequence[Env], axis_name: str) -> Env:
    """The environment of whichever shard asks: parts[i] in shard i. All parts are alike."""
    first = parts[0]

    def each(name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            for part in parts:
                getattr(part, name)(*args)

        return call

    def of_pools(name: str) -> Callable[..., Any]:
        return lambda i, *args: _here(axis_name, [partial(getattr(part.pools, name), i) for part in parts], *args)

    return first._replace(
        reset=partial(_here, axis_name, [part.reset for part in parts]),
        step=partial(_here, axis_name, [part.step for part in parts]),
        parallelism=first.parallelism._replace(axis_name=axis_name, num_shards=len(parts)),
        reseed=each("reseed"),
        open=each("open"),
        close=each("close"),
        pools=first.pools and first.pools._replace(send=of_pools("send"), receive=of_pools("receive")),
    )


def _here(axis_name: str, functions: Sequence[Callable[..., PyTree]], *args: PyTree) -> PyTree:
    """What this shard's function answers. Side by side, each shard's is called with its own part of the batch."""

    @jax.custom_batching.custom_vmap
    def call(index, *args):
        return jax.lax.switch(index, functions, *args)

    @call.def_vmap
    def call_each(size, batched, index, *args):
        assert size == len(functions) and batched[0], "no other axis than that of the shards"
        take = lambda i: jax.tree.map(lambda x, is_batched: x[i] if is_batched else x, args, tuple(batched[1:]))
        answers = [function(*take(i)) for i, function in enumerate(functions)]
        return jax.tree.map(lambda *x: jnp.stack(x), *answers), jax.tree.map(lambda _: True, answers[0])

    return call(jax.lax.axis_index(axis_name), *args)
