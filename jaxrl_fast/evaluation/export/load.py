"""Load an exported policy from its folder: StableHLO by JAX, ONNX by onnxruntime, npz by its policy.py.

Loading npz executes policy.py. The other formats hold no code of Python.
"""

import json
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, ShapeDtypeStruct

from jaxrl_fast.evaluation import inputs
from jaxrl_fast.evaluation.export.function import KEY, named
from jaxrl_fast.types import Discrete, Env, EnvSpec, Key, PolicyInput, PyTree
from jaxrl_fast.utils.errors import why

CARD = "policy.json"
FILES = {"stablehlo": "policy.stablehlo", "onnx": "policy.onnx", "npz": "policy.npz"}
DRAWS = {"uniform": jax.random.uniform, "normal": jax.random.normal, "gumbel": jax.random.gumbel}

Call = Callable[[Sequence[Any]], list[Any]]  # arrays [B, ...] in the order of the card to actions and the next memory


def folder_of(path: Path) -> Path | None:
    """Return the folder of the exported policy that a path means, or None for the folder of a run.

    Raises:
        ValueError: If the path is a file that belongs to no exported policy.
    """
    if path.is_dir():
        return path if (path / CARD).is_file() else None
    if path.suffix not in [Path(name).suffix for name in FILES.values()] and not path.is_file():
        return None
    if path.name not in (CARD, *FILES.values()) or not path.is_file():
        names = ", ".join(FILES.values())
        raise ValueError(f"load: must be a run's folder or the file of an export ({names}), got {path}; export one")
    if not (path.parent / CARD).is_file():
        raise ValueError(f"load: {path} needs {CARD} in its folder, got none; copy the whole folder of the export")
    return path.parent


