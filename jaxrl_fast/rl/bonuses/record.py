"""Define what a bonus is: functions that add to the advantages and to the loss of an on-policy algorithm."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_fast.types import Array, Key, Metrics, PyTree, Rollout


class Added(NamedTuple):
    """What a bonus adds to an update of T steps in N environments."""

    state: PyTree  # the bonus's state after the update
    advantage: Array  # [T, N] f32, in place of the given one
    rows: PyTree  # [T, N, ...] for the bonus's loss, which are put into minibatches with the others
    metrics: Metrics  # of the rollout; with shards, the same on all of them
    moments: PyTree = ()  # Moments of this shard's rows, which are pooled over all shards for `Bonus.summarize`


class Bonus(NamedTuple):
    """A bonus, as functions of an algorithm's state S, in which it has `S.params["bonus"]` and `S.bonus`."""

    # key to learned parameters, or None, and the bonus's state, in which a key for its own random numbers may be
    init: Callable[[Key], tuple[PyTree, PyTree]]
    # (S, rollout with observations as they are, advantage [T, N]) to what is added
    prepare: Callable[[Any, Rollout, Array], Added]
    # (all parameters, batch [B, ...] whose `bonus` are the bonus's rows) to the loss of each row [B] and metrics [B]
    loss: Callable[[PyTree, Any], tuple[Array, Metrics]] | None = None
    summarize: Callable[[PyTree], Metrics] = lambda moments: {}  # pooled moments to metrics
