"""Draw observations as images uint8 [H, W, 3] with numpy and Pillow; `find` returns the renderer of an environment.

Renderers use only the observation, so one renderer serves every backend.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrl_fast.evaluation.render import classic_control, frames, minatar, paddles
from jaxrl_fast.utils.parsing import nearest


class Renderer(NamedTuple):
    """The function that draws an environment's observations, and its frame rate."""

    draw: Callable[[Any], np.ndarray]  # from an observation to an image
    fps: int  # steps per second: real time, or slow enough to follow


RENDERERS = {
    "CartPole-v0": Renderer(classic_control.cart_pole, 50),
    "CartPole-v1": Renderer(classic_control.cart_pole, 50),
    "Acrobot-v1": Renderer(classic_control.acrobot, 15),
    "MountainCar-v0": Renderer(partial(classic_control.mountain_car, goal=0.5), 30),
    "MountainCarContinuous-v0": Renderer(partial(classic_control.mountain_car, goal=0.45), 30),
    "Pendulum-v1": Renderer(classic_control.pendulum, 20),
    "Paddles": Renderer(paddles.field, 30),
    **{f"{game}-MinAtar": Renderer(partial(minatar.board, pieces), 10) for game, pieces in minatar.GAMES.items()},
}
BACKENDS = ("gymnax", "games", "envpool", "gymnasium")  # backends in which these names are the same environments


def is_known(env_id: str) -> bool:
    """Return whether an environment is drawn from its observations, by its name."""
    backend, _, name = env_id.rpartition("/")
    return backend in BACKENDS and name in RENDERERS


def find(env_id: str, obs: Any, frame_stack: int = 0) -> Renderer:
    """Return the renderer of an environment, by its name or because it observes images.

    Args:
        env_id: For example "gymnax/CartPole-v1".
        obs: Shape and dtype of an observation (a ShapeDtypeStruct).
        frame_stack: Number of frames in an observation, or 0.

    Raises:
        ValueError: If no renderer exists; the message lists the available ones.
    """
    name = env_id.rpartition("/")[2]
    if is_known(env_id):
        return RENDERERS[name]
    if frames.is_image(obs):
        return Renderer(partial(frames.newest_frame, frame_stack=frame_stack), 15)
    raise ValueError(
        f"{env_id} has no renderer{nearest(name, RENDERERS)}; renderers exist for {', '.join(RENDERERS)} and for "
        "environments that observe images"
    )
