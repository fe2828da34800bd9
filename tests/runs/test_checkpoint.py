"""Test checkpoints: data that is read equals the written data bit by bit, or is rejected; older ones are kept.

Failures are simulated with flipped bits, truncated files, full disks, missing permissions, failing calls and killed
processes.
"""

import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from jax import ShapeDtypeStruct

from jaxrl_fast import __version__
from jaxrl_fast.runs import checkpoint, checkpoint_writer
from jaxrl_fast.utils import files

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
FILES = (checkpoint.ARRAYS, checkpoint.MANIFEST, checkpoint.SUM)
NUM_FLIPS, NUM_LENGTHS, NUM_KILLS = 300, 64, 12

DTYPES = (np.float32, jnp.bfloat16, bool, np.uint8, np.int32)
KEY_WORDS = {"threefry2x32": 2, "rbg": 4}  # uint32 in a key


class Pair(NamedTuple):
    """A state of two parts."""

    left: Any
    right: Any


def like(tree):
    """Return the tree's shapes and dtypes."""
    return jax.tree.map(lambda x: ShapeDtypeStruct(x.shape, x.dtype), tree)


def write_and_read(folder, tree):
    """Write a tree to the disk and read it back."""
    arrays, kinds = checkpoint.flatten(tree)
    checkpoint.write(folder, arrays, {"arrays": kinds})
    return checkpoint.unflatten(like(tree), checkpoint.read(folder))


def bits(x):
    """Return the bytes of an array or of PRNG keys."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()


def assert_same(found, expected):
    """Check structure, types and bits; keys must still be keys."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert (a.shape, a.dtype, bits(a)) == (b.shape, b.dtype, bits(b))


def names(folder):
    """Return the names of all files in a folder."""
    return sorted(path.name for path in folder.iterdir())


def save(parent, number, **manifest):
    """Write a small checkpoint whose arrays and manifest hold the number."""
    folder = parent / f"{checkpoint.PREFIX}{number:012d}"
    arrays, kinds = checkpoint.flatten({"x": np.full((4, 8), number, np.float32), "y": np.arange(number) > 2})
    checkpoint.write(folder, arrays, {"number": number, "arrays": kinds, **manifest})
    return folder


def assert_whole(folder, number):
    saved = checkpoint.read(folder)
    assert saved.folder == folder and saved.manifest["number"] == number
    assert set(saved.arrays) == {"x", "y"} and (saved.arrays["x"] == number).all() and len(saved.arrays["y"]) == number


@pytest.fixture
def two(tmp_path):
    """Return an older and a newer checkpoint."""
    return save(tmp_path, 5), save(tmp_path, 7)


def assert_rejected(older, newer):
    """Check that the newer checkpoint is rejected in one line and that the older one is found."""
    with pytest.raises(ValueError, match=re.escape(str(newer))) as caught:
        checkpoint.read(newer)
    assert "\n" not in str(caught.value)
    found, wrong = checkpoint.newest(newer.parent)
    assert (found.folder, wrong) == (older, [str(caught.value)])
    assert_whole(older, 5)


# The same bits and types -----------------------------------------------------------------------


def strided(array):
    """Return an equal array made of every second element of a larger one."""
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


LAYOUTS = {
    "plain": np.asarray,
    "by columns": np.asfortranarray,
    "backward": lambda array: np.flip(np.flip(array).copy()),
    "strided": strided,
    "one row again and again": lambda array: np.broadcast_to(array, (2, *array.shape)),
    "on the device": jnp.asarray,
}


def any_bits(rng, shape, dtype):
    """Return random bit patterns, including NaNs, infinities and -0.0."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def any_key(rng, shape, implementation):
    words = any_bits(rng, (*shape, KEY_WORDS[implementation]), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=implementation)


@st.composite
def leaves(draw):
    """Draw an array of up to three axes, possibly empty and in any layout, or keys."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    kind = draw(st.sampled_from([*DTYPES, *KEY_WORDS]))
    if kind in KEY_WORDS:
        return any_key(rng, shape, kind)
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](any_bits(rng, shape, kind))


def branches(children):
    names = st.text("abc_", min_size=1, max_size=3)
    pairs, tuples = st.builds(Pair, children, children), st.lists(children, max_size=3).map(tuple)
    return pairs | tuples | st.dictionaries(names, children, max_size=3)


trees = st.recursive(leaves() | st.just(()), branches, max_leaves=8)


