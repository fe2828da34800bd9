"""Hide parts of the observation: the wrapper `hide`, which makes ordinary tasks partially observable.

A part is named by its path: "velocity" in a dictionary, "1" in a tuple or a vector, "arm/velocity" or "velocity/1"
within a part. Hidden parts leave the observation, whose shape shrinks. Rewards and scores stay those of the task.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from jaxrl_fast.envs.wrappers.wrapper import Rules, mapped, raw_parts, resized, wrap
from jaxrl_fast.types import Env, PyTree, TimeStep
from jaxrl_fast.utils.parsing import nearest

HIDDEN = object()  # takes the place of a part while a tree is built


class Visible(NamedTuple):
    """The visible part of an observation: for each part, the entries that stay, or None if all stay."""

    whole: PyTree  # shapes and dtypes of one observation
    entries: tuple[np.ndarray | None, ...]


def hide(env: Env, names: Sequence[str], keep_whole: bool = False) -> Env:
    """Return the environments without these parts of their observation.

    Args:
        env: The environments.
        names: Paths of parts.
        keep_whole: Whether `View.whole_obs` is needed. Whole observations then stay in the environments' state.

    Raises:
        ValueError: If a part does not exist or cannot be hidden alone, or if nothing would be left.
    """
    visible = find(env, names)
    changed = _with_rules(env, visible) if keep_whole else mapped(env, lambda timestep: _shown(visible, timestep))
    view = changed.view._replace(
        raw_obs=env.spec.obs if env.view.raw_obs is None else env.view.raw_obs,
        encode_obs=lambda obs: select(visible, env.view.encode_obs(obs)),
        info=(*env.view.info, f"hidden parts of the observation: {', '.join(names)} (wrap hide)"),
        resize=env.view.resize,
    )
    again = lambda other: hide(other, names, keep_whole)
    obs = of_spec(visible, visible.whole)
    return changed._replace(spec=env.spec._replace(obs=obs), view=resized(view, again))


def find(env: Env, names: Sequence[str]) -> Visible:
    """Return the visible part of observations without the named parts. Raise ValueError if a name does not fit."""
    spec = env.spec
    paths, shapes = _paths(spec.obs)
    both = zip(shapes, raw_parts(env), strict=True)
    lengths = [x.shape[0] if x.ndim == 1 and x.shape == raw.shape else 0 for x, raw in both]
    hidden: list[set[int]] = [set() for _ in shapes]
    absent, _ = _paths(jax.tree.map(lambda x: x is None or None, spec.obs, is_leaf=lambda x: x is None))
    for name in names:
        gone = _named(name, paths, lengths)
        if not gone and not any(is_within(path, (name,)) for path in absent):
            _refuse(env, name, paths, lengths)
        for i, entries in gone.items():
            hidden[i] |= entries
    kept = tuple(_kept(max(length, 1), gone) for length, gone in zip(lengths, hidden, strict=True))
    if not any(entries is None or entries.size for entries in kept):
        raise ValueError(
            f"wrap hide: must leave a part of the observation of {spec.id}, got {','.join(names)}; hide less"
        )
    return Visible(spec.obs, kept)


def of_spec(visible: Visible, whole: PyTree) -> PyTree:
    """Return shapes and dtypes of a visible observation, from the spec of a whole one."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), whole)
    shapes = jax.eval_shape(lambda obs: select(visible, obs), one)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)


def select(visible: Visible, obs: PyTree) -> PyTree:
    """Return the visible part of observations [n, ...].

    Hidden entries leave dictionaries, lists and tuples. A hidden field of any other record becomes None.
    """
    structure: Any = jax.tree.structure(obs)
    leaves = [
        x if kept is None else x[:, kept] if kept.size else HIDDEN
        for x, kept in zip(jax.tree.leaves(obs), visible.entries, strict=True)
    ]
    return _without_hidden(structure.unflatten(leaves))


def _with_rules(env: Env, visible: Visible) -> Env:
    """Return environments whose state keeps whole observations."""
    show = lambda timestep: (timestep.obs, _shown(visible, timestep))
    wrapped = wrap(env, Rules(show, lambda memory, timestep: show(timestep)))
    view = wrapped.view._replace(whole_spec=env.spec, whole_obs=lambda state, obs: state.memory[0])
    return wrapped._replace(view=view)


def _shown(visible: Visible, timestep: TimeStep) -> TimeStep:
    return timestep._replace(obs=select(visible, timestep.obs))


def _without_hidden(tree: PyTree) -> PyTree:
    if isinstance(tree, dict):
        parts = {name: _without_hidden(part) for name, part in tree.items()}
        return {name: part for name, part in parts.items() if part is not HIDDEN} or HIDDEN
    if type(tree) in (list, tuple):
        return type(tree)(part for part in map(_without_hidden, tree) if part is not HIDDEN) or HIDDEN
    if all(x is HIDDEN for x in jax.tree.leaves(tree)):
        return HIDDEN
    return jax.tree.map(lambda x: None if x is HIDDEN else x, tree)


def _named(name: str, paths: list[str], lengths: list[int]) -> dict[int, set[int]]:
    """Return the entries that a name means, by the index of their part; a part that is not a vector counts as one."""
    found = {}
    for i, (path, length) in enumerate(zip(paths, lengths, strict=True)):
        prefix, _, last = name.rpartition("/")
        if is_within(path, (name,)):
            found[i] = set(range(max(length, 1)))
        elif path == prefix and last.isdecimal() and int(last) < length:
            found[i] = {int(last)}
    return found


def _kept(num: int, gone: set[int]) -> np.ndarray | None:
    """Return which of the entries stay, or None if all do."""
    return np.array([i for i in range(num) if i not in gone], int) if gone else None


def path_of(keys: Any) -> str:
    """Return the path of a part, "" for an observation of one part, from JAX's keys for it."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def is_within(path: str, names: Collection[str]) -> bool:
    """Return whether the part of this path is named, or lies within a part that is."""
    return bool(path) and any(path == name or path.startswith(f"{name}/") for name in names)


def _paths(obs: PyTree) -> tuple[list[str], list[Any]]:
    """Return the path of each part and the parts."""
    found = jax.tree_util.tree_flatten_with_path(obs)[0]
    return [path_of(keys) for keys, _ in found], [part for _, part in found]


def _refuse(env: Env, name: str, paths: list[str], lengths: list[int]) -> NoReturn:
    """Raise ValueError for a name that fits no part."""
    env_id, obs = env.spec.id, env.spec.obs
    if paths != [""]:
        known = [part for path in paths for part in itertools.accumulate(path.split("/"), "{}/{}".format)]
        known = list(dict.fromkeys(known))
        hint = nearest(name, known) or f"; it has {', '.join(known)}"
        raise ValueError(f"wrap hide: must name parts of the observation of {env_id}, got {name}{hint}")
    if lengths[0]:
        most = lengths[0] - 1
        raise ValueError(
            f"wrap hide: must be entries 0 to {most} of the vector that {env_id} observes, got {name}; use one of these"
        )
    what = "the index of a state" if obs.ndim == 1 else f"an array of shape {list(obs.shape)}"
    raise ValueError(f"wrap hide: {env_id} observes {what}, which has no parts, got {name}; leave it out")
