"""Start a run from another run: its parameters and normalizers, without optimizer, replay and counters.

Arrays of the new run that are loaded are its parameters and statistics; target networks and the opponents of self-play
are copies of these. What was loaded is kept in RUN/init.safetensors, so that the other run may be deleted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy

from jaxrl_fast.config import paths
from jaxrl_fast.networks import pieces
from jaxrl_fast.parallel.arrays import put
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.rl.normalize import Stats
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training.init_source import AGENT, ORIGIN, WEIGHTS, Arrays, Source
from jaxrl_fast.types import Agent, PyTree
from jaxrl_fast.utils import files
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.parsing import nearest
from jaxrl_fast.utils.random import key_of_seed

FILE = "init.safetensors"  # in the run's folder: what it started from


class Start(NamedTuple):
    """What a run starts from."""

    arrays: Arrays  # by name, as in its checkpoints: [S, ...] if it has several seeds
    note: str  # for the header


def fit(source: Source, agent: Agent, algo: str, seeds: Sequence[int]) -> Start:
    """Return what the seeds of a run start from.

    Heads stay new if the source's are of other actions, and so does a critic that reads actions.

    Raises:
        ValueError: If the source lacks an array, or has one that does not fit, or not the seeds.
    """
    state = jax.eval_shape(agent.init, key_of_seed(0))
    wanted = loadable(agent, state)
    if not wanted:
        raise ValueError(f"{ORIGIN}: algorithm {algo} must define Agent.parameters, got the whole state; define it")
    of = pieces.pieces(wanted)
    if source.piece:
        pieces.check(ORIGIN, [source.piece], of.values(), [pieces.NETWORK])
    _check_normalizers(source, state)
    pick, found = _picked_seeds(source, seeds), _matched(source, wanted)
    chosen = {name: x for name, x in wanted.items() if _belongs(source.piece, name, of[name])}
    new = _new_heads(source, chosen, found, of)
    arrays = {}
    for name in sorted(chosen, key=lambda name: (name in found, "head" in of[name])):  # the cause of a problem first
        x = chosen[name]
        if name in new or name not in found and not _must_have(source, of[name]):
            continue
        if name not in found:
            remedy = "use the algorithm and the network of that run"
            raise ValueError(f"{ORIGIN}: needs an array {name} {_shape(x)}, got none in {source.name}; {remedy}")
        shape = found[name].shape[bool(source.seeds) :]
        if shape != x.shape or found[name].dtype.kind != np.dtype(x.dtype).kind:
            problem = f"{name} must be {_shape(x)}, got {found[name].dtype}{list(shape)} in {source.name}"
            raise ValueError(f"{ORIGIN}: {problem}; use the network of that run, or load another piece")
        value = found[name][pick] if pick is not None else found[name]
        if not np.isfinite(value).all():
            raise ValueError(f"{ORIGIN}: {name} must be finite, got NaN or infinity in {source.name}; use another run")
        arrays[name] = np.asarray(value, x.dtype)
    if not arrays:
        raise ValueError(f"{ORIGIN}: {source.name} must have arrays that fit this agent, got none; use another run")
    rest = [name for name in wanted if name not in arrays]
    return Start(arrays | _copies(state, arrays), _note(source, seeds, rest, of))


def loadable(agent: Agent, state: PyTree) -> dict[str, Any]:
    """Return an agent's parameters and statistics by name, with their shapes, without copies and those of a bonus.

    `state` has the shapes of the agent's state.
    """
    names = checkpoint.names({"agent": state})
    if agent.parameters(state) is state:
        return {}
    learned = {id(x) for x in jax.tree.leaves(agent.parameters(state))}
    is_stats = lambda x: isinstance(x, Stats)
    learned |= {id(x) for s in jax.tree.leaves(state, is_leaf=is_stats) if is_stats(s) for x in s}
    chosen = {name: x for name, x in names.items() if id(x) in learned or "/batch_stats/" in name}
    return {name: x for name, x in chosen.items() if _original(name) == name and "/bonus/" not in name}


def weights(agent: Agent, state: PyTree) -> dict[str, bytes]:
    """Return the file of an exported policy from which a run can start: the actor's arrays by name, and its normalizer.

    Without `Agent.parameters`, return no file.
    """
    arrays = loadable(agent, state)
    of = pieces.pieces(arrays)
    chosen = {n: np.asarray(x, order="C") for n, x in arrays.items() if _is_observed(n) or _acts(of[n])}
    return {WEIGHTS: safetensors.numpy.save(chosen)} if chosen else {}


def _acts(own: frozenset[str]) -> bool:
    """Return whether arrays of these pieces are an actor's, or of a network that is both actor and critic."""
    return bool(own) and ("actor" in own or "critic" not in own)