@given(tree=trees)
def test_read_inverts_write(tmp_path_factory, tree):
    """Check structure, types and bits, also of a second round trip."""
    parent = tmp_path_factory.mktemp("trees")
    once = write_and_read(parent / "once", tree)
    assert_same(once, tree)
    assert_same(write_and_read(parent / "again", once), tree)


@pytest.mark.parametrize("implementation", KEY_WORDS)
def test_unflatten_restores_prng_keys(implementation, tmp_path):
    key, other_key = (jax.random.key(seed, impl=implementation) for seed in (3, 4))
    saved = write_and_read(tmp_path / "step", Pair(key, jax.random.split(other_key, (2, 3))))
    np.testing.assert_array_equal(jax.random.normal(saved.left, 9), jax.random.normal(key, 9))
    assert saved.right.shape == (2, 3) and saved.right.dtype == key.dtype


def test_write_keeps_nan_payload_and_signed_zero(tmp_path):
    """Check float32 bits of quiet and signaling NaNs, zeros, infinities and the smallest numbers."""
    patterns = [0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFBFFFFF, 0, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x80000001]
    numbers = np.array(patterns, np.uint32).view(np.float32)
    saved = write_and_read(tmp_path / "step", {"array": numbers, "zero": jnp.float32(-0.0), "nan": np.float32(np.nan)})
    assert saved["array"].view(np.uint32).tolist() == patterns
    assert np.signbit(saved["zero"]) and saved["zero"].shape == () and np.isnan(saved["nan"])


def test_arrays_are_named_by_path_and_readable_by_safetensors(tmp_path):
    """Read with safetensors and a JSON parser, and verify with `sha256sum`."""
    tree = {"agent": Pair((jnp.arange(3), ()), jnp.ones((2, 2), jnp.bfloat16)), "key": jax.random.key(1)}
    write_and_read(tmp_path / "step", tree)
    arrays = safetensors.numpy.load_file(tmp_path / "step" / checkpoint.ARRAYS)
    assert set(arrays) == {"agent/left/0", "agent/right", "key"}
    np.testing.assert_array_equal(arrays["agent/left/0"], [0, 1, 2])
    content = (tmp_path / "step" / checkpoint.MANIFEST).read_bytes()
    manifest = json.loads(content)
    assert manifest["arrays"]["agent/right"] == {"shape": [2, 2], "dtype": "bfloat16"}
    assert manifest["arrays"]["key"] == {"key": "threefry2x32", "shape": [2], "dtype": "uint32"}
    assert (tmp_path / "step" / checkpoint.SUM).read_text() == hashlib.sha256(content).hexdigest() + "\n"
    digest = hashlib.sha256((tmp_path / "step" / checkpoint.ARRAYS).read_bytes()).hexdigest()
    assert manifest["files"] == {checkpoint.ARRAYS: digest}


def test_flatten_copies_arrays():
    """Change, or donate to the device, the memory of the original arrays."""
    plain, turned, scalar = np.zeros(5), np.zeros((2, 3), np.int32), np.zeros((), np.float32)
    on_device = jnp.zeros(1000)
    arrays, _ = checkpoint.flatten([plain, turned.T, scalar, on_device, jax.random.key(0)])
    assert not np.shares_memory(arrays["3"], np.asarray(on_device))
    for array in (plain, turned, scalar):
        array[...] = 1
    jax.jit(lambda x: x + 1, donate_argnums=0)(on_device).block_until_ready()
    assert len(arrays) == 5 and not any(array.any() for array in arrays.values())


@pytest.mark.parametrize("change", ["all", "manifest"])
def test_write_replaces_existing_checkpoint(two, change):
    """Write the same step twice, as after resuming from an older checkpoint."""
    _, newer = two
    before = checkpoint.read(newer)
    arrays = {"x": np.ones(3)} if change == "all" else before.arrays
    checkpoint.write(newer, arrays, {"number": 8})
    assert checkpoint.read(newer).manifest["number"] == 8
    assert checkpoint.read(newer).arrays["x"].shape == arrays["x"].shape
    assert names(newer.parent) == [path.name for path in two]


# Different trees -------------------------------------------------------------------------------


def state():
    """Return a tree with a leaf of each kind."""
    return {
        "agent": Pair(np.zeros((2, 3), np.float32), np.zeros(4, np.int32)),
        "key": jax.random.key(0),
        "mask": np.zeros(2, bool),
        "small": jnp.zeros(2, jnp.bfloat16),
        "words": np.zeros(2, np.uint32),
    }


