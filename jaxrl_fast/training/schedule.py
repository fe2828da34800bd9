"""Choose the next action of a run: submit updates, collect a chunk, evaluate, save or stop. Plain integers only."""

from enum import Enum
from typing import NamedTuple

MAX_PENDING = 2  # chunks: one that the device computes, and one that waits behind it


class Kind(Enum):
    """The actions of the trainer."""

    SUBMIT = "submit"  # updates, as one chunk
    COLLECT = "collect"  # the oldest pending chunk, and write the records that it completes
    EVALUATE = "evaluate"
    SAVE = "save"
    STOP = "stop"


class Event(NamedTuple):
    """The next action of the trainer."""

    kind: Kind
    limit: int = 0  # SUBMIT: the update at which the chunk must end at the latest


class Cadence(NamedTuple):
    """The periods of a run in updates; 0 means never."""

    record_length: int
    eval_every: int = 0
    save_every: int = 0
    cut_at_records: bool = False  # no chunk passes the end of a record
    saves_at_stop: bool = True  # False: a run that is stopped saves at multiples of `save_every` only
    eval_at_end: bool = True


class Progress(NamedTuple):
    """The progress of a run. Counts are updates since its beginning."""

    finished: int  # their metrics are on the host
    submitted: int
    num_pending: int  # chunks between the two
    last_update: int  # where the run ends; it may decrease during the run
    evaluated: int | None = None  # where it was evaluated last
    saved: int | None = None  # where it was saved last, whether or not that succeeded
    stopping: bool = False  # a signal or a failure ends the run
    save_due: bool = False  # by the clock
    change_at: int | None = None  # where options of the environments change


def to_updates(env_steps: int, steps_per_update: int) -> int:
    """Return the number of updates that take at least `env_steps` environment steps; 0 for 0."""
    return -(-env_steps // steps_per_update)


def is_multiple(num_updates: int, every: int) -> bool:
    """Return whether the updates, at least one, are a multiple of `every`; False if `every` is 0."""
    return every > 0 and num_updates > 0 and num_updates % every == 0


def next_multiple(num_updates: int, every: int) -> int:
    """Return the first multiple of `every` above `num_updates`."""
    return (num_updates // every + 1) * every


def next_event(cadence: Cadence, now: Progress) -> Event:
    """Return the next action.

    No chunk passes an evaluation or a save. Both need the state of exactly that update, so they wait until the device
    is idle. In between, a chunk is submitted before the metrics of the previous chunk are read.
    """
    if now.num_pending == 0:
        ends = now.stopping or now.finished >= now.last_update
        if kind := _kind_at_end(cadence, now) if ends else _kind_at_boundary(cadence, now):
            return Event(kind)
    limit = _limit(cadence, now)
    # A save by the clock waits for the pending chunks. Right after a save it does not, so that the run advances.
    held = now.stopping or now.save_due and now.saved != now.finished
    if now.num_pending == 0 or now.num_pending < MAX_PENDING and now.submitted < limit and not held:
        return Event(Kind.SUBMIT, _cut(cadence, now.submitted, limit))
    return Event(Kind.COLLECT)


def _kind_at_boundary(cadence: Cadence, now: Progress) -> Kind | None:
    """Return the action due before more updates. Evaluations come first, as a part of the record that ends here."""
    if is_multiple(now.finished, cadence.eval_every) and now.evaluated != now.finished:
        return Kind.EVALUATE
    if (is_multiple(now.finished, cadence.save_every) or now.save_due) and now.saved != now.finished:
        return Kind.SAVE
    return None


def _kind_at_end(cadence: Cadence, now: Progress) -> Kind:
    """Return the next action at the end of a run.

    The save precedes the final evaluation, which is not a part of it. So a resumed run writes the same records as a run
    that was never stopped.
    """
    may_save = not now.stopping or cadence.saves_at_stop or is_multiple(now.finished, cadence.save_every)
    if may_save and now.saved != now.finished:
        return Kind.SAVE
    if not now.stopping and now.evaluated != now.finished and cadence.eval_at_end:
        return Kind.EVALUATE
    return Kind.STOP


def _limit(cadence: Cadence, now: Progress) -> int:
    """Return the next update at which the device must be idle."""
    periods = [every for every in (cadence.eval_every, cadence.save_every) if every]
    change = [now.change_at] if now.change_at is not None and now.change_at > now.finished else []
    return min([now.last_update, *change, *(next_multiple(now.finished, every) for every in periods)])


def _cut(cadence: Cadence, submitted: int, limit: int) -> int:
    """Return the limit of one chunk.

    If a record may end the run, no chunk passes the end of a record. At most one chunk waits behind another, so each
    record is read before the second one after it is submitted. So the end of a run does not depend on the clock.
    """
    return min(limit, next_multiple(submitted, cadence.record_length)) if cadence.cut_at_records else limit
