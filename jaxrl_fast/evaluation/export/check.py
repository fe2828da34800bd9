"""Compare an exported policy, loaded from its files, with the policy of the run."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_fast.evaluation import inputs, policy
from jaxrl_fast.evaluation.export import load
from jaxrl_fast.evaluation.export.function import PolicyFunction, with_memory
from jaxrl_fast.evaluation.saved_run import SavedRun
from jaxrl_fast.rollout import initial_carry
from jaxrl_fast.types import PolicyInput, PyTree
from jaxrl_fast.utils.random import key_of_seed

NUM_ROWS = 256  # observations to compare on
TOLERANCE = 1e-4  # for continuous actions, relative to numbers above 1
MAX_DIFFERENT = 0.01  # share of discrete actions: rounding decides between almost equally good actions


def compare(saved: SavedRun, function: PolicyFunction, kind: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Compare the actions of the exported policy with the run's on random observations. Return the result as text.

    Raises:
        ValueError: If they differ by more than rounding errors.
    """
    given = observations(function.given, NUM_ROWS)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key_of_seed(0), np.arange(NUM_ROWS))
    noise = jax.vmap(function.draw)(keys) if function.noise else ()
    memory = tuple(
        np.random.default_rng(i).normal(size=(NUM_ROWS, *one.initial.shape)).astype(one.initial.dtype)
        for i, one in enumerate(function.memory)
    )
    if function.noise:
        wanted = jax.jit(jax.vmap(function.act))(given, noise, memory)[0]
    else:
        wanted = jax.jit(partial(reference, saved, function.whole))(given, memory)
    found, wanted = np.asarray(run(kind, files, given, noise, memory)[0]), np.asarray(wanted)
    result: dict[str, Any] = {"observations": NUM_ROWS}
    if np.issubdtype(wanted.dtype, np.integer):
        result["num_different"] = int((found != wanted).reshape(NUM_ROWS, -1).any(1).sum())
        is_same = result["num_different"] <= MAX_DIFFERENT * NUM_ROWS
    else:
        result["max_difference"] = float(np.abs(found - wanted).max())
        is_same = np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    if found.shape != wanted.shape or found.dtype != wanted.dtype or not is_same:
        raise ValueError(f"to {kind}: the exported policy acts differently, got {result}; use another format")
    return result


def reference(saved: SavedRun, whole: Any, given: PolicyInput, memory: tuple[Any, ...]) -> Any:
    """Return the greedy actions [B, ...] of the run for inputs of the exported policy, which `whole` completes."""
    env = saved.env
    is_memory = policy.remembers(saved.agent, saved.agent.exploit, saved.learners, env.spec.obs)
    carry = with_memory(initial_carry(saved.agent, NUM_ROWS), is_memory, memory)
    return env.view.to_env_action(policy.greedy(saved.agent, saved.learners, inputs.seen(env, whole(given)), carry)[0])


def observations(spec: PyTree, num_rows: int, seed: int = 0) -> PyTree:
    """Return random observations, or inputs, [num_rows, ...] like `spec`; state indices are 0 or 1."""
    rng = np.random.default_rng(seed)

    def draw(like: Any) -> np.ndarray:
        shape = (num_rows, *like.shape)
        if np.issubdtype(like.dtype, np.floating):
            return rng.normal(size=shape).astype(like.dtype)
        return rng.integers(0, 256 if like.dtype == np.uint8 else 2, shape).astype(like.dtype)

    return jax.tree.map(draw, spec)


def run(
    kind: str, files: Mapping[str, bytes], given: PolicyInput, noise: Sequence[Any], memory: Sequence[Any] = ()
) -> list[Any]:
    """Return the actions of an exported policy, and the next memory, for arrays [B, ...].

    StableHLO draws the noise from key 0.
    """
    with tempfile.TemporaryDirectory(prefix="jaxrl_fast_") as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        random = [jax.random.key_data(key_of_seed(0))] * bool(noise) if kind == "stablehlo" else noise
        return load.caller(kind, Path(folder))([*jax.tree.leaves(given), *memory, *random])