OTHERS = {  # how another tree differs, and words of the error message
    "one more": (lambda agent: {"more": np.zeros(1)}, ["more"]),
    "a tuple for a record": (lambda agent: {"agent": tuple(agent)}, ["agent/"]),
    "a shape": (lambda agent: {"agent": agent._replace(left=agent.left.T)}, ["agent/left", "[2, 3]", "[3, 2]"]),
    "a number of axes": (lambda agent: {"mask": np.zeros((2, 1), bool)}, ["mask", "[2]", "[2, 1]"]),
    "a dtype": (
        lambda agent: {"agent": agent._replace(right=np.zeros(4, np.float32))},
        ["agent/right", "int32", "float32"],
    ),
    "a byte": (lambda agent: {"mask": np.zeros(2, np.uint8)}, ["mask", "bool", "uint8"]),
    "two bytes": (lambda agent: {"small": np.zeros(2, np.uint16)}, ["small", "bfloat16", "uint16"]),
    "an implementation": (lambda agent: {"key": jax.random.key(0, impl="rbg")}, ["key", "key<fry>", "key<rbg>"]),
    "a number of keys": (lambda agent: {"key": jax.random.split(jax.random.key(0))}, ["key", "[]", "[2]"]),
    "words for a key": (lambda agent: {"key": np.zeros(2, np.uint32)}, ["key", "key<fry>", "uint32"]),
    "a key for words": (lambda agent: {"words": jax.random.key(0)}, ["words", "uint32", "key<fry>"]),
}


@pytest.fixture
def saved(tmp_path):
    """Return the checkpoint of a state."""
    arrays, kinds = checkpoint.flatten(state())
    checkpoint.write(tmp_path / "step", arrays, {"arrays": kinds})
    return checkpoint.read(tmp_path / "step")


@pytest.mark.parametrize("other", OTHERS)
def test_unflatten_rejects_different_tree(other, saved):
    change, words = OTHERS[other]
    with pytest.raises(ValueError) as caught:
        checkpoint.unflatten(like(state() | change(state()["agent"])), saved)
    for word in (*words, str(saved.folder)):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["agent", "key"])
def test_unflatten_rejects_unknown_array(name, saved):
    less = {k: x for k, x in state().items() if k != name}
    with pytest.raises(ValueError, match=f"has an unknown array {name}"):
        checkpoint.unflatten(like(less), saved)


def test_unflatten_error_names_version(saved):
    other = like(state() | {"mask": np.zeros(3, bool)})
    with pytest.raises(ValueError, match="jaxrl_fast of unknown version wrote it"):
        checkpoint.unflatten(other, saved)
    saved.manifest["meta"] = {"versions": {"jaxrl_fast": "0.0.7"}}
    with pytest.raises(ValueError, match=f"jaxrl_fast 0.0.7 wrote it and this is {re.escape(__version__)}"):
        checkpoint.unflatten(other, saved)


# Damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_read_detects_flipped_bit(two, name):
    """Flip a bit anywhere in any file; flipping it back repairs the checkpoint."""
    older, newer = two
    rng, intact = np.random.default_rng(FILES.index(name)), (newer / name).read_bytes()
    for place in rng.choice(8 * len(intact), NUM_FLIPS // len(FILES), replace=False):
        damaged = bytearray(intact)
        damaged[place // 8] ^= 1 << place % 8
        (newer / name).write_bytes(damaged)
        assert_rejected(older, newer)
    (newer / name).write_bytes(intact)
    assert_whole(newer, 7)


@pytest.mark.parametrize("name", FILES)
def test_read_detects_changed_length(two, name):
    """Truncate to any length, or append bytes."""
    older, newer = two
    intact = (newer / name).read_bytes()
    for length in np.linspace(0, len(intact) - 1, NUM_LENGTHS).astype(int):
        (newer / name).write_bytes(intact[:length])
        assert_rejected(older, newer)
    for more in (b"\0", b"\n", intact):
        (newer / name).write_bytes(intact + more)
        assert_rejected(older, newer)


@pytest.mark.parametrize("name", FILES)
def test_read_detects_missing_file(two, name):
    """Remove a file, or replace it by a folder or a broken link."""
    older, newer = two
    (newer / name).unlink()
    assert_rejected(older, newer)
    (newer / name).symlink_to("nowhere")
    assert_rejected(older, newer)
    (newer / name).unlink()
    (newer / name).mkdir()
    assert_rejected(older, newer)


@pytest.mark.parametrize("name", FILES)
def test_read_detects_file_of_other_checkpoint(two, name):
    older, newer = two
    (newer / name).write_bytes((older / name).read_bytes())
    assert_rejected(older, newer)


def test_newest_skips_invalid_folders(two):
    """Create an empty folder and a file with the names of newer checkpoints."""
    (two[0].parent / f"{checkpoint.PREFIX}{8:012d}").mkdir()
    (two[0].parent / f"{checkpoint.PREFIX}{9:012d}").write_text("text")
    found, wrong = checkpoint.newest(two[0].parent)
    assert found.folder == two[1]
    assert len(wrong) == 2 and "step-000000000009" in wrong[0] and "step-000000000008" in wrong[1]


def test_newest_returns_none_if_all_are_corrupt(two):
    for folder in two:
        (folder / checkpoint.SUM).write_text("0" * 64 + "\n")
    found, wrong = checkpoint.newest(two[0].parent)
    assert found is None
    assert len(wrong) == 2 and two[1].name in wrong[0] and two[0].name in wrong[1]


def test_newest_returns_none_without_checkpoints(tmp_path):
    assert checkpoint.newest(tmp_path) == checkpoint.newest(tmp_path / "not there") == (None, [])
    assert checkpoint.folders(tmp_path / "not there") == []


# Nothing in a checkpoint is executed -----------------------------------------------------------


class Bomb:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def seal(folder, **changes):
    """Recompute the checksums for the current content, as an attacker would."""
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    manifest["files"] = {checkpoint.ARRAYS: hashlib.sha256((folder / checkpoint.ARRAYS).read_bytes()).hexdigest()}
    seal_text(folder, json.dumps(manifest | changes).encode())


def seal_text(folder, manifest):
    (folder / checkpoint.MANIFEST).write_bytes(manifest)
    (folder / checkpoint.SUM).write_text(hashlib.sha256(manifest).hexdigest() + "\n")


def test_read_accepts_manifest_with_valid_checksum(two):
    """Valid checksums are accepted, so the checkpoints of the following tests are rejected for their content."""
    _, newer = two
    safetensors.numpy.save_file({"x": np.arange(3)}, newer / checkpoint.ARRAYS)
    seal(newer, number=9)
    assert checkpoint.read(newer).manifest["number"] == 9
    np.testing.assert_array_equal(checkpoint.read(newer).arrays["x"], [0, 1, 2])


def test_read_never_unpickles(two, tmp_path):
    """Try a pickle as manifest, as arrays with and without valid checksums, and as an array of objects."""
    older, newer = two
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark))
    (newer / checkpoint.ARRAYS).write_bytes(bomb)
    assert_rejected(older, newer)
    seal(newer)
    with pytest.raises(ValueError):
        checkpoint.read(newer)
    with (newer / checkpoint.ARRAYS).open("wb") as file:
        np.save(file, np.array([Bomb(mark)]), allow_pickle=True)
    seal(newer)
    with pytest.raises(ValueError):
        checkpoint.read(newer)
    seal_text(newer, bomb)
    with pytest.raises(ValueError):
        checkpoint.read(newer)
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../outside.safetensors", "{}/outside.safetensors", "inside.safetensors", "", "."])
def test_read_rejects_other_paths_in_manifest(two, path):
    """Include files that exist and have the given checksum."""
    older, newer = two
    named = path.format(newer.parent)
    for file in (newer.parent / "outside.safetensors", newer / "inside.safetensors"):
        safetensors.numpy.save_file({"x": np.zeros(1)}, file)
    digest = hashlib.sha256((newer.parent / "outside.safetensors").read_bytes()).hexdigest()
    intact = {checkpoint.ARRAYS: hashlib.sha256((newer / checkpoint.ARRAYS).read_bytes()).hexdigest()}
    for sums in ({named: digest}, intact | {named: digest}):
        seal(newer, files=sums)
        assert_rejected(older, newer)


def test_read_rejects_other_format(two):
    older, newer = two
    seal(newer, format=checkpoint.FORMAT + 1)
    assert_rejected(older, newer)
    with pytest.raises(ValueError, match=f"format {checkpoint.FORMAT + 1}"):
        checkpoint.read(newer)