def load(folder: Path) -> "ExportedPolicy":
    """Return the exported policy in a folder. Raise ValueError if it cannot be loaded."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        kind = card["format"]
        file = folder / FILES[kind]
        policy_type = ExportedRecurrentPolicy if card.get("initial_memory") else ExportedPolicy
        names = [x["name"] for x in card["inputs"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"load: {folder / CARD} is damaged ({why(error)}); export the policy again") from error
    if kind == "onnx" and util.find_spec("onnxruntime") is None:
        raise ValueError(f"load: {file} needs onnxruntime, got no such package; pip install onnxruntime")
    try:
        call = caller(kind, folder)
    except Exception as error:  # each library has its own errors
        raise ValueError(f"load: {file} is damaged ({why(error)}); export the policy again") from error
    unknown = [name for name in names if name.partition("_")[0] == "noise"]
    if unknown:
        raise ValueError(f"load: {file} takes random numbers that its card does not describe; use load(RUN).policy")
    return policy_type(folder, card, call)


def caller(kind: str, folder: Path) -> Call:
    """Return the function of an exported policy, from its files alone."""
    path = folder / FILES[kind]
    if kind == "stablehlo":
        exported = jax.export.deserialize(bytearray(path.read_bytes()))
        compiled, structure = jax.jit(exported.call), exported.in_tree
        return lambda arrays: jax.tree.leaves(compiled(*jax.tree.unflatten(structure, arrays)[0]))
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [x.name for x in session.get_inputs()]
        assert KEY not in names, "its random numbers are inputs"
        return lambda arrays: list(session.run(None, dict(zip(names, map(np.asarray, arrays), strict=True))))
    act = runpy.run_path(str(folder / "policy.py"))["policy"]
    return lambda arrays: [act(*map(np.asarray, arrays))]


@dataclass(frozen=True)
class ExportedPolicy:
    """An exported policy, which is called as that of its run: `policy(obs, key=None, explore=False, mask=None)`.

    A policy that was exported with `sampled` requires `explore=True` and a key; any other is greedy.
    """

    folder: Path
    card: dict[str, Any]  # the content of policy.json
    _call: Call

    @property
    def policy(self) -> "ExportedPolicy":
        """Return this policy, so that `load(X).policy` is one for a run and for an exported policy."""
        return self

    def __call__(self, obs: PyTree, key: Key | None = None, explore: bool = False, mask: Any = None) -> Any:
        """Return the action for one observation or for each of a batch; see `evaluation.policy.Policy`."""
        batch, is_one = self._batch(obs, mask)
        action, *_ = self._act(batch, [], key, explore)
        return action[0] if is_one else action

    def __repr__(self) -> str:
        card = self.card
        return f"ExportedPolicy({card['algo']} on {card['env_id']}, {card['policy']}, {str(self.folder)!r})"

    def _batch(self, obs: PyTree, mask: Any) -> tuple[PolicyInput, bool]:
        """Return the raw input [B, ...] with the parts of the observation by name, and whether it was a single one.

        The policy does not read parts that are hidden from it, whatever they are.
        """
        likes = {x["name"]: ShapeDtypeStruct(tuple(x["shape"][1:]), x["dtype"]) for x in self.card["inputs"]}
        like = {name: x for name, x in likes.items() if name.partition("_")[0] == "obs"}
        num_actions = likes["action_mask"].shape[0] if "action_mask" in likes else 0
        whole: Any = like["obs"] if list(like) == ["obs"] else like
        spec = EnvSpec(self.card["env_id"], whole, Discrete(num_actions), 1, has_action_mask=bool(num_actions))
        given = obs if whole is not like else {name: x for name, x in _named(obs).items() if name in like}
        return inputs.as_batch(Env(None, None, spec), given, mask)  # type: ignore[arg-type]

    def _act(self, batch: PolicyInput, memory: list[Any], key: Key | None, explore: bool) -> list[Array]:
        """Return actions [B, ...] and the arrays of the next memory."""
        samples, num_rows = self.card["policy"] == "sampled", inputs.num_rows(batch)
        if samples != explore:
            has, other = ("samples", "explore=True") if samples else ("is greedy", "explore=False")
            raise ValueError(f"policy: this exported policy {has}, got explore={explore}; pass {other}")
        if samples and key is None:
            raise ValueError("policy: explore=True requires a PRNG key; pass key=jax.random.key(0)")
        if not num_rows:
            raise ValueError("policy: obs is an empty batch; pass at least one observation")
        given = [*jax.tree.leaves(batch), *memory]
        return [jnp.asarray(x) for x in self._call([*given, *self._random(len(given), key, num_rows)])]

    def _random(self, first: int, key: Key | None, num_rows: int) -> list[Any]:
        """Return the inputs from the `first` one on: random numbers, or the data of a key that they are drawn from."""
        specs = self.card["inputs"][first:]
        if key is None or [spec["name"] for spec in specs] == [KEY]:
            return [] if key is None else [jax.random.key_data(key)]
        draw = lambda i, spec: DRAWS[spec["name"].partition("_")[0]](
            jax.random.fold_in(key, i), (num_rows, *spec["shape"][1:]), spec["dtype"]
        )
        return [draw(i, spec) for i, spec in enumerate(specs)]


@dataclass(frozen=True, repr=False)
class ExportedRecurrentPolicy(ExportedPolicy):
    """An exported policy with a memory: `action, memory = policy(obs, memory, key=None, explore=False, mask=None)`."""

    def initial_memory(self, batch_size: int | None = None) -> list[Array]:
        """Return the memory at the start of an episode, [...], or of `batch_size` episodes, [B, ...]."""
        dtypes = {x["name"]: x["dtype"] for x in self.card["inputs"]}
        found = [jnp.asarray(x, dtypes[name]) for name, x in self.card["initial_memory"].items()]
        return found if batch_size is None else [jnp.broadcast_to(x, (batch_size, *x.shape)) for x in found]

    def __call__(  # type: ignore[override]
        self, obs: PyTree, memory: list[Array], key: Key | None = None, explore: bool = False, mask: Any = None
    ) -> tuple[Array, list[Array]]:
        """Return the action and the next memory; see `evaluation.policy.RecurrentPolicy`."""
        batch, is_one = self._batch(obs, mask)
        expected = self.initial_memory(None if is_one else inputs.num_rows(batch))
        shapes = lambda arrays: [*map(jnp.shape, arrays)]
        if not isinstance(memory, (list, tuple)) or shapes(memory) != shapes(expected):
            got = shapes(memory) if isinstance(memory, (list, tuple)) else type(memory).__name__
            problem = f"must have the shapes {shapes(expected)}, got {got}"
            raise ValueError(f"policy: memory {problem}; pass policy.initial_memory() or what the last call returned")
        action, *memory = self._act(batch, [jnp.asarray(x)[None] if is_one else x for x in memory], key, explore)
        return (action[0], [x[0] for x in memory]) if is_one else (action, memory)


def _named(obs: PyTree) -> dict[str, Any]:
    """Return the parts of an observation by the names of the exported policy's inputs; lists are arrays."""
    arrays = jax.tree.map(inputs.array, inputs.plain(obs), is_leaf=lambda x: isinstance(x, list))
    return named(PolicyInput(arrays))
