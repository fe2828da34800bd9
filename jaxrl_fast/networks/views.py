"""Select the parts of an observation that a network sees, so that a critic may see more than its actor.

In simulation, a critic may read what a robot does not measure (Pinto et al. 2018, "Asymmetric actor critic for
image-based robot learning"). Only the actor acts, so the policy needs its own parts alone. Parts are those of
dictionaries and tuples. A part is named by its path: "velocity", or "arm/velocity" and "1/velocity" within a part.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_fast.options.sees import ALL, Sees
from jaxrl_fast.types import PyTree
from jaxrl_fast.utils.parsing import nearest

View = Callable[[PyTree], PyTree]  # of an observation, with any leading axes


def everything(obs: PyTree) -> PyTree:
    """Return the whole observation."""
    return obs


def views(config: Any, obs: PyTree) -> tuple[View, View]:
    """Return what the actor and the critic of an algorithm's options see, one function if both see the same parts.

    Raises ValueError as `view`.
    """
    of_actor, of_critic = (view(f"{name}.sees", obs, _names(config, name)) for name in ("actor", "critic"))
    return of_actor, of_actor if {*_names(config, "actor")} == {*_names(config, "critic")} else of_critic


def of_actor(config: Any, obs: PyTree) -> PyTree:
    """Return the part of an observation that an algorithm's actor sees."""
    return view("actor.sees", obs, _names(config, "actor"))(obs)


def _names(config: Any, network: str) -> Sequence[str]:
    """Return the names of the parts that the "actor" or the "critic" of an algorithm's options sees."""
    part = getattr(config, network)
    return part.sees if isinstance(part, Sees) else (ALL,)


def view(option: str, obs: PyTree, names: Sequence[str]) -> View:
    """Return the function from observations like `obs` (ShapeDtypeStruct) to the named parts, in their structure.

    Raises:
        ValueError: If there is no such part. The message lists those that exist.
    """
    if ALL in names:
        return everything
    paths = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in jax.tree.leaves_with_path(obs)]
    if paths == [""]:
        problem = f"needs an observation with parts, such as a Dict, got {' '.join(names)} for one array"
        raise ValueError(f"{option}: {problem} {list(obs.shape)}; use {ALL}")
    known = dict.fromkeys(part for path in paths for part in itertools.accumulate(path.split("/"), "{}/{}".format))
    for name in names or [""]:
        if name not in known:
            hint = nearest(name, known)
            problem = f"must name parts of the observation, which are {', '.join(known)}, got {name or 'none'}"
            raise ValueError(f"{option}: {problem}{hint or f'; use {ALL} or some of these'}")
    seen = [any(path == name or path.startswith(f"{name}/") for name in names) for path in paths]
    return everything if all(seen) else lambda obs: select(obs, seen)


def select(obs: PyTree, seen: Sequence[bool]) -> PyTree:
    """Return the leaves of an observation that are seen; dictionaries and tuples lose the others."""
    structure: Any
    leaves, structure = jax.tree.flatten(obs)
    hidden = object()
    return _without(structure.unflatten([x if flag else hidden for x, flag in zip(leaves, seen, strict=True)]), hidden)


def through(view: View, network: Any, with_action: bool = False) -> Any:
    """Return a Network that sees a view of its observations; `with_action`: its input is (obs, action)."""
    if view is everything:
        return network
    of = (lambda inputs: (view(inputs[0]), inputs[1])) if with_action else view
    return network._replace(
        apply=lambda params, obs, *more, **options: network.apply(params, of(obs), *more, **options),
        step=lambda params, obs, *more, **options: network.step(params, of(obs), *more, **options),
        unroll=lambda params, obs, *more, **options: network.unroll(params, of(obs), *more, **options),
        train=lambda params, stats, obs: network.train(params, stats, of(obs)),
    )


def _without(tree: PyTree, hidden: object) -> PyTree:
    if isinstance(tree, dict):
        parts = {name: _without(part, hidden) for name, part in tree.items()}
        return {name: part for name, part in parts.items() if part is not hidden} or hidden
    if type(tree) in (list, tuple):
        return type(tree)(part for part in (_without(part, hidden) for part in tree) if part is not hidden) or hidden
    if all(x is hidden for x in jax.tree.leaves(tree)):
        return hidden
    return jax.tree.map(lambda x: None if x is hidden else x, tree)