# Writes that fail ------------------------------------------------------------------------------

NO_ROOM = OSError(28, "No space left on device")
STEPS = {  # functions that `write` calls, and whether each does its work before it fails
    "mkdir": (Path, False),
    "save_file": (safetensors.numpy, True),
    "file_digest": (hashlib, False),
    "dumps": (json, False),
    "write_text": (Path, True),
    "fsync": (os, False),
    "rename": (Path, False),
}


def fail(patch, owner, name, late, number, error):
    """Let the call of `owner.name` with this number fail, before or after its work."""
    real, calls = getattr(owner, name), itertools.count(1)

    def failing(*args, **kwargs):
        now = next(calls) == number
        if late or not now:
            result = real(*args, **kwargs)
        if now:
            raise error
        return result

    patch.setattr(owner, name, failing)


def failures(monkeypatch, action, owner, name, late, error):
    """Run the action with one call after the other failing, until no call is left. Yield after each."""
    for number in itertools.count(1):
        with monkeypatch.context() as patch:
            fail(patch, owner, name, late, number, error)
            try:
                action()
            except type(error) as caught:
                assert caught is error
            else:
                assert number > 1, f"{name} is not called"
                return
        yield


@pytest.mark.parametrize("error", [NO_ROOM, KeyboardInterrupt()], ids=["no room", "interrupted"])
@pytest.mark.parametrize("name", STEPS)
def test_failed_write_leaves_no_partial_checkpoint(name, error, tmp_path, monkeypatch):
    """Only if the last sync, of the parent folder, fails may the complete checkpoint exist already."""
    older = save(tmp_path, 5)
    for _ in failures(monkeypatch, lambda: save(tmp_path, 7), *(STEPS[name][0], name, STEPS[name][1]), error):
        found, wrong = checkpoint.newest(tmp_path)
        assert_whole(older, 5)
        assert not wrong and not list(tmp_path.glob(f"{files.ASIDE}*"))
        if found.folder != older:
            assert name == "fsync"
            checkpoint.remove(found.folder)
    found, _ = checkpoint.newest(tmp_path)
    assert_whole(found.folder, 7)


def test_write_rejects_nan_in_manifest(two):
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(two[0].parent, 9, loss=float("nan"))
    assert sorted(two[0].parent.iterdir()) == list(two)


def inodes(folder):
    return {path.stat().st_ino for path in (folder, *folder.iterdir())}


def test_write_syncs_before_rename(two, monkeypatch):
    """A power failure may lose everything that was not synced."""
    order = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: (order.append(os.fstat(file).st_ino), sync(file)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (order.append(to), rename(self, to))[1])
    folder = save(two[0].parent, 9)
    named = order.index(folder)
    assert set(order[:named]) >= inodes(folder)
    assert folder.parent.stat().st_ino in order[named:]


def test_full_disk_keeps_older_checkpoints(tmp_path):
    """Limit files to 10 kB: arrays that do not fit, a manifest that does not fit, then both fit again."""
    code = """
import json, os, resource, sys
from pathlib import Path
import numpy as np
from jaxrl_fast.runs import checkpoint_writer

saver = checkpoint_writer.Writer(Path(sys.argv[1]), keep=2)
def save(number, num_bytes, text):
    saver.save(saver.folder(number), {"x": np.zeros(num_bytes, np.uint8)}, {"number": number, "text": text}, None)
    first, second = saver.wait(), saver.wait()
    left = sorted(path.name for path in saver.parent.iterdir())
    print(json.dumps([first, second, saver.last.name, left]))

save(1, 1_000_000, "")
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
save(2, 1_000_000, "")
save(3, 1000, "long" * 5000)
save(4, 1000, "short")
resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
save(5, 0, "")
"""
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    errors, again, last, left = zip(*map(json.loads, said.splitlines()))
    assert ["File too large" in error for error in errors] == [False, True, True, False, True]
    assert again == ("",) * 5, "each error is reported once"
    one, four = (f"{checkpoint.PREFIX}{number:012d}" for number in (1, 4))
    assert last == (one, one, one, four, four)
    assert left == ([one], [one], [one], [one, four], [one, four])
    found, wrong = checkpoint.newest(tmp_path)
    assert found.manifest["number"] == 4 and not wrong


