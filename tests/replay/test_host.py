"""Test replay.host: buffers in memory and on disk, compressed or not, return the frames of the device buffer."""

import errno
import functools
import itertools
import os
import re
import threading
from collections import deque
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

import jaxrl_fast
from jaxrl_fast import replay
from jaxrl_fast.replay import ring
from jaxrl_fast.replay import store as replay_store
from jaxrl_fast.replay.host import ahead, from_bytes, journal, to_bytes
from jaxrl_fast.replay.host import buffer as host_buffer
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.types import Discrete, EnvSpec, Parallelism, Transition

zstandard = pytest.importorskip("zstandard")
KINDS = [*itertools.product((False, True), (False, True))]  # on disk, compressed
STORES = [*itertools.product(("host", "disk"), ("none", "zstd"))]
close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
BYTES = 5  # of a frame


def opened(shape, kind, folder, num_workers=1):
    made = host_buffer.HostBuffer(shape, *kind, num_workers)
    made.open(folder)
    return made


def read(buffer, places, num):
    """The frames at the first `num` of places [P, K, M, 2]."""
    out = np.full((*places.shape[:3], BYTES), 77, np.uint8)
    buffer.get(places[..., 0].astype(np.int32), places[..., 1].astype(np.int32), num, out)
    assert (out[:, num:] == 77).all()
    return out[:, :num]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_host_buffer_returns_newest_frame_of_each_row_and_env(kind, data, tmp_path_factory):
    """Compare random sequences of put, get, save and load with an oracle that keeps all frames in a list."""
    num_envs, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    shape = host_buffer.Shape(length * data.draw(st.integers(1, 5)), num_envs, BYTES)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    frames, folder = [np.zeros((shape.num_rows, num_envs, BYTES), np.uint8)], tmp_path_factory.mktemp("replay")
    buffer, saved = opened(shape, kind, folder), []
    for action in data.draw(st.lists(st.sampled_from(["put", "put", "get", "save", "load"]), max_size=12)):
        oracle = np.concatenate(frames)
        if action == "put":
            new = rng.integers(0, 3, (length, num_envs, BYTES)).astype(np.uint8)
            buffer.put(0, (len(oracle) - shape.num_rows) % shape.num_rows, new)
            frames.append(new)
        elif action == "get":
            places = rng.integers(0, [shape.num_rows, num_envs], (2, 3, 4, 2))
            newest = len(oracle) - 1
            row = newest - (newest - places[..., 0]) % shape.num_rows
            num = data.draw(st.integers(0, 3))
            np.testing.assert_array_equal(read(buffer, places, num), oracle[row, places[..., 1]][:, :num])
        elif action == "save":
            saved.append((buffer.save()(), frames.copy()))
            buffer.prune([part for part, _ in saved])
        elif saved:  # a process ends, and another one resumes from one of its saves
            buffer.close()
            part, of_part = data.draw(st.sampled_from(saved))
            buffer, frames = opened(shape, kind, folder), of_part.copy()
            buffer.prune([part for part, _ in saved])
            buffer.load(part)
    buffer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_prune_deletes_files_that_no_save_references(kind, tmp_path):
    """A save writes only new frames. Overwritten frames are deleted with the last save that references them."""
    shape = host_buffer.Shape(96, 1, BYTES)
    buffer = opened(shape, kind, tmp_path)
    saves = []
    for i in range(12):
        buffer.put(0, 64 * i % 96, np.full((64, 1, BYTES), i, np.uint8))
        saves = [*saves[-1:], buffer.save()()]
        buffer.prune(saves)
    named = {file["name"] for save in saves for file in save["files"]}
    assert named <= {path.name for path in tmp_path.iterdir()}
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir() if path.name in named)
    assert len([*tmp_path.iterdir()]) <= len(named) + 1 <= 12
    if not kind[0]:
        assert on_disk <= 6 * 64 * (BYTES + 8)
    buffer.close()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_buffer_stores_equal_rollouts_of_grad_workers_once(tmp_path):
    """Both of two gradient workers put the same rollouts."""
    buffer = opened(host_buffer.Shape(8, 1, BYTES), (False, False), tmp_path, num_workers=2)
    for i in range(3):
        for worker in (0, 1):
            buffer.put(worker, 4 * i % 8, np.full((4, 1, BYTES), i, np.uint8))
    assert buffer.count == 12
    places = np.stack([np.arange(8), np.zeros(8, int)], -1)[None, None]
    assert read(buffer, places, 1)[0, 0, :, 0].tolist() == [2] * 4 + [1] * 4
    buffer.close()


