"""Spaces and options: limits of accepted values, and conversions against manual results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.envs import construct, spaces
from jaxrl_fast.types import Box, Discrete, EnvSpec, MultiDiscrete
from jaxrl_fast.utils import arguments

pytestmark = pytest.mark.unit

OBS = jax.ShapeDtypeStruct((1,), jnp.float32)
BUTTONS, STICK = EnvSpec("buttons", OBS, Discrete(3), 4), EnvSpec("stick", OBS, Box((2, 2)), 4)


@pytest.mark.parametrize(
    ("spec", "action"),
    [
        (BUTTONS, jnp.zeros(4, jnp.int8)),
        (BUTTONS, jnp.zeros(4, jnp.uint32)),
        (STICK, jnp.zeros((4, 2, 2), jnp.float16)),
    ],
)
def test_check_action_accepts_right_shape_and_kind_of_number(spec, action):
    spaces.check_action(spec, action)


@pytest.mark.parametrize(
    ("spec", "action", "says"),
    [
        (BUTTONS, jnp.zeros(4), r"buttons: actions must be int32\[4\], got float32\[4\]"),
        (BUTTONS, jnp.zeros(3, jnp.int32), r"must be int32\[4\], got int32\[3\]"),
        (STICK, jnp.zeros((4, 2)), r"stick: actions must be float32\[4, 2, 2\], got float32\[4, 2\]"),
        (STICK, jnp.zeros((4, 2, 2), jnp.int32), r"must be float32\[4, 2, 2\], got int32"),
    ],
)
def test_check_action_rejects_wrong_shape_or_kind_of_number(spec, action, says):
    with pytest.raises(ValueError, match=says):
        spaces.check_action(spec, action)


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete((2, 3))])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32])
def test_discrete_actions_are_clipped_in_every_integer_dtype(space, dtype):
    """The oracle is numpy's clip in int64, for the extreme values of each dtype."""
    limits = np.iinfo(dtype)
    numbers = [limits.min, limits.max, limits.max // 2 + 1, 1]
    action = np.array(numbers, dtype)
    action = np.stack([action] * space.shape[0], axis=1) if space.shape else action
    last = np.array(getattr(space, "nums", 3)) - 1
    found = spaces.to_env_action(EnvSpec("choices", OBS, space, 4), (), jnp.asarray(action))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.clip(action.astype(np.int64), 0, last))


def test_allowed_permits_all_actions_when_mask_permits_none():
    mask = jnp.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0]], jnp.int8)
    expected = [[True, False, False, True, False], [True] * 5]
    np.testing.assert_array_equal(spaces.allowed(Discrete(5), mask), expected)
    parts = spaces.allowed(MultiDiscrete((2, 3)), jnp.array([[1, 0, 0, 0, 0]]))
    np.testing.assert_array_equal(parts, [[True, False, True, True, True]])


def test_box_action_of_any_shape_is_scaled_to_environment_bounds():
    """Each component is low + (action + 1) / 2 * (high - low), for actions of shape [2, 2] and flat bounds."""
    low, high = np.float32([0, -1, 2, 10]), np.float32([1, 1, 6, 30])
    action = jnp.array([[[-1.0, 0.0], [0.5, 1.0]], [[1.0, -0.5], [9.0, jnp.nan]]])  # [2 environments, 2, 2]
    found = spaces.to_env_action(STICK, (low, high), action)
    np.testing.assert_array_equal(found, [[0, 0, 5, 30], [1, -0.5, 6, 20]])


@pytest.mark.parametrize("action", [np.inf, -np.inf, 3e38, np.nan])
def test_box_action_of_any_size_is_within_bounds(action):
    """The second component has one possible value, 2."""
    low, high = np.float32([-1, 2, -1e30]), np.float32([3, 2, 1e30])
    spec = STICK._replace(action=Box((3,)))
    found = spaces.to_env_action(spec, (low, high), jnp.full((1, 3), action, jnp.float32))[0]
    np.testing.assert_allclose(found, np.nan_to_num(np.sign(action)) * np.array([2, 0, 1e30]) + [1, 2, 0])


def test_readable_zeroes_only_nonfinite_or_huge_terminal_values():
    """The magnitude 1e9 itself becomes 0. Integers do not change."""
    most = spaces.MAX_OBS_MAGNITUDE
    below = np.nextafter(np.float32(most), np.float32(0))
    x = jnp.array([[jnp.nan, below], [-jnp.inf, most], [jnp.nan, -most]])
    found = spaces.readable(jnp.array([True, True, False]), {"x": x, "n": jnp.arange(3)})
    np.testing.assert_array_equal(found["x"], [[0, below], [0, 0], [np.nan, -most]])
    np.testing.assert_array_equal(found["n"], [0, 1, 2])