def test_saver_reports_folder_that_cannot_be_created(tmp_path):
    """A file is in the way, and must be kept."""
    (tmp_path / "file").write_text("text")
    saver = checkpoint_writer.Writer(tmp_path / "file" / "checkpoints", 1)
    saver.save(saver.folder(1), {}, {}, {})
    assert saver.wait() == "a checkpoint could not be written (Not a directory); none has been saved yet"
    assert saver.last is None and saver.num_written == 0
    assert (tmp_path / "file").read_text() == "text"


# The saver -------------------------------------------------------------------------------------


def put(saver, number, score=None):
    """Save and wait; return the error message."""
    arrays = {"x": np.full(3, number)}
    saver.save(saver.folder(number), arrays, {"number": number}, score)
    return saver.wait()


@pytest.mark.parametrize("name", STEPS)
def test_saver_reports_error_once_and_continues(name, tmp_path, monkeypatch):
    saver = checkpoint_writer.Writer(tmp_path, 3)
    assert not saver.wait()
    assert not put(saver, 1)
    with monkeypatch.context() as patch:
        fail(patch, STEPS[name][0], name, STEPS[name][1], 1, NO_ROOM)
        said = f"a checkpoint could not be written (No space left on device); the last one is {saver.folder(1)}"
        assert put(saver, 2) == said
        assert saver.last == saver.folder(1) and names(tmp_path) == [saver.folder(1).name]
        assert not saver.wait()
    assert not put(saver, 3)
    assert saver.last == saver.folder(3) and saver.num_written == 2
    assert checkpoint.newest(tmp_path)[0].manifest["number"] == 3
    assert checkpoint.folders(tmp_path) == [saver.folder(1), saver.folder(3)]


@pytest.mark.parametrize(
    "name, what", [("replace", "best.json could not be written"), ("rename", "older checkpoints could not be removed")]
)
def test_saver_keeps_checkpoint_if_cleanup_fails(name, what, tmp_path, monkeypatch):
    """Let marking the best one, or removing an old one, fail; the next save repeats it."""
    saver = checkpoint_writer.Writer(tmp_path, 1)
    assert not put(saver, 1, 1)
    with monkeypatch.context() as patch:
        fail(patch, Path, name, False, 1 if name == "replace" else 2, NO_ROOM)
        assert put(saver, 2, 2) == f"{what} (No space left on device)" and saver.num_written == 2
    assert saver.last == saver.folder(2) and checkpoint.newest(tmp_path)[0].manifest["number"] == 2
    assert checkpoint.best(tmp_path) == saver.folder(1 if name == "replace" else 2)
    assert not put(saver, 3, 3)
    assert names(tmp_path) == [checkpoint.BEST, saver.folder(3).name]


def test_saver_saves_in_background(tmp_path, monkeypatch):
    slow, sync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (slow.wait(2), sync(file)))
    saver = checkpoint_writer.Writer(tmp_path, 1)
    assert not saver.busy
    saver.save(saver.folder(1), {"x": np.zeros(3)}, {}, None)
    assert saver.busy and checkpoint.newest(tmp_path) == (None, [])
    with pytest.raises(AssertionError, match="wait"):
        saver.save(saver.folder(2), {}, {}, None)
    slow.set()
    assert not saver.wait() and not saver.busy
    assert checkpoint.newest(tmp_path)[0].folder == saver.last == saver.folder(1)


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("bests", [(), (0,), (2, 3), (1, 6)])
def test_saver_keeps_newest_and_best(keep, bests, tmp_path):
    saver, written, best = checkpoint_writer.Writer(tmp_path, keep), [], None
    for i in range(8):
        folder = saver.folder(100 * i)
        best = folder if i in bests else best
        assert not put(saver, 100 * i, i if i in bests else None)
        written.append(folder)
        expected = {*written[-keep:], best} - {None}
        assert checkpoint.folders(tmp_path) == sorted(expected)
        assert checkpoint.best(tmp_path) == best
        assert names(tmp_path) == ([checkpoint.BEST] if best else []) + sorted(path.name for path in expected)


def test_saver_removes_leftovers_of_crash(two):
    """Remove temporary folders with their content, but no checkpoint."""
    parent = two[0].parent
    checkpoint.mark_best(two[0], 1.0)
    for name in (f"{two[1].name}", f"{two[0].name}-old", "step-000000000009"):
        (parent / f"{files.ASIDE}{name}" / "more").mkdir(parents=True)
        (parent / f"{files.ASIDE}{name}" / checkpoint.ARRAYS).write_text("half")
    assert checkpoint.newest(parent)[1] == []
    checkpoint_writer.Writer(parent, 1).remove_leftovers()
    assert names(parent) == [checkpoint.BEST, *(path.name for path in two)]
    assert_whole(two[0], 5)
    assert_whole(two[1], 7)


