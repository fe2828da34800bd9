"""Test the schedule against a slow loop over single updates, without JAX."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_fast.training import schedule
from jaxrl_fast.training.schedule import Cadence, Kind, Progress

ROOT = Path(__file__).parents[2]


def carry_out(cadence, num_updates, chunk_lengths, stop_at=None, save_due=lambda: False, start=0):
    """Carry out a schedule as the trainer does; chunks are at most as long as the next of `chunk_lengths`.

    Return events as (kind, update); for SUBMIT, the update is the end of the chunk.
    """
    pending, happened = [], []
    now = Progress(start, start, 0, num_updates, saved=start if start else None)
    for step in range(100_000):
        due = save_due() and now.num_pending < 2
        kind, limit = schedule.next_event(cadence, now._replace(save_due=due))
        if kind is Kind.STOP:
            assert not pending and now.finished == now.submitted
            return [*happened, (kind, now.finished)]
        if kind is Kind.SUBMIT:
            assert now.submitted < limit and len(pending) < schedule.MAX_PENDING
            end = min(limit, now.submitted + chunk_lengths[step % len(chunk_lengths)])
            pending.append(end)
            happened.append((kind, end))
            now = now._replace(submitted=end)
        elif kind is Kind.COLLECT:
            now = now._replace(finished=pending.pop(0))
            happened.append((kind, now.finished))
            if stop_at is not None and now.finished >= stop_at:
                now = now._replace(stopping=True)
        else:
            assert not pending, "the device must be idle at exactly this update"
            happened.append((kind, now.finished))
            now = now._replace(**{"evaluated" if kind is Kind.EVALUATE else "saved": now.finished})
        now = now._replace(num_pending=len(pending))
    raise AssertionError("the schedule never stops")


def reference(cadence, num_updates):
    """Return the expected events, from a loop over all updates."""
    happened = []
    for update in range(1, num_updates):
        if cadence.eval_every and update % cadence.eval_every == 0:
            happened.append((Kind.EVALUATE, update))
        if cadence.save_every and update % cadence.save_every == 0:
            happened.append((Kind.SAVE, update))
    happened += [(Kind.SAVE, num_updates)] + [(Kind.EVALUATE, num_updates)] * cadence.eval_at_end
    return [*happened, (Kind.STOP, num_updates)]


without_chunks = lambda happened: [one for one in happened if one[0] not in (Kind.SUBMIT, Kind.COLLECT)]
ends_of_chunks = lambda happened: [update for kind, update in happened if kind is Kind.SUBMIT]
periods, flags = [st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)], [st.booleans()] * 3
cadences = st.builds(Cadence, *periods, *flags).map(
    lambda cadence: cadence._replace(eval_at_end=cadence.eval_at_end or cadence.eval_every > 0)
)
lengths = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@given(cadences, st.integers(1, 60), lengths)
def test_schedule_equals_slow_loop_for_any_chunk_lengths(cadence, num_updates, chunk_lengths):
    assert without_chunks(carry_out(cadence, num_updates, chunk_lengths)) == reference(cadence, num_updates)


@given(cadences, st.integers(1, 60), lengths)
def test_every_update_is_submitted_once_and_collected_in_order(cadence, num_updates, chunk_lengths):
    happened = carry_out(cadence, num_updates, chunk_lengths)
    ends = ends_of_chunks(happened)
    assert ends == sorted(set(ends)) and ends[-1] == num_updates
    assert ends == [update for kind, update in happened if kind is Kind.COLLECT]


@given(cadences, st.integers(1, 60), lengths)
def test_no_chunk_crosses_record_boundary_when_cut_at_records(cadence, num_updates, chunk_lengths):
    happened = carry_out(cadence._replace(cut_at_records=True), num_updates, chunk_lengths)
    starts = [0, *ends_of_chunks(happened)]
    for start, end in pairwise(starts):
        assert start // cadence.record_length == (end - 1) // cadence.record_length


@given(cadences, st.integers(2, 60), lengths, st.integers(1, 59))
def test_stop_collects_pending_chunks_and_then_saves(cadence, num_updates, chunk_lengths, stop_at):
    happened = carry_out(cadence, num_updates, chunk_lengths, min(stop_at, num_updates - 1))
    kind, update = happened[-1]
    assert kind is Kind.STOP
    saved = (Kind.SAVE, update) in happened
    assert saved == (cadence.saves_at_stop or schedule.is_multiple(update, cadence.save_every))
    assert happened[-2] == ((Kind.SAVE, update) if saved else (Kind.COLLECT, update)), "no evaluation after a stop"


@given(cadences, st.integers(1, 60), lengths, st.integers(0, 60))
def test_resumed_schedule_has_remaining_events(cadence, num_updates, chunk_lengths, start):
    start = min(start, num_updates)
    happened = without_chunks(carry_out(cadence, num_updates, chunk_lengths, start=start))
    left = [one for one in reference(cadence, num_updates) if one[1] >= start > 0 or start == 0]
    assert happened == [one for one in left if one != (Kind.SAVE, start)]  # which exists already


@given(cadences, st.integers(1, 60), lengths, st.lists(st.booleans(), min_size=1, max_size=9))
def test_timed_saves_do_not_change_other_events(cadence, num_updates, chunk_lengths, due):
    clock = iter(range(10**9))
    happened = carry_out(cadence, num_updates, chunk_lengths, save_due=lambda: due[next(clock) % len(due)])
    others = [one for one in without_chunks(happened) if one[0] is not Kind.SAVE]
    assert others == [one for one in reference(cadence, num_updates) if one[0] is not Kind.SAVE]
    saves = [update for kind, update in happened if kind is Kind.SAVE]
    assert saves == sorted(set(saves)), "no update is saved twice"


def test_at_most_two_chunks_are_pending():
    """A chunk is submitted before the metrics of the previous one are read, and a third one is not."""
    kinds = [kind.name for kind, _ in carry_out(Cadence(1), 5, [1])]
    assert kinds == ["SUBMIT", *4 * ["SUBMIT", "COLLECT"], "COLLECT", "SAVE", "EVALUATE", "STOP"]


def test_evaluation_precedes_save_of_same_update_except_at_end():
    """During a run, the checkpoint includes the evaluation. At the end it does not: a longer run would not have it."""
    happened = without_chunks(carry_out(Cadence(2, eval_every=2, save_every=2), 4, [9]))
    evaluate, save = Kind.EVALUATE, Kind.SAVE
    assert happened == [(evaluate, 2), (save, 2), (save, 4), (evaluate, 4), (Kind.STOP, 4)]


@pytest.mark.parametrize(("env_steps", "updates"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_periods_are_rounded_up_to_updates(env_steps, updates):
    assert schedule.to_updates(env_steps, 64) == updates


def test_schedule_imports_neither_jax_nor_numpy():
    code = "import sys; from jaxrl_fast.training import schedule; print({'jax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