def test_true_bounds_accepts_equal_or_wide_rejects_swapped_or_infinite():
    low, high = spaces.true_bounds("no", 2, [2, np.float32(9e29)], (2,))
    np.testing.assert_array_equal(low, np.float32([2, 2]))
    np.testing.assert_array_equal(high, np.float32([2, 9e29]))
    assert low.dtype == high.dtype == np.float32
    with pytest.raises(ValueError, match="no; its lower bounds must not exceed"):
        spaces.true_bounds("no", [0, 3], 2, (2,))
    for bounds in ((-np.inf, 1), (0, 1.0001e30), (-1e300, 1), (np.nan, 1)):
        with pytest.raises(ValueError, match="no; its bounds must be finite"):
            spaces.true_bounds("no", *bounds, (1,))


def test_unknown_option_error_suggests_similar_or_lists_all_options():
    with pytest.raises(ValueError, match="game has no option 'sise'; did you mean size"):
        arguments.refuse_option("game", "sise", ("size", "wind"))
    with pytest.raises(ValueError, match="no option 'x'; it has size, wind"):
        arguments.refuse_option("game", "x", ("size", "wind"))
    with pytest.raises(ValueError, match="no option 'x'; it has none"):
        arguments.refuse_option("game", "x", ())


@pytest.mark.parametrize(
    ("default", "written"), [(3, True), (3, 2.5), (3, 3.5e38), (3, None), (True, "2"), (True, "maybe"), (0.5, True)]
)
def test_coerce_rejects_values_that_do_not_fit_type_of_default(default, written):
    with pytest.raises(ValueError, match=f"x: must be {type(default).__name__} for game"):
        arguments.coerce("game", "x", written, default)


def test_coerce_keeps_array_shape_and_dtype():
    default = np.zeros((2, 1), np.int16)
    found = arguments.coerce("game", "x", "[[3], [4]]", default)
    assert found.dtype == jnp.int16 and found.tolist() == [[3], [4]]
    assert arguments.coerce("game", "x", [[5], [6]], default).tolist() == [[5], [6]]
    with pytest.raises(ValueError, match=r"an array of shape \[2, 1\] for game, got .*; for example \[\[0\], \[0\]\]"):
        arguments.coerce("game", "x", "[3, 4]", default)


def test_narrow_dtype_maps_64_bit_to_32_bit_and_keeps_others():
    pairs = {"float64": "float32", "int64": "int32", "uint64": "uint32", "uint8": "uint8", "bool": "bool"}
    assert {name: np.dtype(spaces.narrow_dtype(name)).name for name in pairs} == pairs


@pytest.mark.parametrize("dtype", ["f4", "u4", "i4", "u1", "?", "f2"])
def test_narrow_dtype_is_the_object_of_numpy(dtype):
    """Another object that is equal would be kept by JAX, and none of its arrays could be saved."""
    for other in (np.dtype(dtype), np.dtype(dtype).newbyteorder("="), np.dtype(dtype).newbyteorder(">")):
        assert spaces.narrow_dtype(other) is np.dtype(dtype)


def test_bytes_without_known_bounds_are_numbers_in_a_vector_and_shades_in_an_image():
    vector, picture = jnp.arange(5, dtype=jnp.uint8), jnp.arange(16 * 16, dtype=jnp.uint8).reshape(16, 16)
    assert spaces.as_array(vector, None, 0).tolist() == [0, 1, 2, 3, 4]
    assert spaces.as_array(picture, None, 0).dtype == jnp.uint8 and spaces.as_array(picture, 9, 0).dtype == jnp.float32


def declared(noise: float = 0, seed: int = 0, text: "float | None" = 1, *, speed=0, flag=False):
    """Return nothing; its arguments are declared as users declare them."""


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("noise", "0.1", 0.1),
        ("noise", 2, 2.0),
        ("text", 0.5, 0.5),
        ("speed", 0.02, 0.02),
        ("speed", "3", 3),
        ("seed", str(2**53 + 1), 2**53 + 1),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("seed", "5k", 5000),
        ("flag", "1", True),
    ],
)
def test_option_has_the_type_of_its_annotation(name, given, wanted):
    """Without one, a default that is a whole number takes any number; whole numbers are exact."""
    found = arguments.coerce("env", name, given, construct.arguments(declared)[name])
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(("name", "given"), [("seed", "0.5"), ("noise", "much"), ("speed", True), ("seed", 1e400)])
def test_option_of_another_type_is_refused(name, given):
    with pytest.raises(ValueError, match=f"^{name}: must be .* for env, got "):
        arguments.coerce("env", name, given, construct.arguments(declared)[name])
