"""Call a function on the host from a compiled program.

On a CPU with a C compiler, a function in C (csrc/host_call.c) copies arrays to fixed addresses, calls, and copies the
results back. JAX's own callbacks, which are used elsewhere, take some 100 microseconds and more for each call.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxrl_fast.kernels import build
from jaxrl_fast.types import PyTree

KERNEL = "host_call"  # its name in JAXRL_FAST_KERNELS
HANDLE = jax.ShapeDtypeStruct((8,), jnp.uint8)  # arbitrary bytes: each call takes the previous one's, to order calls
ERRORS: list[BaseException] = []  # the last error raised in a call, which JAX reports as text only

Function = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]  # (arguments, results to be filled)


def call(
    function: Function,
    handle: jax.Array,
    arguments: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    kept: list[Any],
) -> tuple[jax.Array, list[jax.Array]]:
    """Call a function after the call that returned `handle`. Return a new handle and the results.

    Objects whose addresses a compiled program holds are added to `kept`, and must live as long as the program can run.
    """
    if not build.is_available(KERNEL):

        def fill(*values: Any) -> list[np.ndarray]:
            filled = [np.zeros(x.shape, x.dtype) for x in results]
            function([np.asarray(value) for value in values], filled)
            return filled

        return call_python(fill, list(results), handle, *arguments)
    inputs, outputs = ([np.zeros(x.shape, x.dtype) for x in arrays] for arrays in (arguments, results))
    for_c = function_for_c(lambda: function(inputs, outputs))
    kept.append((for_c, inputs, outputs))
    table = address_table(for_c, [*inputs, *outputs])
    handle, *found = build.call("call_host", [HANDLE, *results], has_side_effect=True)(handle, table, *arguments)
    return handle, found


def call_python(function: Callable[..., PyTree], result: PyTree, handle: jax.Array, *args: jax.Array) -> Any:
    """Call a function by JAX's callback, after the call that returned `handle`; return a new handle and its result."""

    def call(handle: Any, *args: Any) -> Any:
        try:
            return handle, function(*args)
        except BaseException as error:
            ERRORS[:] = [error]
            raise

    return io_callback(call, (HANDLE, result), handle, *args)


def address_table(function: Any, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the bytes that host_call.c reads: the function's address, then the address and size of each array."""
    for array in arrays:
        assert array.flags.c_contiguous, "its bytes are copied"
    words = [ctypes.cast(function, ctypes.c_void_p).value or 0]
    words += [word for array in arrays for word in (array.ctypes.data, array.nbytes)]
    return np.array(words, np.uint64).view(np.uint8)


def function_for_c(function: Callable[[], None]) -> Any:
    """Return a function for C that returns 0, or 1 if it has raised an exception, which is kept in ERRORS."""

    def call() -> int:
        try:
            function()
        except BaseException as error:
            ERRORS[:] = [error]
            return 1
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int)(call)
