"""Compare an exported policy with the run's own, as it comes out of its files."""

import runpy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from jaxrl_fast.evaluation import policy
from jaxrl_fast.evaluation.export.function import KEY, PolicyFunction, named
from jaxrl_fast.evaluation.saved_run import SavedRun
from jaxrl_fast.types import PyTree
from jaxrl_fast.utils.random import key_of_seed

NUM_ROWS = 256  # observations to compare on
TOLERANCE = 1e-4  # of continuous actions, relative to numbers above 1
MAX_DIFFERENT = 0.01  # of discrete actions: rounding decides between actions that are almost equally good


def compare(saved: SavedRun, function: PolicyFunction, kind: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return how actions of the exported policy differ from those of the run on random observations.

    Raises:
        ValueError: If they differ by more than rounding does.
    """
    obs = observations(function.obs, NUM_ROWS)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key_of_seed(0), np.arange(NUM_ROWS))
    noise = jax.vmap(function.draw)(keys) if function.noise else ()
    if function.noise:
        wanted = jax.jit(jax.vmap(function.act))(obs, noise)
    else:
        wanted = jax.jit(lambda obs: reference(saved, obs))(obs)
    found, wanted = np.asarray(run(kind, files, obs, noise)), np.asarray(wanted)
    result: dict[str, Any] = {"observations": NUM_ROWS}
    if np.issubdtype(wanted.dtype, np.integer):
        result["num_different"] = int((found != wanted).reshape(NUM_ROWS, -1).any(1).sum())
        is_same = result["num_different"] <= MAX_DIFFERENT * NUM_ROWS
    else:
        result["max_difference"] = float(np.abs(found - wanted).max())
        is_same = np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    if found.shape != wanted.shape or found.dtype != wanted.dtype or not is_same:
        raise ValueError(f"--to {kind}: the exported policy acts differently, got {result}; use another format")
    return result


def reference(saved: SavedRun, obs: PyTree) -> Any:
    """Return the greedy actions [B, ...] of the run for observations like those of the exported policy."""
    env = saved.env
    return env.to_env_action(policy.greedy(saved.agent, saved.learners, env.encode_obs(obs)))


def observations(spec: PyTree, num_rows: int, seed: int = 0) -> PyTree:
    """Return random observations [num_rows, ...] like `spec`; state indices are 0 or 1."""
    rng = np.random.default_rng(seed)

    def draw(like: Any) -> np.ndarray:
        shape = (num_rows, *like.shape)
        if np.issubdtype(like.dtype, np.floating):
            return rng.normal(size=shape).astype(like.dtype)
        return rng.integers(0, 256 if like.dtype == np.uint8 else 2, shape).astype(like.dtype)

    return jax.tree.map(draw, spec)


def run(kind: str, files: Mapping[str, bytes], obs: PyTree, noise: Sequence[Any]) -> Any:
    """Return the actions of an exported policy for observations and noise [B, ...]. StableHLO draws it from key 0."""
    if kind == "stablehlo":
        key = [jax.random.key_data(key_of_seed(0))] * bool(noise)
        return export.deserialize(bytearray(files["policy.stablehlo"])).call(obs, *key)
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(files["policy.onnx"], providers=["CPUExecutionProvider"])
        names = [x.name for x in session.get_inputs()]
        assert KEY not in names and len(names) == len(named(obs)) + len(noise), names
        return session.run(None, dict(zip(names, [*jax.tree.leaves(obs), *map(np.asarray, noise)], strict=True)))[0]
    with tempfile.TemporaryDirectory(prefix="jaxrl_fast_") as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        return runpy.run_path(str(Path(folder, "policy.py")))["policy"](obs, *map(np.asarray, noise))