def _original(name: str) -> str:
    """Return the name of the array of which an array is a copy at the start, or the same name."""
    name = name.replace(f"{AGENT}pool/", f"{AGENT}learner/", 1)
    return name.replace("/target_params/", "/params/", 1)


def _is_observed(name: str) -> bool:
    """Return whether an array is of the normalizer of observations."""
    return "/observations/" in name


def _belongs(piece: str, name: str, own: frozenset[str]) -> bool:
    """Return whether an array is loaded with a piece, to which the normalizer of its input belongs."""
    return not piece or _is_observed(name) or piece in own or piece == pieces.NETWORK and bool(own)


def _must_have(source: Source, own: frozenset[str]) -> bool:
    """Return whether a source must have an array of these pieces."""
    return bool(own) and source.kind == "run" or source.kind == "export" and _acts(own)


def _matched(source: Source, wanted: Mapping[str, Any]) -> Arrays:
    """Return the arrays of a source by the names of the new run. A file's names may lack their beginning."""
    if source.kind != "file":
        of = pieces.pieces(source.arrays)
        for name in sorted(source.arrays.keys() - wanted.keys()):
            is_needed = of[name] and "head" not in of[name] and _belongs(source.piece, name, of[name])
            if is_needed and _original(name) == name:
                problem = f"{source.name} has an array {name}, got an agent without it"
                raise ValueError(f"{ORIGIN}: {problem}; use the algorithm and the network of that run")
        return {name: x for name, x in source.arrays.items() if name in wanted}
    found: dict[str, np.ndarray] = {}
    for name, x in source.arrays.items():
        ends = [full for full in wanted if full == name or full.endswith(f"/{name}")]
        if len(ends) != 1:
            problem = f"must name one array of this agent, got {name} in {source.name}"
            hint = f"; it may be {' or '.join(ends[:2])}" if ends else nearest(name, wanted)
            raise ValueError(f"{ORIGIN}: {problem}{hint or f'; one is {next(iter(wanted))}'}")
        found[ends[0]] = x
    return found


def _check_normalizers(source: Source, state: PyTree) -> None:
    """Raise ValueError if only one of the two runs normalizes observations, since networks read the result."""
    normalizes = any(map(_is_observed, checkpoint.names({"agent": state})))
    normalized = any(_is_observed(f"/{name}") for name in source.arrays)
    if normalized and not normalizes or source.kind != "file" and normalizes and not normalized:
        is_set = lambda value: str(value).lower()
        problem = f"must be {is_set(normalized)}, as in {source.name}, got {is_set(normalizes)}"
        raise ValueError(f"normalize_observations: {problem}; set it to {is_set(normalized)}")


