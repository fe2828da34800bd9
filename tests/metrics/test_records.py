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


def test_merge_seeds_concatenates_updates_of_seeds():
    merged = records.merge_seeds({"x": np.array([[1, 2], [3, 4]])})
    np.testing.assert_array_equal(merged["x"], [[1, 2, 3, 4]])
    assert merged["x"].shape == (1, 4)
