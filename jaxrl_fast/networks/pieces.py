"""Name the pieces of an agent's parameters, so that some can be loaded from another run, or frozen.

    torso, memory, head     of every network
    actor, critic           of an agent that has both; actor.torso and critic.head are pieces of these

A torso that actor and critic share belongs to both. A logarithm of standard deviations belongs to the actor's head.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_fast.networks import flat
from jaxrl_fast.types import PyTree

NETWORK = "network"  # all pieces together
PARTS = {"torso": "torso", "critic_torso": "torso", "memory": "memory", "critic_memory": "memory"}
PARTS |= {"actor_head": "head", "critic_head": "head", "log_std": "head"}
ROLES: dict[str, tuple[str, ...]] = {"actor_head": ("actor",), "log_std": ("actor",), "critic_head": ("critic",)}
ROLES |= {"critic_torso": ("critic",), "critic_memory": ("critic",)}


def pieces(paths: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the pieces that each array belongs to, by its path: "params/network/params/actor_head/bias".

    A path may have any beginning. An array outside of these networks, such as a temperature or a
    bonus, belongs to none.
    """
    split = {path: path.split("/") for path in paths}
    modules = {name for names in split.values() for name in names}
    shared = ("actor",) if "critic_torso" in modules else ("actor", "critic")
    both = shared if "actor_head" in modules else ()

    def of(names: Sequence[str]) -> frozenset[str]:
        place = next((i for i, name in enumerate(names) if _part(name)), None)
        if place is None or "bonus" in names[:place]:
            return frozenset()
        part = _part(names[place])
        above = [name for name in names[:place] if name in ("actor", "critic")]
        above += ["critic"] * ("batch_stats" in names[:place])  # only critics have running statistics
        roles = above or ROLES.get(names[place], both)
        return frozenset({part, *roles, *(f"{role}.{part}" for role in roles)})

    return {path: of(names) for path, names in split.items()}


def check(option: str, names: Iterable[str], known: Iterable[frozenset[str]], more: Sequence[str] = ()) -> None:
    """Raise ValueError for a name that no array has, which lists the names that exist."""
    exist = [*more, *sorted({name for of_one in known for name in of_one})]
    for name in names:
        if name not in exist:
            problem = f"must be a piece of this agent's network, got {name}"
            raise ValueError(f"{option}: {problem}; there are {', '.join(exist)}")


def without(tree: PyTree, names: Sequence[str], prefix: str = "") -> PyTree:
    """Return a gradient with zeros in place of these pieces. `prefix` is the beginning of the paths in the tree."""
    gradient = flat.unpack(tree)
    keys = [path for path, _ in jax.tree.leaves_with_path(gradient)]
    paths = [prefix + jax.tree_util.keystr(path, simple=True, separator="/") for path in keys]
    known = pieces(paths)
    structure: Any
    leaves, structure = jax.tree.flatten(gradient)
    kept = [jnp.zeros_like(x) if known[p] & {*names} else x for p, x in zip(paths, leaves, strict=True)]
    cut: PyTree = structure.unflatten(kept)
    return flat.pack(cut) if flat.is_packed(tree) else cut


def _part(module: str) -> str:
    """Return the part that a module of a network is, or ""."""
    return "head" if module.startswith(("heads_", "streams_")) else PARTS.get(module, "")
