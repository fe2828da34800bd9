"""Random histories for replay buffers with every kind of episode end, and an oracle of the readable transitions."""

import functools
import random
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import numpy as np

from jaxrl_fast.replay import ring as replay_ring
from jaxrl_fast.types import Transition

GAMMA = np.float32(0.9)
NUM_HISTORIES = 24  # in each example, batched by vmap
seeds = st.integers(0, 2**32 - 1)


class Step(NamedTuple):
    """One step of one environment. An observation is a tuple of frames, oldest first; a frame is an image index."""

    frames: tuple[int, ...]
    next_frames: tuple[int, ...]
    reward: float
    discount: float
    last: bool
    valid: bool


def play(chance, num_steps, stack):
    """Return random steps of one environment. It has few different frames, so neighboring frames are often equal."""
    often = chance.choice([0.0, 0.1, 0.4, 1.0])  # the probability that an episode ends
    pictures = chance.choice([2, 4])
    frames = (chance.randrange(pictures),) * stack
    steps, end = [], None
    for _ in range(num_steps):
        shifted = (*frames, chance.randrange(pictures))[1:]
        if end:  # a reset step: its action is ignored; it starts a new stack, except after a lost life
            following = shifted if end == "lost life" else (chance.randrange(pictures),) * stack
            steps.append(Step(frames, following, 0.0, 1.0, last=False, valid=False))
            end = None
        else:
            following = shifted
            end = chance.choice(["terminal", "time-out", "lost life"]) if chance.random() < often else None
            worthless = end in ("terminal", "lost life") or chance.random() < 0.05  # sometimes only the discount is 0
            steps.append(Step(frames, following, chance.uniform(-1, 1), 0.0 if worthless else 1.0, bool(end), True))
        frames = following
    return steps


def n_steps(steps, start, n):
    """Return (reward, discount, last observation) of up to n steps of one episode, or None if steps are missing."""
    if start + n >= len(steps):
        return None
    reward, discount = 0.0, np.float32(1)
    for step in steps[start : start + n]:
        reward += float(discount) * step.reward
        discount *= GAMMA * np.float32(step.discount)
        if step.last:
            break
    return reward, discount, step.next_frames


class Layouts(NamedTuple):
    """A layout of a replay buffer, and the histories that test it."""

    layout: replay_ring.ReplayConfig
    rollout_length: int
    picture: dict[str, tuple[tuple[int, ...], str]]  # shape and dtype of each part of a frame; "" if there is one
    num_steps: int  # enough to overwrite the ring several times


def layouts(num_rows, num_envs, n_step, frame_stack, rollout_length, picture, num_steps=40):
    return Layouts(
        replay_ring.ReplayConfig(num_rows, num_envs, n_step, frame_stack), rollout_length, picture, num_steps
    )


VECTOR = {"": ((3,), "float32")}
TREE = {"position": ((2,), "float32"), "door": ((), "bool"), "map": ((2, 2), "uint8")}
GRAY, COLOR = {"": ((2, 3, 1), "uint8")}, {"": ((2, 3, 2), "uint8")}
STACKED_TREE = {"eye": ((2, 1, 1), "uint8"), "speed": ((2,), "float32")}
CASES = {
    "vector": layouts(12, 3, 3, 0, 4, VECTOR),
    "vector-one-by-one": layouts(8, 1, 5, 0, 1, VECTOR),
    "many-steps": layouts(20, 2, replay_ring.MAX_UNROLLED + 3, 0, 1, VECTOR),
    "tree": layouts(11, 3, 1, 0, 1, TREE),
    "gray": layouts(16, 3, 3, 4, 4, GRAY),
    "gray-one-by-one": layouts(13, 1, 5, 4, 1, GRAY),
    "color": layouts(9, 3, 1, 3, 1, COLOR),
    "color-one-environment": layouts(16, 1, 5, 3, 4, COLOR),
    "stacked-tree": layouts(11, 3, 3, 3, 1, STACKED_TREE),
}
STACKED = ["gray", "color-one-environment", "stacked-tree"]  # a few cases, because each compiles separately