def test_saver_writes_despite_leftovers(two):
    """Include leftovers of the same checkpoint."""
    parent, newer = two[0].parent, two[1]
    for name in (newer.name, f"{newer.name}-old"):
        (parent / f"{files.ASIDE}{name}").mkdir()
        (parent / f"{files.ASIDE}{name}" / "unknown").write_text("half")
    save(parent, 7)
    assert_whole(newer, 7)
    assert names(newer) == sorted(FILES)
    assert names(parent) == [path.name for path in two]


def test_folders_are_ordered_by_step(tmp_path):
    saver = checkpoint_writer.Writer(tmp_path, 1)
    steps = [0, 5, 10, 99, 2**31, 2**32 + 1, 10**11, 10**12 - 1]
    for number in np.random.default_rng(0).permutation(steps):
        saver.folder(int(number)).mkdir()
    (tmp_path / f"{files.ASIDE}step-000000000003").mkdir()
    (tmp_path / checkpoint.BEST).write_text("{}")
    assert checkpoint.folders(tmp_path) == [saver.folder(number) for number in steps]


@pytest.mark.parametrize("ending", [".bak", " (copy)", "-2"])
def test_folders_ignores_copies(two, ending):
    """Include the case that only the copy is intact."""
    copy = shutil.copytree(two[1], two[1].with_name(two[1].name + ending))
    parent = copy.parent
    assert checkpoint.folders(parent) == [*two] and checkpoint.newest(parent)[0].folder == two[1]
    for folder in two:
        (folder / checkpoint.ARRAYS).write_bytes(b"x")
    found, wrong = checkpoint.newest(parent)
    assert found is None and len(wrong) == 2


# The best one ----------------------------------------------------------------------------------


def test_mark_best_keeps_highest_score(two):
    """A marked checkpoint may be better, as before a run was resumed."""
    parent = two[0].parent
    assert checkpoint.best(parent) is None
    for folder, score, best in (
        (two[0], 1.5, 0),
        (two[1], 1.5, 0),
        (two[1], 1.0, 0),
        (two[1], 2.0, 1),
        (two[0], 1.9, 1),
    ):
        checkpoint.mark_best(folder, score)
        assert checkpoint.best(parent) == two[best]
    assert json.loads((parent / checkpoint.BEST).read_text()) == {"checkpoint": two[1].name, "eval_return_mean": 2.0}
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpoint.mark_best(two[0], float("inf"))
    assert checkpoint.best(parent) == two[1]
    checkpoint.remove(two[1])
    assert checkpoint.best(parent) is None
    checkpoint.mark_best(two[0], -3.0)
    assert checkpoint.best(parent) == two[0]


GARBAGE = (
    *(b"", b"{", b"null", b"[]", b"7", b'"step-000000000005"', b"\xff\xfe\x00", b"\0" * 100),
    *(b'{"other": 1}', b'{"checkpoint": null}', b'{"checkpoint": 5}', b'{"checkpoint": ["step-000000000005"]}'),
    *(b'{"checkpoint": "step-000000000006"}', b'{"checkpoint": "best.json"}', b'{"checkpoint": "\\u0000"}'),
    *(b'{"checkpoint": "%s"}' % (b"x" * 5000), b'{"checkpoint": "../outside"}', b'{"checkpoint": "/tmp"}'),
)


@pytest.mark.parametrize("content", GARBAGE, ids=lambda content: repr(content[:40]))
def test_best_ignores_invalid_file(content, tmp_path):
    save(tmp_path / "checkpoints", 5)
    (tmp_path / "outside").mkdir()
    (tmp_path / "checkpoints" / checkpoint.BEST).write_bytes(content)
    assert checkpoint.best(tmp_path / "checkpoints") is None


def test_mark_best_replaces_invalid_file(tmp_path):
    saver = checkpoint_writer.Writer(tmp_path, 1)
    for number, content in enumerate(GARBAGE):
        (tmp_path / checkpoint.BEST).write_bytes(content)
        assert not put(saver, 10 + number)
    assert checkpoint.folders(tmp_path) == [saver.last]
    (tmp_path / checkpoint.BEST).unlink()
    (tmp_path / checkpoint.BEST).mkdir()
    assert not put(saver, 100) and checkpoint.best(tmp_path) is None


