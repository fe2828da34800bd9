"""The buffers of replay_stores.py that run in a compiled program."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from replay_stores import BATCH, BATCHES, GAMMA, NUM_ENVS

from jaxrl_fast import replay
from jaxrl_fast.types import Discrete, EnvSpec, Parallelism, Transition
from jaxrl_fast.utils import devices

devices.configure_cpu_devices(1)


class Contender(NamedTuple):
    """A buffer as a program."""

    state: Any
    update: Callable[..., tuple[Any, jax.Array]]  # (state, frames [T + F - 1, 8, ...], key, batches) to state, sum
    num_bytes: Callable[[Any], float]  # of one transition's observation in a state
    close: Callable[[], None]


class Memmap:
    """Frames in a numpy memory map, in place of `replay.host.blocks`."""

    def __init__(self, sizes: tuple[int, ...], path: Path):
        self.frames = np.memmap(path, np.uint8, "w+", shape=sizes)
        self.num_bytes, self.codec_time = 0, 0.0

    def write(self, group: int, data: np.ndarray) -> None:
        self.frames[group % len(self.frames)] = data
        self.num_bytes = min(self.num_bytes + data.nbytes, self.frames.nbytes)

    def read(self, request: Any, out: np.ndarray) -> None:
        out[request.row] = self.frames[request.group % len(self.frames), request.env, request.at]

    def close(self) -> None:
        del self.frames


def make(store: str, shape: tuple[int, ...], stack: int, capacity: int, length: int, folder: Path) -> Contender:
    """Return a buffer for rollouts of `length` steps; its files are in the folder."""
    obs = jax.ShapeDtypeStruct((*shape, stack) if stack else shape, jnp.uint8)
    stacks = lambda frames: jnp.stack([frames[i : i + length] for i in range(stack)], -1) if stack else frames
    if store == "flashbax":
        return of_flashbax(obs, stacks, capacity)
    spec = EnvSpec("frames", obs, Discrete(4), NUM_ENVS, stack)
    config = replay.ReplayConfig(capacity // NUM_ENVS // length * length, NUM_ENVS, 1, stack)
    storage, compression = ("host", "none") if store == "memmap" else store.split("-")
    buffer = replay.uniform(replay.stored(config, spec, Parallelism(), storage, compression), spec)
    for resource in buffer.resources:
        resource.open(folder / resource.name)
    host = buffer.resources[0].open.__self__ if buffer.resources else None
    if store == "memmap":
        host.blocks = Memmap(host.blocks.frames.shape, folder / "map")
    ones = jnp.ones((length, NUM_ENVS))

    def update(state: Any, frames: jax.Array, key: jax.Array, num: jax.Array) -> tuple[Any, jax.Array]:
        steps = Transition(stacks(frames), ones.astype(jnp.int32), ones, ones, ones < 0, ones > 0, ())
        state = buffer.add(state, steps)
        keys = jax.random.split(key, BATCHES)
        draws = replay.Draws(keys, num)
        of_batch = buffer.read_ahead(state, draws, BATCH) if buffer.read_ahead else lambda i: state

        def one(i: jax.Array, total: jax.Array) -> jax.Array:
            sample = buffer.sample(of_batch(i), keys[i], BATCH, GAMMA)[0]
            return total + sample.obs.sum(dtype=jnp.uint32) + sample.next_obs.sum(dtype=jnp.uint32)

        return state, jax.lax.fori_loop(0, num, one, jnp.uint32(0))

    def num_bytes(state: Any) -> float:
        if not host:
            return sum(x.nbytes for x in jax.tree.leaves(state.obs)) / config.num_rows / NUM_ENVS
        host._flush()
        frame = host.shape.num_bytes
        return frame if store == "memmap" else frame * host.blocks.num_bytes / host.blocks.num_raw_bytes

    return Contender(buffer.init(), update, num_bytes, lambda: [resource.close() for resource in buffer.resources])


def of_flashbax(obs: jax.ShapeDtypeStruct, stacks: Callable[[jax.Array], jax.Array], capacity: int) -> Contender:
    """Return flashbax's flat buffer, which keeps each whole observation once."""
    import flashbax

    sizes = dict(max_length=capacity, min_length=1, sample_batch_size=BATCH, add_batch_size=NUM_ENVS)
    buffer = flashbax.make_flat_buffer(**sizes, add_sequences=True)
    example = {"obs": jnp.zeros(obs.shape, obs.dtype), "action": jnp.int32(0), "reward": jnp.float32(0)}

    def update(state: Any, frames: jax.Array, key: jax.Array, num: jax.Array) -> tuple[Any, jax.Array]:
        rows = stacks(frames).swapaxes(0, 1)  # [N, T, ...]
        zeros = jnp.zeros(rows.shape[:2])
        state = buffer.add(state, {"obs": rows, "action": zeros.astype(jnp.int32), "reward": zeros})
        keys = jax.random.split(key, BATCHES)

        def one(i: jax.Array, total: jax.Array) -> jax.Array:
            pair = buffer.sample(state, keys[i]).experience
            return total + pair.first["obs"].sum(dtype=jnp.uint32) + pair.second["obs"].sum(dtype=jnp.uint32)

        return state, jax.lax.fori_loop(0, num, one, jnp.uint32(0))

    return Contender(
        buffer.init(example), update, lambda state: state.experience["obs"].nbytes / capacity, lambda: None
    )
