"""Checkpoints that several processes write, against the arrays that they have together."""

import hashlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_fast.runs import parts

pytestmark = pytest.mark.unit


class Process:
    """One of several processes that gather one after another: `others` has what they tell."""

    def __init__(self, index, others):
        self.index, self.leads, self.others = index, index == 0, others

    def gather(self, value):
        assert self.others[self.index] == value
        return self.others


def fingerprint(rows):
    """Return the checksum of a row if all rows are equal, as the documentation of a checkpoint says."""
    equal = all(rows[i].tobytes() == rows[0].tobytes() for i in range(len(rows)))
    return hashlib.blake2b(rows[0].tobytes(), digest_size=16).hexdigest() if equal else ""


def index_of(i, count, x):
    """Return where the rows of process i lie in an array."""
    each = len(x.array) // count
    return [[i * each, (i + 1) * each], *([0, size] for size in x.array.shape[1:])]


def written(arrays, count, num_seeds, monkeypatch):
    """Return each process's part of arrays [num_shards, ...], of which each has equally many rows."""
    share = {name: np.split(x, count) for name, x in arrays.items()}
    told = [{name: fingerprint(x[i]) for name, x in share.items()} if num_seeds == 1 else {} for i in range(count)]
    found = []
    for i in range(count):
        monkeypatch.setattr(parts, "local_index", partial(index_of, i, count))
        whole = {name: SimpleNamespace(array=x) for name, x in arrays.items()}
        own = {name: x[i] for name, x in share.items()}
        found.append(parts.divide(own, whole, num_seeds, Process(i, told)))
    return found


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.data())
def test_joined_parts_are_the_whole(count, each, num_seeds, data):
    shape = st.sampled_from([(), (2,), (2, 3)])
    arrays = {}
    for name in "abc":
        rows = np.arange(count * each, dtype=data.draw(st.sampled_from(["f4", "i4", "u1"])))
        rows = rows * data.draw(st.integers(0, 1))  # 0: equal in all shards
        tail = data.draw(shape)
        arrays[name] = np.broadcast_to(rows.reshape(-1, *(1 for _ in tail)), (count * each, *tail))
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = written(arrays, count, num_seeds, monkeypatch)
    kinds = {name: {"shape": list(x.shape), "dtype": str(x.dtype)} for name, x in arrays.items()}
    manifest = parts.describe(kinds, found[0][1].once, [division.blocks for _, division in found])
    joined = parts.join({parts.name_of(i): part for i, (part, _) in enumerate(found)}, manifest)
    assert joined.keys() == arrays.keys()
    for name, x in arrays.items():
        assert joined[name].dtype == x.dtype
        np.testing.assert_array_equal(joined[name], x)
    sizes = sum(x.size for part, _ in found for x in part.values())
    equal = {name for name, x in arrays.items() if num_seeds == 1 and fingerprint(x)}
    assert found[0][1].once == equal
    assert sizes == sum(x.size // len(x) if name in equal else x.size for name, x in arrays.items())


def test_bits_decide_whether_shards_are_equal(monkeypatch):
    """0.0 == -0.0, and NaN != NaN, but each has its own bits."""
    arrays = {"zero": np.array([0.0, -0.0], np.float32), "nan": np.array([np.nan, np.nan], np.float32)}
    found = written(arrays, 2, 1, monkeypatch)
    assert found[0][1].once == {"nan"}
    assert set(found[0][0]) == {"zero", "nan"} and set(found[1][0]) == {"zero"}


def test_large_arrays_are_not_compared(monkeypatch):
    monkeypatch.setattr(parts, "MAX_COMPARED", 7)
    monkeypatch.setattr("tests.runs.test_parts.fingerprint", lambda rows: "")
    found = written({"replay": np.zeros((2, 2), np.float32)}, 2, 1, monkeypatch)
    assert not found[0][1].once and found[1][1].blocks == {"replay": [[1, 2], [0, 2]]}


def test_names_of_files():
    assert [parts.name_of(i) for i in range(3)] == ["state.safetensors", "state-1.safetensors", "state-2.safetensors"]
