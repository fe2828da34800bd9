"""Add a bonus to an on-policy algorithm. Without one, all functions of this module change nothing."""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl_fast.rl import sgd
from jaxrl_fast.rl.bonuses import bc, distill, rnd
from jaxrl_fast.rl.bonuses.record import Added
from jaxrl_fast.rl.bonuses.record import Bonus as Bonus
from jaxrl_fast.rl.policies import Policy
from jaxrl_fast.types import Array, EnvSpec, Key, Metrics, Parallelism, PyTree, Rollout

Objective = Callable[..., tuple[Array, Metrics]]  # (context, params, batch) to a sum of weighted rows and metrics
MAKERS: dict[str, Callable[..., Bonus]] = {
    "bc": bc.make,
    "distill": distill.make,
    "rnd": rnd.make,
}  # by word: (config, spec, policy, num_updates, parallelism) to a Bonus


def make(config: Any, spec: EnvSpec, policy: Policy, num_updates: int, parallelism: Parallelism) -> Bonus | None:
    """Return the bonus that the options choose, or None. Raise ValueError if it does not fit the environment."""
    maker = MAKERS.get(config.bonus.kind)
    return maker and maker(config, spec, policy, num_updates, parallelism)


def init(bonus: Bonus | None, params: PyTree, key: Key) -> tuple[PyTree, PyTree]:
    """Return an algorithm's parameters, to which those of the bonus are added, and the state of the bonus."""
    if bonus is None:
        return params, None
    learned, state = bonus.init(jax.random.fold_in(key, 1))  # the policy's parameters are the same without a bonus
    return params if learned is None else params | {"bonus": learned}, state


def without(state: Any) -> Any:
    """Return an algorithm's state with None for what its bonus keeps and learns, which acting ignores."""
    learned = {"bonus": None} if "bonus" in state.params else {}
    return state._replace(params={**state.params, **learned}, bonus=None)


def prepare(bonus: Bonus | None, state: Any, rollout: Rollout, advantage: Array) -> Added:
    """Return what a bonus adds to an update, whose advantages [T, N] are given."""
    return Added(None, advantage, None, {}) if bonus is None else bonus.prepare(state, rollout, advantage)


def summarize(bonus: Bonus | None, moments: PyTree) -> Metrics:
    """Return metrics of a bonus from its moments of all shards."""
    return {} if bonus is None else bonus.summarize(moments)


def with_loss(bonus: Bonus | None, objective: Objective) -> Objective:
    """Return an objective to which the bonus's loss is added."""
    if bonus is None or (loss := bonus.loss) is None:
        return objective

    def both(context: Any, params: PyTree, batch: Any) -> tuple[Array, Metrics]:
        total, metrics = objective(context, params, batch)
        added, more = sgd.weighted_sums(batch.weight, *loss(params, batch))
        return total + added, {**metrics, **more}

    return both
