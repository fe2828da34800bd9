"""Call a pool in Python from a compiled program with little overhead, where its arrays lie at fixed addresses.

JAX's own callbacks take some 100 microseconds and more for each call, because they convert every array twice. Here a
function in C (kernels/csrc/host_call.c) copies the actions to the pool, calls it, and copies the row to the program.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_fast.envs.host.env import Bridge, callback_bridge
from jaxrl_fast.envs.host.pool import LazyPool, Row
from jaxrl_fast.kernels import build
from jaxrl_fast.kernels.host_call import HANDLE, KERNEL, address_table, function_for_c


class Functions(NamedTuple):
    """The functions of a pool that C calls, kept alive as long as the pool."""

    start: Any
    finish: Any
    both: Any


def choose_bridge(env_id: str, name: str) -> Callable[[LazyPool], Bridge]:
    """Return the function that makes the bridge called "auto", "ffi" or "callback".

    The pool must have `arrays.action` and the methods `start`, `finish` and `row`, as `gymnasium.pool` does.
    """
    if name == "callback" or name == "auto" and not build.is_available(KERNEL):
        return callback_bridge
    if not build.is_available(KERNEL):
        reason = build.unavailable_reason() or f"{build.VARIABLE} does not name {KERNEL}"
        raise ValueError(f"host.bridge: {env_id} cannot be called from C ({reason}), got ffi; use callback")
    return direct_bridge


def direct_bridge(pool: LazyPool) -> Bridge:
    """Call the pool through C. The compiled program holds the addresses of its arrays, which reseeding keeps."""
    bind = functools.partial
    return Bridge(bind(_send, pool), bind(_recv, pool), bind(_step, pool))


def _send(pool: LazyPool, handle: jax.Array, action: jax.Array) -> jax.Array:
    table = address_table(_functions(pool).start, [pool.pool.arrays.action])
    return build.call("call_host", [HANDLE], has_side_effect=True)(handle, table, _converted(pool, action))[0]


def _recv(pool: LazyPool, handle: jax.Array) -> tuple[jax.Array, Row]:
    rows = jax.tree.leaves(pool.pool.row())
    table = address_table(_functions(pool).finish, rows)
    handle, *row = build.call("call_host", _results(pool), has_side_effect=True)(handle, table)
    return handle, jax.tree.unflatten(jax.tree.structure(pool.rows), row)


def _step(pool: LazyPool, handle: jax.Array, action: jax.Array) -> tuple[jax.Array, Row]:
    rows = jax.tree.leaves(pool.pool.row())
    table = address_table(_functions(pool).both, [pool.pool.arrays.action, *rows])
    call = build.call("call_host", _results(pool), has_side_effect=True)
    handle, *row = call(handle, table, _converted(pool, action))
    return handle, jax.tree.unflatten(jax.tree.structure(pool.rows), row)


def _results(pool: LazyPool) -> list[jax.ShapeDtypeStruct]:
    return [HANDLE, *jax.tree.leaves(pool.rows)]


def _converted(pool: LazyPool, action: jax.Array) -> jax.Array:
    """Return actions with the shape and dtype of the pool's array, for a copy of bytes.

    Without 64-bit types, int64 is written as two words of 32 bits, the lower one first.
    """
    own = pool.pool.arrays.action
    action = action.reshape(own.shape)
    if own.dtype.itemsize < 8:
        return action.astype(own.dtype)
    if own.dtype.kind == "f":
        with jax.enable_x64(True):
            return jax.lax.convert_element_type(action, jnp.float64)
    words = jnp.stack([action, action >> 31], axis=-1)  # the sign fills the upper word
    return words.astype(jnp.int32)


def _functions(pool: LazyPool) -> Functions:
    """Return the pool's functions as C calls them; one set for each opened pool."""
    opened = pool.pool
    if not hasattr(opened, "functions_for_c"):

        def both() -> None:
            opened.start()
            opened.finish()

        opened.functions_for_c = Functions(*map(function_for_c, (opened.start, opened.finish, both)))
    return opened.functions_for_c
