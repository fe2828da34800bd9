"""Classic control, drawn from observations: lengths and angles are those of the equations of motion."""

import math
from typing import Any

import numpy as np

from jaxrl_fast.evaluation.render.canvas import BLUE, GREEN, GRID, INK, ORANGE, SHADE, Canvas, Point, View

CART_POLE = View(-3.0, -0.55, 3.0, 1.45, width=600)
ACROBOT = View(-2.3, -2.3, 2.3, 2.3, width=414)
MOUNTAIN_CAR = View(-1.2, -0.05, 0.6, 1.3, width=540)
PENDULUM = View(-1.5, -1.5, 1.5, 1.5, width=390)
POLE = 1.0  # metres: the equations have its half, 0.5
TRACK_END = 2.4  # metres: the episode ends beyond


def cart_pole(obs: Any) -> np.ndarray:
    """[x, velocity, angle, angular velocity]; a positive angle leans to the right."""
    x, _, angle, _ = map(float, obs)
    canvas = Canvas(CART_POLE)
    canvas.line([(-3.2, -0.15), (3.2, -0.15)], 0.02, SHADE)
    for end in (-TRACK_END, TRACK_END):
        canvas.line([(end, -0.25), (end, -0.05)], 0.03, SHADE)
    for side in (-0.17, 0.17):
        canvas.disc((x + side, -0.1), 0.06, SHADE)
    canvas.box((x, 0.0), (0.6, 0.2), 0.05, INK)
    canvas.line([(x, 0.0), pole_tip(x, angle)], 0.09, ORANGE)
    canvas.disc((x, 0.0), 0.045, BLUE)
    return canvas.picture()


def pole_tip(x: float, angle: float) -> Point:
    """Where the pole ends."""
    return x + POLE * math.sin(angle), POLE * math.cos(angle)


def acrobot(obs: Any) -> np.ndarray:
    """[cos and sin of the first angle, of the second, two velocities]: from hanging down, and from the first link."""
    joint, tip = acrobot_links(*map(float, obs[:4]))
    canvas = Canvas(ACROBOT)
    canvas.line([(-2.4, 1.0), (2.4, 1.0)], 0.025, GREEN)  # where the tip must get to
    canvas.line([(0.0, 0.0), joint], 0.17, BLUE)
    canvas.line([joint, tip], 0.17, ORANGE)
    for place in ((0.0, 0.0), joint):
        canvas.disc(place, 0.05, "#ffffff")
    return canvas.picture()


def acrobot_links(cos_1: float, sin_1: float, cos_2: float, sin_2: float) -> tuple[Point, Point]:
    """Where two links of length 1 that hang from the origin meet, and where the second ends."""
    cos_both, sin_both = cos_1 * cos_2 - sin_1 * sin_2, sin_1 * cos_2 + cos_1 * sin_2
    return (sin_1, -cos_1), (sin_1 + sin_both, -cos_1 - cos_both)


def mountain_car(obs: Any, goal: float) -> np.ndarray:
    """[position, velocity]; the episode ends at the goal."""
    x = float(obs[0])
    canvas = Canvas(MOUNTAIN_CAR)
    left, right = MOUNTAIN_CAR.left, MOUNTAIN_CAR.right
    ridge = [(at, hill(at)) for at in np.linspace(left - 0.02, right + 0.02, 200)]
    canvas.polygon([(left - 0.02, -0.1), *ridge, (right + 0.02, -0.1)], "#e6ebe4")
    canvas.line(ridge, 0.012, SHADE)
    canvas.line([(goal, hill(goal)), (goal, hill(goal) + 0.2)], 0.01, INK)
    top = hill(goal) + 0.2
    canvas.polygon([(goal, top), (goal - 0.1, top - 0.035), (goal, top - 0.07)], GREEN)
    for side in (-0.045, 0.045):
        canvas.disc(on_hill(x, side, 0.022), 0.022, INK)
    body = [(-0.085, 0.03), (0.085, 0.03), (0.085, 0.06), (0.045, 0.065), (0.025, 0.1), (-0.04, 0.1), (-0.085, 0.06)]
    canvas.polygon([on_hill(x, *point) for point in body], BLUE)
    return canvas.picture()


def hill(x: float) -> float:
    """The height whose slope the car feels."""
    return 0.45 * math.sin(3 * x) + 0.55


def on_hill(x: float, along: float, above: float) -> Point:
    """A point of a car that stands at x: so far along the slope, and above it."""
    angle = math.atan(1.35 * math.cos(3 * x))
    cos, sin = math.cos(angle), math.sin(angle)
    return x + along * cos - above * sin, hill(x) + along * sin + above * cos


def pendulum(obs: Any) -> np.ndarray:
    """[cos and sin of the angle, angular velocity]; 0 stands up, and positive angles turn to the left."""
    cos, sin = float(obs[0]), float(obs[1])
    canvas = Canvas(PENDULUM)
    for place in range(60):
        angle = 2 * math.pi * place / 60
        canvas.disc((1.25 * math.sin(angle), 1.25 * math.cos(angle)), 0.012, GRID)
    canvas.disc((0.0, 1.25), 0.03, GREEN)
    canvas.line([(0.0, 0.0), (-sin, cos)], 0.18, ORANGE)
    canvas.disc((0.0, 0.0), 0.05, INK)
    return canvas.picture()
