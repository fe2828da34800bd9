"""Draw classic control tasks from their observations, with the lengths and angles of the equations of motion."""

import math
from typing import Any

import numpy as np

from jaxrl_fast.evaluation.render.canvas import BLUE, GREEN, GRID, INK, ORANGE, SHADE, Canvas, Point, View

CART_POLE = View(-3.0, -0.55, 3.0, 1.45, width=600)
ACROBOT = View(-2.3, -2.3, 2.3, 2.3, width=414)
MOUNTAIN_CAR = View(-1.2, -0.05, 0.6, 1.3, width=540)
PENDULUM = View(-1.5, -1.5, 1.5, 1.5, width=390)
POLE_LENGTH = 1.0  # meters; the equations use half of it, 0.5
TRACK_END = 2.4  # meters; the episode ends beyond it


def cart_pole(obs: Any) -> np.ndarray:
    """Draw [x, velocity, angle, angular velocity]; a positive angle leans to the right."""
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
    return canvas.image()


def pole_tip(x: float, angle: float) -> Point:
    """Return the position of the pole's tip."""
    return x + POLE_LENGTH * math.sin(angle), POLE_LENGTH * math.cos(angle)


def acrobot(obs: Any) -> np.ndarray:
    """Draw [cos and sin of the first angle, of the second, two velocities].

    The first angle is measured from hanging down, the second from the first link.
    """
    joint, tip = acrobot_links(*map(float, obs[:4]))
    canvas = Canvas(ACROBOT)
    canvas.line([(-2.4, 1.0), (2.4, 1.0)], 0.025, GREEN)  # the height that the tip must reach
    canvas.line([(0.0, 0.0), joint], 0.17, BLUE)
    canvas.line([joint, tip], 0.17, ORANGE)
    for center in ((0.0, 0.0), joint):
        canvas.disc(center, 0.05, "#ffffff")
    return canvas.image()


def acrobot_links(cos_1: float, sin_1: float, cos_2: float, sin_2: float) -> tuple[Point, Point]:
    """Return the joint and the tip of two links of length 1 that hang from the origin."""
    cos_both, sin_both = cos_1 * cos_2 - sin_1 * sin_2, sin_1 * cos_2 + cos_1 * sin_2
    return (sin_1, -cos_1), (sin_1 + sin_both, -cos_1 - cos_both)


def mountain_car(obs: Any, goal: float) -> np.ndarray:
    """Draw [position, velocity]; the episode ends at the goal."""
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
    return canvas.image()


def hill(x: float) -> float:
    """Return the height of the hill at x."""
    return 0.45 * math.sin(3 * x) + 0.55


def on_hill(x: float, along: float, above: float) -> Point:
    """Return a point of a car that stands at x: `along` the slope and `above` it, in world units."""
    angle = math.atan(1.35 * math.cos(3 * x))
    cos, sin = math.cos(angle), math.sin(angle)
    return x + along * cos - above * sin, hill(x) + along * sin + above * cos


def pendulum(obs: Any) -> np.ndarray:
    """Draw [cos and sin of the angle, angular velocity]; 0 is upright, positive angles turn to the left."""
    cos, sin = float(obs[0]), float(obs[1])
    canvas = Canvas(PENDULUM)
    for i in range(60):
        angle = 2 * math.pi * i / 60
        canvas.disc((1.25 * math.sin(angle), 1.25 * math.cos(angle)), 0.012, GRID)
    canvas.disc((0.0, 1.25), 0.03, GREEN)
    canvas.line([(0.0, 0.0), (-sin, cos)], 0.18, ORANGE)
    canvas.disc((0.0, 0.0), 0.05, INK)
    return canvas.image()