def test_put_rejects_unexpected_start_row_and_closed_buffer(tmp_path):
    buffer = opened(host_buffer.Shape(8, 1, BYTES), (False, False), tmp_path)
    with pytest.raises(AssertionError, match="not those of this state"):
        buffer.put(0, 4, np.zeros((4, 1, BYTES), np.uint8))
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        buffer.put(0, 0, np.zeros((4, 1, BYTES), np.uint8))


@pytest.mark.parametrize("compressed", [False, True])
def test_buffer_is_never_saved_once_full_disk_has_lost_group(compressed, tmp_path, monkeypatch):
    """There is room again for the group after the lost one, and for a second save."""
    buffer, append = opened(host_buffer.Shape(64, 1, BYTES), (True, compressed), tmp_path), journal.Segment.append
    all_are_put = threading.Event()

    def full_once(segment, record):
        all_are_put.wait()
        monkeypatch.setattr(journal.Segment, "append", append)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal.Segment, "append", full_once)
    for row in range(0, 48, 16):
        buffer.put(0, row, np.ones((16, 1, BYTES), np.uint8))
    all_are_put.set()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left on device"):
            buffer.save()
    buffer.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[0], [0, 47], [0, 1, 2], [0, 40, 2, 3], [40, 0, 41, 1, 42]])
