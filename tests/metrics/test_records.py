"""Records: which updates are held back, and what is a mean of what."""

import numpy as np
import pytest

from jaxrl_fast.metrics import records

pytestmark = pytest.mark.unit


def lengths(buffer, **how):
    """The numbers of updates of the records that can be taken."""
    return [rows["x"].shape[1] for rows in buffer.take(**how)]


def test_a_record_that_ends_now_can_be_held_back():
    buffer = records.RecordBuffer(3)
    buffer.add({"x": np.arange(6)[None]})
    assert lengths(buffer, hold_last=True) == [3] and buffer.available == 3
    assert lengths(buffer, hold_last=True) == []
    buffer.add({"x": np.arange(1)[None]})
    assert lengths(buffer, hold_last=True) == [3] and buffer.available == 1
    assert lengths(buffer) == []
    assert lengths(buffer, everything=True) == [1] and buffer.available == 0
    assert buffer.rows == {}


def test_chunks_go_while_as_many_updates_as_wanted_remain():
    """Of 2, 3 and 4 updates at most 7 are wanted: 9 - 2 = 7 remain without the first chunk, which goes."""
    buffer = records.RecordBuffer(100, max_updates=7)
    for length in (2, 3):
        buffer.add({"x": np.zeros((1, length))})
        assert buffer.available == sum(chunk["x"].shape[1] for chunk in buffer.chunks)
    buffer.add({"x": np.zeros((1, 4))})
    assert [chunk["x"].shape[1] for chunk in buffer.chunks] == [3, 4] and buffer.available == 7
    buffer.add({"x": np.zeros((1, 2))})  # 9 - 3 = 6 would be too few
    assert buffer.available == 9


def test_the_seeds_of_a_merged_chunk_follow_each_other():
    merged = records.merge_seeds({"x": np.array([[1, 2], [3, 4]])})
    np.testing.assert_array_equal(merged["x"], [[1, 2, 3, 4]])
    assert merged["x"].shape == (1, 4)
