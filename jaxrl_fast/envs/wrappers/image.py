"""Make images gray, resize them and stack them: options of any environment whose observation has one image.

Python environments change their frames on the host (`gymnasium.making`), all others on the device, with the same bits.
Pools return single frames, and only single frames are stored. As `rl.frame_stack` requires, a stack begins as copies of
the first frame of an episode and adds one frame in each row.
"""

import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_fast.envs.wrappers.frames import change as change_frames
from jaxrl_fast.envs.wrappers.wrapper import Rules, resized, where, wrap
from jaxrl_fast.networks import reading
from jaxrl_fast.types import Array, Env, PyTree, TimeStep, View
from jaxrl_fast.utils.arguments import coerce, whole_number

MAX_STACK, MAX_SIDE = 16, 1024


@dataclasses.dataclass(frozen=True)
class Frames:
    """The changes of frames."""

    gray: bool = False
    resize: tuple[int, int] | None = None  # height and width
    frame_stack: int = 1


def parse(env_id: str, options: Mapping[str, Any]) -> Frames:
    """Return the changes of frames. Raise ValueError for an invalid value."""
    return Frames(
        gray=coerce(env_id, "gray", options.get("gray", False), False),
        resize=_size(env_id, options["resize"]) if "resize" in options else None,
        frame_stack=whole_number(env_id, "frame_stack", options.get("frame_stack", 1), MAX_STACK),
    )


def transform(env: Env, options: Mapping[str, Any]) -> Env:
    """Return the environments with other frames. Raise ValueError if their observation does not have one image."""
    spec, names = env.spec, ", ".join(options)
    frames, index = check(spec.id, options, spec.obs)
    if spec.frame_stack > 1:
        raise ValueError(f"{names}: {spec.id} stacks {spec.frame_stack} frames already; leave {names} out")
    rules = Rules(partial(_first, frames, index), partial(_follow, frames, index))
    part = jax.tree.leaves(spec.obs)[index]
    one = jax.ShapeDtypeStruct((1, *part.shape), part.dtype)
    obs = replaced(spec.obs, index, jax.eval_shape(lambda x: _stacked(frames, change(frames, x))[0], one))
    return _with_spec(wrap(env, rules), frames, index, obs)


def check(env_id: str, options: Mapping[str, Any], obs: PyTree) -> tuple[Frames, int]:
    """Return the changes of frames, and the index of the image among the parts of an observation.

    Raise ValueError if it has no image, or several.
    """
    frames, names = parse(env_id, options), ", ".join(options)
    parts = jax.tree.leaves(obs)
    index = reading.only_image(parts)
    if index is None or parts[index].dtype != jnp.uint8:
        got = " and ".join(f"{x.dtype}{list(x.shape)}" for x in parts)
        problem = f"the observation of {env_id} must have one image, uint8 [H, W, C], got {got}"
        raise ValueError(f"{names}: {problem}; leave {names} out")
    channels = parts[index].shape[2]
    if frames.gray and channels not in (1, 3):
        raise ValueError(f"gray: the frames of {env_id} must have 3 channels, got {channels}; leave gray out")
    return frames, index


def replaced(tree: PyTree, index: int, part: Any) -> PyTree:
    """Return a tree with another leaf of this index."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [*leaves[:index], part, *leaves[index + 1 :]])


def _with_spec(env: Env, frames: Frames, index: int, obs: PyTree) -> Env:
    """Return the environments with another description of their observation.

    Only stacks that are the whole observation can be stored as single frames.
    """
    stack = frames.frame_stack if frames.frame_stack > 1 and hasattr(obs, "shape") else 0
    return env._replace(
        spec=env.spec._replace(obs=obs, frame_stack=stack),
        view=resized(_of_stacks(env, frames, index), lambda other: _with_spec(other, frames, index, obs)),
    )


def _of_stacks(env: Env, frames: Frames, index: int) -> View:
    """Return the view of stacks of the frames that the environment returns, as its channels, the oldest first."""
    view = env.view
    whole: Any = env.spec.obs if view.raw_obs is None else view.raw_obs
    raw_paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(whole)]
    is_mask = lambda path: view.raw_mask is not None and getattr(path[0], "key", "") == "action_mask"
    place = [i for i, path in enumerate(raw_paths) if not is_mask(path)][index]
    frame = jax.tree.leaves(whole)[place]
    shape = (*frame.shape, 1) if frame.ndim == 2 else frame.shape
    axis = 0 if reading.has_channels_first(frame) else 2
    stacked = tuple(n * frames.frame_stack if i == axis else n for i, n in enumerate(shape))

    def encode(raw: PyTree) -> PyTree:
        parts = jnp.split(jax.tree.leaves(raw)[place], frames.frame_stack, axis=axis + 1)
        each = [view.encode_obs(replaced(raw, place, x.reshape(-1, *frame.shape))) for x in parts]
        changed = [change(frames, jax.tree.leaves(obs)[index]) for obs in each]
        return replaced(each[0], index, jnp.concatenate(changed, axis=-1))

    return view._replace(raw_obs=replaced(whole, place, jax.ShapeDtypeStruct(stacked, frame.dtype)), encode_obs=encode)


def change(frames: Frames, obs: Array) -> Array:
    """Return gray or resized frames, uint8 [n, H', W', C'], of uint8 [n, H, W, C] or [n, H, W]."""
    with jax.default_matmul_precision("highest"):  # a GPU would round to fewer bits
        changed: Array = change_frames(frames.gray, frames.resize, obs, jnp)
    return changed


def _stacked(frames: Frames, frame: Array) -> Array:
    """Return the stack at the start of an episode: copies of its first frame."""
    return jnp.tile(frame, frames.frame_stack)


def _first(frames: Frames, index: int, timestep: TimeStep) -> tuple[PyTree, TimeStep]:
    """Return the memory and the time step of a reset."""
    stack = _stacked(frames, change(frames, jax.tree.leaves(timestep.obs)[index]))
    memory = (stack, timestep.last) if frames.frame_stack > 1 else ()
    return memory, timestep._replace(obs=replaced(timestep.obs, index, stack))


def _follow(frames: Frames, index: int, memory: PyTree, after: TimeStep) -> tuple[PyTree, TimeStep]:
    """Return the memory and the time step after a step. The memory is the last stack, and whether its episode ended."""
    frame = change(frames, jax.tree.leaves(after.obs)[index])
    if not memory:
        return (), after._replace(obs=replaced(after.obs, index, frame))
    stack, begins = memory
    older = where(begins, jnp.tile(frame, frames.frame_stack - 1), stack[..., frame.shape[-1] :])
    stack = jnp.concatenate([older, frame], axis=-1)
    return (stack, after.last), after._replace(obs=replaced(after.obs, index, stack))


def _size(env_id: str, value: Any) -> tuple[int, int]:
    """Return the height and width written as 84x84."""
    parts = re.fullmatch(r"(\d+)x(\d+)", value) if isinstance(value, str) else None
    sides = tuple(map(int, parts.groups())) if parts else tuple(value) if isinstance(value, list | tuple) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in sides):
        raise ValueError(f"resize: must be height x width of 1 to {MAX_SIDE} for {env_id}, got {value}; use 84x84")
    return sides[0], sides[1]