def _new_heads(source: Source, chosen: Mapping[str, Any], found: Arrays, of: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the names of all arrays that depend on the actions, if the source has other actions; else none."""
    is_head = lambda name: "actor.head" in of[name] or of[name] == {"head"} or name.endswith("/log_temperature")
    reads_action = lambda name: "critic" in of[name] and ("/critic/" in name or "/batch_stats/" in name)
    fits = lambda name: name in found and found[name].shape[bool(source.seeds) :] == chosen[name].shape
    heads = {name for name in chosen if is_head(name)}
    has_std = lambda names: any(name.endswith("/log_std") for name in names)
    same_kind = source.kind == "file" or has_std(source.arrays) == has_std(chosen)
    needed = {name for name in heads if name in found or _must_have(source, of[name])}
    if not heads or same_kind and all(map(fits, needed)):
        return set()
    return heads | {name for name in chosen if reads_action(name)}


def _picked_seeds(source: Source, seeds: Sequence[int]) -> Any:
    """Return the indices of the source's seeds [S], or one; None if it has no axis of seeds."""
    if not source.seeds:
        return None
    if missing := [seed for seed in seeds if seed not in source.seeds]:
        first, last = source.seeds[0], source.seeds[-1]
        raise ValueError(
            f"{ORIGIN}: each seed starts from the same seed of {source.name}, which has {first} to {last}, got "
            f"{missing[0]}; use seed {first}"
        )
    places = [source.seeds.index(seed) for seed in seeds]
    return np.array(places) if len(seeds) > 1 else places[0]


def _copies(state: PyTree, arrays: Arrays) -> dict[str, np.ndarray]:
    """Return the target networks and earlier policies that are copies of loaded arrays, by name."""
    found = {}
    for name, x in checkpoint.names({"agent": state}).items():
        original = _original(name)
        if original == name or original not in arrays:
            continue
        value = arrays[original]
        if name.startswith(f"{AGENT}pool/"):  # of self-play: a leading axis of earlier policies, after that of seeds
            place = value.ndim - len(x.shape[1:])
            value = np.repeat(np.expand_dims(value, place), x.shape[0], place)
        found[name] = value
    return found


def _note(source: Source, seeds: Sequence[int], new: Sequence[str], of: Mapping[str, frozenset[str]]) -> str:
    """Return the header's line: from where, which seeds, and which pieces are new."""
    piece = f", {source.piece} only" if source.piece else ""
    each = ""
    if len(seeds) > 1:
        each = ", each seed from the same seed" if source.seeds else ", all seeds from the same parameters"
    elif source.seeds:
        each = f", seed {seeds[0]}"
    names = dict.fromkeys(_short(name, of[name]) for name in new)
    return f"from {source.name}{piece}{each}" + (f"; new: {', '.join(names)}" if names else "")


def _short(name: str, own: frozenset[str]) -> str:
    """Return the piece that an array belongs to, in words."""
    if own:
        return max(sorted(own), key=len).replace(".", " ")
    if _is_observed(name):
        return "normalizer of observations"
    return "scale of rewards" if "/rewards/" in name else name.rpartition("/")[2].replace("_", " ")


def _shape(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def keep(start: Start, folder: Path) -> None:
    """Write what a new run starts from into its folder."""
    with files.atomic_write(folder / FILE) as path:
        arrays = {name: np.asarray(x, order="C") for name, x in start.arrays.items()}
        safetensors.numpy.save_file(arrays, path, {"note": start.note})


def kept(folder: Path) -> Start:
    """Return what a run without a checkpoint started from. Raise ValueError if the file is missing or damaged."""
    try:
        with safetensors.safe_open(folder / FILE, framework="numpy") as file:
            names = file.keys()  # the file itself is not iterable
            arrays = {name: file.get_tensor(name) for name in names}
            return Start(arrays, file.metadata()["note"])
    except (OSError, KeyError, TypeError, safetensors.SafetensorError) as error:
        problem = f"needs {folder / FILE}, which cannot be read ({why(error)})"
        raise ValueError(f"resume: {problem}; start a new run with config {folder / paths.CONFIG}") from error


def apply(start: Start, state: PyTree, placement: Placement) -> PyTree:
    """Return the initial state of a program with the loaded arrays in their places, on the devices."""

    def replaced(path: Any, x: jax.Array) -> jax.Array:
        value = start.arrays.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        if value is None:
            return x
        several, shards = placement.num_seeds > 1, placement.num_shards > 1
        own = x.shape[several + shards :]
        if several and value.ndim > len(own):
            value = value[np.minimum(np.arange(x.shape[0]), len(value) - 1)]  # padded with further seeds
        value = value.reshape((*value.shape[: value.ndim - len(own)], *(1,) * shards, *own))
        return put(np.array(np.broadcast_to(value, x.shape)), x.sharding)

    return jax.tree_util.tree_map_with_path(replaced, state)


def check_frozen(names: Sequence[str], agent: Agent) -> None:
    """Raise ValueError for a frozen piece that the agent does not have."""
    if names:
        parameters = agent.parameters(jax.eval_shape(agent.init, key_of_seed(0)))
        pieces.check("freeze", names, pieces.pieces(checkpoint.names(parameters)).values())