def random_frames(rng, case):
    """Return eight different images, each with the parts of a frame."""
    drawn = {}
    for name, (shape, dtype) in case.picture.items():
        x = rng.integers(0, 2 if dtype == "bool" else 4, (8, *shape)).astype(dtype)
        drawn[name] = x if dtype == "bool" else (x + np.arange(8).reshape(8, *(1,) * len(shape)) * 4).astype(dtype)
    return drawn


def observe(case, pictures, frames):
    """Return observations [...] of frames [..., k], joined on the last axis, oldest first. Without a stack, k is 1."""
    frames = np.asarray(frames)
    parts = {
        name: np.concatenate([x[frames[..., i]] for i in range(frames.shape[-1])], axis=-1)
        if case.layout.frame_stack
        else x[frames[..., 0]]
        for name, x in pictures.items()
    }
    return parts.get("", parts)


def spec(case):
    """Return the shapes and dtypes of one environment's observation."""
    zeros = observe(case, random_frames(np.random.default_rng(0), case), np.zeros(max(case.layout.frame_stack, 1), int))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), zeros)


class History(NamedTuple):
    """H histories as arrays: the steps to add, and the transitions that the oracle expects."""

    steps: Transition  # [H, T, N, ...]; actions count steps from 1
    reward: np.ndarray  # this and later fields: [H, T * N], by step number
    discount: np.ndarray
    obs: np.ndarray  # [H, T * N, ...]
    next_obs: np.ndarray
    valid: np.ndarray


def history(case, seed, num_histories=NUM_HISTORIES):
    num_envs, stack = case.layout.num_envs, max(case.layout.frame_stack, 1)
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    rows = []
    for _ in range(num_histories):
        envs = [play(chance, case.num_steps, stack) for _ in range(num_envs)]
        rows.append([[(env[t], n_steps(env, t, case.layout.n_step)) for env in envs] for t in range(case.num_steps)])
    gather = lambda get: np.array([[[get(*x) for x in envs] for envs in times] for times in rows])
    long = lambda x: x.reshape(num_histories, -1, *x.shape[3:])
    pictures = random_frames(rng, case)
    number = 1 + np.arange(case.num_steps * num_envs, dtype=np.int32).reshape(case.num_steps, num_envs)
    see = functools.partial(observe, case, pictures)
    steps = Transition(
        obs=see(gather(lambda step, _: step.frames)),
        action=np.broadcast_to(number, (num_histories, *number.shape)),
        reward=gather(lambda step, _: step.reward).astype(np.float32),
        discount=gather(lambda step, _: step.discount).astype(np.float32),
        last=gather(lambda step, _: step.last),
        valid=gather(lambda step, _: step.valid),
        extras=(),
    )
    unknown = 0.0, np.float32(0), (0,) * stack
    return History(
        steps,
        long(gather(lambda _, known: (known or unknown)[0])),
        long(gather(lambda _, known: (known or unknown)[1])),
        see(long(gather(lambda step, _: step.frames))),
        see(long(gather(lambda _, known: (known or unknown)[2]))),
        long(steps.valid),
    )


def known(case, num_added):
    """Return which steps are readable from the newest R rows, by step number [T * N].

    A step is readable if its n successors and all its frames are present. Until the ring is full, no frame is lost.
    A ring that has just filled drops its oldest rows at once, although nothing has been overwritten yet.
    """
    layout = case.layout
    oldest = max(num_added - layout.num_rows, 0)
    lost = layout.frame_stack - 1 if layout.frame_stack and num_added >= layout.num_rows else 0
    times = np.arange(case.num_steps)
    return np.repeat((times >= oldest + lost) & (times + layout.n_step < num_added), layout.num_envs)


def same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
