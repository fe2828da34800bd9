"""Test records: which updates are held back or dropped, and how seeds are merged."""

import numpy as np
import pytest

from jaxrl_fast.metrics import records

pytestmark = pytest.mark.unit


def lengths(buffer, **how):
    """Return the number of updates of each record that can be taken."""
    return [rows["x"].shape[1] for rows in buffer.take(**how)]


def test_record_buffer_can_hold_back_record_that_ends_now():
    buffer = records.RecordBuffer(3)
    buffer.add({"x": np.arange(6)[None]})
    assert lengths(buffer, hold_last=True) == [3] and buffer.available == 3
    assert lengths(buffer, hold_last=True) == []
    buffer.add({"x": np.arange(1)[None]})
    assert lengths(buffer, hold_last=True) == [3] and buffer.available == 1
    assert lengths(buffer) == []
    assert lengths(buffer, everything=True) == [1] and buffer.available == 0
    assert buffer.rows == {}


def test_record_buffer_drops_chunks_while_max_updates_remain():
    """Chunks have 2, 3 and 4 updates, and max_updates is 7: 9 - 2 = 7 remain, so the first chunk is dropped."""
    buffer = records.RecordBuffer(100, max_updates=7)
    for length in (2, 3):
        buffer.add({"x": np.zeros((1, length))})
        assert buffer.available == sum(chunk["x"].shape[1] for chunk in buffer.chunks)
    buffer.add({"x": np.zeros((1, 4))})
    assert [chunk["x"].shape[1] for chunk in buffer.chunks] == [3, 4] and buffer.available == 7
    buffer.add({"x": np.zeros((1, 2))})  # 9 - 3 = 6 would be too few
    assert buffer.available == 9


def test_merge_seeds_concatenates_updates_of_seeds():
    merged = records.merge_seeds({"x": np.array([[1, 2], [3, 4]])})
    np.testing.assert_array_equal(merged["x"], [[1, 2, 3, 4]])
    assert merged["x"].shape == (1, 4)