def test_rows_of_full_and_of_newest_group_are_read_in_any_order(rows, kind, tmp_path, monkeypatch):
    """Of 40 rows, the last 8 are in the newest group, which is raw; places from 40 on hold nothing yet, and row 47 too.

    The page cache refuses every read that may not wait, as a cold disk does.
    """
    waits = os.preadv

    def refuse(descriptor, buffers, offset, flags=0):
        if flags:
            raise BlockingIOError
        return waits(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", refuse)
    buffer = opened(host_buffer.Shape(48, 1, BYTES), kind, tmp_path)
    for start in (0, 16, 32):
        buffer.put(0, start, np.repeat(np.arange(start, start + 16, dtype=np.uint8), BYTES).reshape(16, 1, BYTES) + 1)
    buffer.save()()
    buffer.put(0, 0, np.full((4, 1, BYTES), 99, np.uint8))  # rows 0 to 3 are those of the newest group
    places = np.stack([np.array(rows), np.zeros(len(rows), int)], -1)[None, None]
    expected = [99 if row < 4 else row + 1 for row in rows]
    assert read(buffer, places, 1)[0, 0].tolist() == [[x] * BYTES for x in expected]
    buffer.close()


@pytest.mark.parametrize("at_once", [2**20, 0], ids=["in one call", "batch by batch"])
def test_frames_read_ahead_are_those_at_their_places(at_once, tmp_path, monkeypatch):
    """Frame (row, environment) of 2 x 3 bytes has the number 10 * row + environment. Three batches have two places."""
    monkeypatch.setattr(replay.host, "MAX_AT_ONCE", at_once)
    spec = EnvSpec("test", ShapeDtypeStruct((2, 3), jnp.uint8), Discrete(2), 2)
    store = replay.stored(ring.ReplayConfig(8, 2), spec, Parallelism(), "host").store
    (resource,) = store.resources
    resource.open(tmp_path)
    number = (10 * np.arange(8)[:, None] + np.arange(2)).astype(np.uint8)
    frames = jnp.asarray(np.broadcast_to(number[..., None, None], (8, 2, 2, 3)))
    rng = np.random.default_rng(0)
    places = [
        (rng.integers(0, 8, (3, 4)).astype(np.int32), rng.integers(0, 2, (3, 4)).astype(np.int32)) for _ in (0, 1)
    ]

    @jax.jit
    def read():
        handle = store.put(store.init(8, 2, spec.obs), jnp.int32(0), frames)
        of_batch = store.get_ahead(handle, replay_store.Batches(places, jnp.int32(3)))
        return [of_batch(jnp.int32(i)) for i in range(3)]

    for i, found in enumerate(jax.device_get(read())):
        for j, (row, env) in enumerate(places):
            expected = np.broadcast_to(np.asarray(10 * row[i] + env[i])[:, None, None], (4, 2, 3))
            np.testing.assert_array_equal(found[j], expected)
    resource.close()


def test_batches_of_uniform_replay_read_ahead_are_those_sampled(tmp_path):
    """The action of a row is its number, which also fills its frame; the next observation is one row later."""
    spec = EnvSpec("test", ShapeDtypeStruct((2,), jnp.uint8), Discrete(9), 1)
    config = replay.stored(ring.ReplayConfig(8, 1), spec, Parallelism(), "host")
    buffer, number = replay.uniform(config, spec), jnp.arange(8)[:, None]
    buffer.resources[0].open(tmp_path)
    ones = jnp.ones((8, 1))
    steps = Transition(jnp.stack([number, number], -1).astype(jnp.uint8), number, ones, ones, ones < 0, ones > 0, ())

    @jax.jit
    def sample():
        state, keys = buffer.add(buffer.init(), steps), jax.random.split(jax.random.key(0), 2)
        of_batch = buffer.read_ahead(state, replay.Draws(jax.random.clone(keys), jnp.int32(2)), 4)
        return [buffer.sample(of_batch(jnp.int32(i)), keys[i], 4, 0.9)[0] for i in range(2)]

    for batch in jax.device_get(sample()):
        np.testing.assert_array_equal(batch.obs, np.stack([batch.action] * 2, -1))
        np.testing.assert_array_equal(batch.next_obs, batch.obs + 1)
    buffer.resources[0].close()


@pytest.mark.parametrize("kind", KINDS)
def test_report_counts_bytes_of_blocks_that_are_kept(kind, tmp_path):
    """Five groups of 16 rows of 2 environments, of which the last three are kept; the first two compress worse."""
    compressed, rng = kind[1], np.random.default_rng(0)
    buffer = opened(host_buffer.Shape(32, 2, BYTES), kind, tmp_path)
    groups = [rng.integers(256 >> 2 * i, size=(16, 2, BYTES)).astype(np.uint8) for i in range(5)]
    for i, group in enumerate(groups):
        buffer.put(0, 16 * i % 32, group)
    buffer.save()()
    kept = [group[:, env].tobytes() for group in groups[2:] for env in range(2)]
    encoded = map(zstandard.ZstdCompressor(level=1).compress, kept) if compressed else kept
    num_bytes = sum(map(len, encoded))
    found = buffer.report()
    assert found["bytes"] == num_bytes and found["compression_ratio"] == 6 * 16 * BYTES / num_bytes
    buffer.close()


def test_from_bytes_inverts_to_bytes():
    """The bits of NaN values are preserved."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (3, 2, 4), dtype=np.uint32)
    frames = {
        "eye": rng.integers(0, 256, (3, 2, 2, 2, 1)).astype(np.uint8),
        "flag": rng.integers(0, 2, (3, 2)).astype(bool),
        "speed": bits.view(np.float32),
        "count": rng.integers(-9, 9, (3, 2, 1)).astype(np.int8),
    }
    like = jax.tree.map(lambda x: ShapeDtypeStruct(x.shape[2:], x.dtype), frames)
    data = to_bytes(like, jax.tree.map(jnp.asarray, frames))
    assert data.dtype == jnp.uint8 and data.shape == (3, 2, 4 + 1 + 16 + 1)
    found = from_bytes(like, data)
    np.testing.assert_array_equal(np.asarray(found.pop("speed")).view(np.uint32), bits)
    frames.pop("speed")
    jax.tree.map(np.testing.assert_array_equal, found, frames)


# As part of a program

STACK, ENVS, ROWS, LENGTH, STEPS = 3, 2, 24, 4, 2
SPEC = EnvSpec("test", ShapeDtypeStruct((2, STACK), jnp.uint8), Discrete(9), ENVS, STACK)


def history(seed, num_rows):
    """Return stacks [T, N, 2, F] as environments return them, and the episode ends, bool [T, N]."""
    rng, stacks, lasts = np.random.default_rng(seed), [], []
    recent = [deque([rng.integers(0, 4, 2)] * STACK, STACK) for _ in range(ENVS)]
    for _ in range(num_rows):
        stacks.append(np.stack([np.stack(frames, -1) for frames in recent]))
        lasts.append(rng.random(ENVS) < 0.2)
        for frames, last in zip(recent, lasts[-1]):
            frames.extend([rng.integers(0, 4, 2)] * (STACK if last else 1))
    return np.stack(stacks).astype(np.uint8), np.stack(lasts)


@functools.cache
def program(storage, compression, at_once):
    """Return a buffer and an update: add a rollout, sample three batches with one read-ahead, and one without it."""
    config = ring.ReplayConfig(ROWS, ENVS, STEPS, STACK)
    config = replay.stored(config, SPEC, Parallelism(), storage, compression)
    buffer = replay.uniform(config, SPEC)

    def update(state, steps, key):
        state = buffer.add(state, steps)
        keys = jax.random.split(key, 4)
        one = buffer.sample(state, keys[3], 8, 0.9)[:2]
        if buffer.read_ahead is None:
            return state, [buffer.sample(state, keys[i], 8, 0.9)[:2] for i in range(3)] + [one]
        of_batch = buffer.read_ahead(state, replay.Draws(keys[:3], jnp.int32(3)), 8)
        return state, [buffer.sample(of_batch(i), keys[i], 8, 0.9)[:2] for i in range(3)] + [one]

    return buffer, jax.jit(update)


WAYS = {"read in one call": (2**20, 0), "read ahead": (0, 2), "read one batch ahead": (0, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "num_ahead"), WAYS.values(), ids=WAYS)
def test_all_storages_return_same_samples(at_once, num_ahead, tmp_path, monkeypatch):
    """Samples are equal bit for bit. Their stacks are the added ones: the action identifies row and environment."""
    taken, take = [], ahead.Ahead.take
    monkeypatch.setattr(ahead.Ahead, "take", lambda *args: taken.append(args[1]) or take(*args))
    monkeypatch.setattr(replay.host, "MAX_AT_ONCE", at_once)
    monkeypatch.setattr(ahead, "MAX_BYTES", 2 * 8 * STACK * 2 * num_ahead)
    stacks, lasts = history(num_ahead, 20 * LENGTH)
    found = {}
    for store in [("device", "none"), *STORES]:
        buffer, update = program(*store, at_once)
        for resource in buffer.resources:
            resource.open(tmp_path / "-".join(store))
        state, found[store] = buffer.init(), []
        for start in range(0, len(stacks), LENGTH):
            rows = slice(start, start + LENGTH)
            number = np.repeat(np.arange(start, start + LENGTH)[:, None], ENVS, 1).astype(np.int32)
            ones = np.ones((LENGTH, ENVS), np.float32)
            action = number * ENVS + np.arange(ENVS, dtype=np.int32)
            steps = Transition(stacks[rows], action, ones, ones, lasts[rows], ones > 0, ())
            state, batches = update(state, steps, jax.random.key(start))
            found[store].append(jax.device_get(batches))
            for batch, weight in found[store][-1]:
                numbers = batch.action[weight > 0] // ENVS
                assert (numbers < start + LENGTH).all()
        for resource in buffer.resources:
            resource.close()
        jax.tree.map(np.testing.assert_array_equal, found[store], found[("device", "none")])
    assert len(taken) == (0 if at_once else len(STORES) * 3 * len(stacks) // LENGTH)
    for batch, weight in itertools.chain(*found[("disk", "zstd")]):
        number, env = np.divmod(batch.action[weight > 0], ENVS)
        ends = lasts[number, env]
        np.testing.assert_array_equal(batch.obs[weight > 0], stacks[number, env])
        np.testing.assert_array_equal(batch.next_obs[weight > 0], stacks[number + np.where(ends, 1, STEPS), env])


# Whole runs

RUN = {
    "algo": "dqn",
    "env": "CartPole-v1",
    "num_envs": 2,
    "total_steps": 768,
    "loggers": (),
    "log_level": "quiet",
    "eval_episodes": 1,
    "eval_envs": 1,
}
DQN = {"size": 192, "learning_starts": 64, "batch_size": 16, "hidden_sizes": (8,), "replay_ratio": 0.25}


def train(folder, storage="device", compression="none", total_steps=768, **agent):
    agent = DQN | agent | {"storage": storage, "compression": compression}
    jaxrl_fast.fit(run_dir=folder, **agent, **RUN | {"total_steps": total_steps})
    return learner(folder)


def learner(folder):
    saved, _ = checkpoint.newest(folder / "checkpoints", whole=True)
    return {name: x for name, x in saved.arrays.items() if name.startswith(("agent/learner", "agent/replay/v"))}


@pytest.mark.slow
def test_run_with_host_or_disk_replay_trains_like_device_also_after_resume(tmp_path):
    """The ring is filled four times, and a run resumes from its files.

    With the compiler flags of the tests, the gather on the device is fused into other loops, which round differently.
    """
    on_device, in_memory = train(tmp_path / "device", n_step=3), train(tmp_path / "host", "host", "none", n_step=3)
    folder = tmp_path / "disk"
    train(folder, "disk", "none", total_steps=400, n_step=3)
    jaxrl_fast.fit(resume=folder, total_steps=768)
    jax.tree.map(np.testing.assert_array_equal, learner(folder), in_memory)
    jax.tree.map(np.testing.assert_array_equal if not os.environ["XLA_FLAGS"] else close, in_memory, on_device)


@pytest.mark.slow
def test_damaged_replay_costs_its_checkpoint(tmp_path, capsys):
    """An older intact checkpoint is loaded. Without one, the resume fails in one line, but the policy still loads."""
    folder = tmp_path / "disk"
    train(folder, "disk", "none", total_steps=400)
    older = {path.name for path in (folder / "replay").iterdir()}
    jaxrl_fast.fit(resume=folder, total_steps=768)
    for file in (folder / "replay").iterdir():
        if file.name not in older:
            flip(file)
    jaxrl_fast.fit(resume=folder, total_steps=800)
    assert "bin does not match its checksum; using the previous one" in capsys.readouterr().err
    files = [*(folder / "replay").iterdir()]
    cut = lambda path: os.truncate(path, 9)
    for damage, problem in ((cut, "does not match its checksum"), (Path.unlink, "cannot be read (No such file or")):
        for file in files:
            damage(file)
        with pytest.raises(
            ValueError, match=rf"got \d damaged checkpoints? \(.*bin {re.escape(problem)}.*; start a new"
        ):
            jaxrl_fast.fit(resume=folder, total_steps=2000)
    assert jaxrl_fast.load(folder, which="last").env_steps == 800  # a policy needs no replay
