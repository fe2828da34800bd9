"""Make images gray, resize them and stack them: options of any environment whose observation is one image.

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
    """Return the environments with other frames. Raise ValueError if their observation is not one image."""
    spec, names = env.spec, ", ".join(options)
    frames = check(spec.id, options, spec.obs)
    obs = spec.obs
    if spec.frame_stack > 1:
        raise ValueError(f"{names}: {spec.id} stacks {spec.frame_stack} frames already; leave {names} out")
    frame = jax.eval_shape(partial(change, frames), jax.ShapeDtypeStruct((1, *obs.shape), obs.dtype)).shape[1:]
    rules = Rules(partial(_first, frames), partial(_follow, frames))
    changed = jax.ShapeDtypeStruct((*frame[:2], frame[2] * frames.frame_stack), obs.dtype)
    stack = frames.frame_stack if frames.frame_stack > 1 else 0
    return _with_spec(wrap(env, rules), frames, changed, stack)


def check(env_id: str, options: Mapping[str, Any], obs: PyTree) -> Frames:
    """Return the changes of frames. Raise ValueError if the observation is not one image."""
    frames, names = parse(env_id, options), ", ".join(options)
    if not (isinstance(obs, jax.ShapeDtypeStruct) and obs.dtype == jnp.uint8 and obs.ndim in (2, 3)):
        got = " and ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(obs))
        raise ValueError(f"{names}: the observation of {env_id} must be one image, uint8 [H, W, C], got {got}")
    channels = obs.shape[2] if obs.ndim == 3 else 1
    if frames.gray and channels not in (1, 3):
        raise ValueError(f"gray: the frames of {env_id} must have 3 channels, got {channels}; leave gray out")
    return frames


def _with_spec(env: Env, frames: Frames, obs: jax.ShapeDtypeStruct, frame_stack: int) -> Env:
    """Return the environments with another description of their observation."""
    return env._replace(
        spec=env.spec._replace(obs=obs, frame_stack=frame_stack),
        view=resized(_of_stacks(env, frames), lambda other: _with_spec(other, frames, obs, frame_stack)),
    )


def _of_stacks(env: Env, frames: Frames) -> View:
    """Return the view of stacks of the frames that the environment returns, as its channels, the oldest first."""
    view = env.view
    whole: Any = env.spec.obs if view.raw_obs is None else view.raw_obs
    name = next(name for name in whole if name != "action_mask") if view.raw_mask else ""
    frame = whole[name] if name else whole
    shape = (*frame.shape, 1) if frame.ndim == 2 else frame.shape
    axis = 0 if reading.has_channels_first(frame) else 2
    stacked = tuple(n * frames.frame_stack if i == axis else n for i, n in enumerate(shape))
    placed = lambda obs, x: obs | {name: x} if name else x

    def encode(raw: PyTree) -> Array:
        stack = raw[name] if name else raw
        each = (x.reshape(-1, *frame.shape) for x in jnp.split(stack, frames.frame_stack, axis=axis + 1))
        return jnp.concatenate([change(frames, view.encode_obs(placed(raw, x))) for x in each], axis=-1)

    return view._replace(raw_obs=placed(whole, jax.ShapeDtypeStruct(stacked, frame.dtype)), encode_obs=encode)


def change(frames: Frames, obs: Array) -> Array:
    """Return gray or resized frames, uint8 [n, H', W', C'], of uint8 [n, H, W, C] or [n, H, W]."""
    with jax.default_matmul_precision("highest"):  # a GPU would round to fewer bits
        changed: Array = change_frames(frames.gray, frames.resize, obs, jnp)
    return changed


def _first(frames: Frames, timestep: TimeStep) -> tuple[PyTree, TimeStep]:
    """Return the memory and the time step of a reset."""
    stack = jnp.tile(change(frames, timestep.obs), frames.frame_stack)
    memory = (stack, timestep.last) if frames.frame_stack > 1 else ()
    return memory, timestep._replace(obs=stack)


def _follow(frames: Frames, memory: PyTree, after: TimeStep) -> tuple[PyTree, TimeStep]:
    """Return the memory and the time step after a step. The memory is the last stack, and whether its episode ended."""
    frame = change(frames, after.obs)
    if not memory:
        return (), after._replace(obs=frame)
    stack, begins = memory
    older = where(begins, jnp.tile(frame, frames.frame_stack - 1), stack[..., frame.shape[-1] :])
    stack = jnp.concatenate([older, frame], axis=-1)
    return (stack, after.last), after._replace(obs=stack)


def _size(env_id: str, value: Any) -> tuple[int, int]:
    """Return the height and width written as 84x84."""
    parts = re.fullmatch(r"(\d+)x(\d+)", value) if isinstance(value, str) else None
    sides = tuple(map(int, parts.groups())) if parts else tuple(value) if isinstance(value, list | tuple) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in sides):
        raise ValueError(f"resize: must be height x width of 1 to {MAX_SIDE} for {env_id}, got {value}; use 84x84")
    return sides[0], sides[1]
