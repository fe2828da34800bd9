"""Export a policy by `jax.export`: StableHLO for CPUs, GPUs and TPUs, which every process with JAX can load."""

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct, export

from jaxrl_fast.evaluation.export.function import PolicyFunction
from jaxrl_fast.types import PolicyInput
from jaxrl_fast.utils import target
from jaxrl_fast.utils.random import key_of_seed

PLATFORMS = ("cpu", "cuda", "tpu")


def serialize(function: PolicyFunction) -> bytes:
    """Return the policy as a serialized `jax.export.Exported`, for any number of rows.

    It maps observations [b, ...], action masks if the environment has them apart, and the data of a PRNG key if it
    samples, to actions [b, ...]. Each row has its own random numbers. The arrays of a memory follow the observations
    and masks, and the next ones the actions. Products of float32
    numbers are exact to float32 on every platform.

    Raises:
        ValueError: If a function that was compiled before calls C, or the observation's tree cannot be serialized.
    """
    (num_rows,) = export.symbolic_shape("b")
    num_masks = len(jax.tree.leaves(function.given.action_mask))
    implementation = str(jax.random.key_impl(key_of_seed(0)))

    def policy(obs, *more):
        """Return actions [b, ...], and the arrays of the next memory if there is one."""
        mask, more = more[:num_masks], more[num_masks:]
        given = PolicyInput(obs, *mask)
        memory, key = more[: len(function.memory)], more[len(function.memory) :]
        if key:
            rows = jnp.arange(jax.tree.leaves(obs)[0].shape[0])
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.wrap_key_data(key[0], impl=implementation), rows)
            act = lambda row, memory, key: function.act(row, function.draw(key), memory)
            action, memory = jax.vmap(act)(given, memory, keys)
        else:
            action, memory = jax.vmap(lambda row, memory: function.act(row, (), memory))(given, memory)
        return (action, *memory) if memory else action

    wide = lambda x: ShapeDtypeStruct((num_rows, *x.shape), x.dtype)
    (obs, mask), memory = jax.tree.map(wide, (function.given, tuple(one.initial for one in function.memory)))
    data = jax.random.key_data(key_of_seed(0))
    key = [ShapeDtypeStruct(data.shape, data.dtype)] * bool(function.noise)
    with target.tracing_for("any"), jax.default_matmul_precision("highest"):
        exported = export.export(jax.jit(policy), platforms=PLATFORMS)(obs, *jax.tree.leaves(mask), *memory, *key)
    try:
        return bytes(exported.serialize())
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"to stablehlo: the policy cannot be serialized ({reason}); use onnx") from error