# The old file or the new one -------------------------------------------------------------------


@pytest.mark.parametrize("error", [NO_ROOM, KeyboardInterrupt()], ids=["no room", "interrupted"])
@pytest.mark.parametrize(
    "owner, name, late", [(Path, "write_text", True), (os, "fsync", False), (Path, "replace", False)]
)
@pytest.mark.parametrize("old", ["old\n", None])
def test_failed_replace_keeps_old_or_new_file(old, owner, name, late, error, tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    if old:
        path.write_text(old)
    for _ in failures(monkeypatch, lambda: files.replace(path, "new é"), owner, name, late, error):
        there = path.read_text("utf-8") if path.exists() else None
        assert names(tmp_path) == ([path.name] if there else []) and there in (old, "new é")
    assert path.read_text("utf-8") == "new é" and names(tmp_path) == [path.name]


def test_replace_syncs_before_rename(tmp_path, monkeypatch):
    order, sync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append(os.fstat(file).st_ino), sync(file)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append(to), replace(self, to))[1])
    path = tmp_path / "file.json"
    files.replace(path, "text")
    assert order.index(path.stat().st_ino) < order.index(path)


def test_replace_is_atomic_for_readers(tmp_path):
    path, texts = tmp_path / "file.json", ("a" * 100_000, "b" * 7)
    files.replace(path, texts[0])
    work = lambda: [files.replace(path, texts[i % 2]) for i in range(40)]
    writer, found = threading.Thread(target=work), set()
    writer.start()
    while writer.is_alive():
        found.add(path.read_text())
    writer.join()
    assert found <= set(texts) and path.read_text() == texts[1]


# Killed ----------------------------------------------------------------------------------------

NURSERY = """
import os, sys
from pathlib import Path
import numpy as np
from jaxrl_fast.runs import checkpoint_writer

def save_for_ever(number):
    saver = checkpoint_writer.Writer(Path(sys.argv[1]), keep=2)
    saver.remove_leftovers()
    while True:
        number += 1
        score = float(number) if number % 3 == 0 else None
        saver.save(saver.folder(number), {"x": np.full(50_000, number)}, {"number": number}, score)
        assert not saver.wait()
        print(number, flush=True)

for line in sys.stdin:
    child = os.fork()
    if not child:
        save_for_ever(int(line))
    print("child", child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def killed(nursery, number, num_told, delay):
    """Kill a saving process `delay` seconds after `num_told` lines; return the numbers that it printed."""
    print(number, file=nursery.stdin, flush=True)
    said, child = [], None
    while child is None or len(said) < num_told:
        line = nursery.stdout.readline()
        if line.startswith("child"):
            child = int(line.split()[1])
        else:
            said.append(int(line))
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    while (line := nursery.stdout.readline()) != "gone\n":
        said.append(int(line))
    return said


@pytest.mark.slow
def test_saved_checkpoint_survives_sigkill(tmp_path):
    """Kill processes at random moments; each continues in the same folder. The best checkpoint survives, too.

    The processes are forks of one process, so that imports run once.
    """
    rng, told = np.random.default_rng(0), [0]
    command = [sys.executable, "-c", NURSERY, str(tmp_path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    last = 0
    with subprocess.Popen(command, cwd=ROOT, **pipes) as nursery:
        for _ in range(NUM_KILLS):
            told += killed(nursery, last, rng.integers(4), rng.uniform(0, 0.05))
            found, wrong = checkpoint.newest(tmp_path)
            assert not wrong
            last = found.manifest["number"] if found else 0
            assert last >= told[-1] == max(told)
            assert found is None or (len(found.arrays["x"]) == 50_000 and (found.arrays["x"] == last).all())
            marked = max(number for number in told if number % 3 == 0)
            assert not marked or checkpoint.read(checkpoint.best(tmp_path)).manifest["number"] >= marked
    assert len(told) > NUM_KILLS
    (tmp_path / f"{files.ASIDE}step-000000009999").mkdir(exist_ok=True)
    checkpoint_writer.Writer(tmp_path, 2).remove_leftovers()
    assert not list(tmp_path.glob(f"{files.ASIDE}step*"))
