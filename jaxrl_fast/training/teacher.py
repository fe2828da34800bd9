"""Load the policy of another run as a teacher: a function from observations to distributions over actions."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_fast import agents
from jaxrl_fast.config import resume
from jaxrl_fast.rl.policies import Sampled
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training import init_from, init_source
from jaxrl_fast.types import Agent, Env, Parallelism, PolicyInput, PyTree
from jaxrl_fast.types.spaces import mask_size
from jaxrl_fast.utils import files
from jaxrl_fast.utils.random import key_of_seed

ORIGIN = "bonus.run"


def load(name: str, env: Env) -> Any:
    """Return the policy of a run, or of one of its checkpoints, for environments of the same observations and actions.

    It is a `jax.tree_util.Partial`, whose leaves are the parameters, from a PolicyInput [B, ...] to distributions.

    Raises:
        ValueError: If the run does not exist, its policy is not a distribution or has a memory, it has several members,
            or an array does not fit. The message names it.
    """
    if not name:
        raise ValueError(f"{ORIGIN}: must be the directory of a run, got none; give one")
    path = files.path_of(name, ORIGIN)
    folder = path.parents[1] if (path / checkpoint.MANIFEST).is_file() else path
    source, settings = init_source.read_run(name, path, ORIGIN), resume.of_run(folder)
    algorithm = agents.load(settings.algo)
    own = (Parallelism(),) if getattr(algorithm, "SUPPORTS", ()) else ()
    agent: Agent = algorithm.make(settings.agent, env.spec, 1, *own)
    if jax.tree.leaves(agent.initial_carry):
        raise ValueError(f"{ORIGIN}: must have a policy without memory or lasting noise, got {name}; use another run")
    of_module = getattr(algorithm, "distribution_of", lambda config, spec: None)
    act = of_module(settings.agent, env.spec) or partial(_distribution, agent)
    like = jax.eval_shape(agent.init, key_of_seed(0))
    mask = np.ones((1, mask_size(env.spec.action)), bool) if env.spec.has_action_mask else None
    given: Any = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), env.spec.obs), mask
    if not hasattr(jax.eval_shape(act, like, PolicyInput(*given)), "kl"):
        raise ValueError(f"{ORIGIN}: must have a policy that is a distribution, got {settings.algo} of {name}; use ppo")
    return jax.tree_util.Partial(act, _state(source, agent, like))


def _distribution(agent: Agent, state: PyTree, inputs: PolicyInput) -> PyTree:
    """Return the distributions with which an agent acts, [B, ...]; something else if its decisions do not name them."""
    num_rows = len(jax.tree.leaves(inputs.obs)[0])
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(key_of_seed(0), 1, num_rows))
    extras = agent.explore(state, inputs, agent.initial_carry, noise).extras
    return extras.policy if isinstance(extras, Sampled) else extras


def _state(source: init_source.Source, agent: Agent, like: PyTree) -> PyTree:
    """Return an agent's state of these shapes with parameters and statistics, on the host, and None for the rest."""
    needed = init_from.loadable(agent, like)

    def one(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in needed:
            return None
        found = source.arrays.get(name)
        value = found if found is None or not source.seeds else found[0]
        if value is None or value.shape != x.shape:
            got = "none" if value is None else f"{value.dtype}{list(value.shape)}"
            problem = f"{name} must be {x.dtype}{list(x.shape)}, got {got} in {source.name}"
            raise ValueError(f"{ORIGIN}: {problem}; use a run with these observations and actions")
        if not np.isfinite(value).all():
            problem = f"{name} must be finite, got NaN or infinity in {source.name}"
            raise ValueError(f"{ORIGIN}: {problem}; use another checkpoint")
        return np.asarray(value, x.dtype)

    return jax.tree_util.tree_map_with_path(one, {"agent": like})["agent"]
