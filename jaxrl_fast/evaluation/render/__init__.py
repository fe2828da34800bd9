"""Pictures of observations: `find` gives what draws those of an environment, in numpy and Pillow.

A picture is uint8 [H, W, 3]. Nothing but an observation is needed, so one renderer serves every backend.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrl_fast.evaluation.render import classic_control, frames, minatar
from jaxrl_fast.utils.parsing import nearest


class Renderer(NamedTuple):
    """How an environment is shown."""

    draw: Callable[[Any], np.ndarray]  # an observation to a picture
    fps: int  # of its own time, or slow enough to follow


RENDERERS = {
    "CartPole-v0": Renderer(classic_control.cart_pole, 50),
    "CartPole-v1": Renderer(classic_control.cart_pole, 50),
    "Acrobot-v1": Renderer(classic_control.acrobot, 15),
    "MountainCar-v0": Renderer(partial(classic_control.mountain_car, goal=0.5), 30),
    "MountainCarContinuous-v0": Renderer(partial(classic_control.mountain_car, goal=0.45), 30),
    "Pendulum-v1": Renderer(classic_control.pendulum, 20),
    **{f"{game}-MinAtar": Renderer(partial(minatar.board, pieces), 10) for game, pieces in minatar.GAMES.items()},
}
BACKENDS = ("gymnax", "envpool")  # whose environments of these names are the same ones


def find(env_id: str, obs: Any, frame_stack: int = 0) -> Renderer:
    """The renderer of an environment with observations like `obs` (a ShapeDtypeStruct), by its name or as images.

    ValueError, a sentence that lists what can be drawn, where there is none.
    """
    backend, _, name = env_id.rpartition("/")
    if backend in BACKENDS and name in RENDERERS:
        return RENDERERS[name]
    if frames.are(obs):
        return Renderer(partial(frames.newest, frame_stack=frame_stack), 15)
    raise ValueError(
        f"{env_id} cannot be drawn{nearest(name, RENDERERS)}; what can is {', '.join(RENDERERS)}, and whatever is "
        "observed as an image"
    )
