"""Define torsos, which map observations to features, and choose one by the shape of the observation."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from jaxrl_fast.networks import custom, reading
from jaxrl_fast.networks.batch_renorm import RenormOptions
from jaxrl_fast.networks.conv import Boards, Convolutions, Residual, in_blocks
from jaxrl_fast.networks.dense import MLP, ResidualMLP
from jaxrl_fast.types import PyTree

VECTORS = ("mlp", "simba")  # kinds for observations of any shape, which they flatten
KINDS = (*VECTORS, "minatar", "nature", "dqn2013", "impala")
MIN_IMAGE_SIDE = 36  # the smallest side for nature's three convolutions


def make(obs: PyTree, **options) -> nn.Module:
    """Return a module from observations like `obs` (ShapeDtypeStruct) to features [..., hidden[-1]] of type `dtype`.

    kind          "mlp", "simba", "minatar", "nature", "dqn2013", "impala", or "auto": by the shape of the observation.
                  An observation of several parts, such as (image, action), may have one [H, W, C] part for a
                  convolutional kind; the others join its features before the dense layers. "auto" does so if that part
                  is an image. Also "my_package.my_module:MyTorso", a user's class (`networks.custom`)
    observations  how arrays [H, W] and [H, W, C] are read: "image" (shades from 0 to 255, divided by 255; also
                  [C, H, W]), "board" (numbers, taken as they are), "vector" (the same, flattened), or "auto": bytes
                  with sides of at least 16 are images, other arrays are boards
    arguments     of a user's class
    hidden        widths of the dense layers; () takes those of the kind's paper, (64, 64) for mlp, none for a class
    activation    "tanh" or "relu"; "auto" takes that of the kind's paper, tanh for mlp
    layer_norm    normalize before every activation, over the last axis: after a convolution, a pixel's channels
    noisy         dense layers with learned noise (Fortunato et al. 2018, "Noisy networks for exploration")
    dtype         the type of all intermediate results
    batch_renorm  how the inputs and outputs of dense layers are normalized over the batch, if they are
    action_size   D: the input is a pair (obs, action [..., D]), and the action joins the features; 0: it is obs

    The module's `init` fills kernels with their gains; `init.init_params` draws them.
    """
    return make_part(obs, slice(None), **options)


def make_part(
    obs: PyTree,
    part: slice,
    *,
    after_memory: bool = False,
    kind: str = "auto",
    observations: str = "auto",
    arguments: Mapping[str, Any] = MappingProxyType({}),
    hidden: tuple[int, ...] = (),
    activation: str = "auto",
    layer_norm: bool = False,
    noisy: bool = False,
    dtype: jnp.dtype = jnp.float32,
    batch_renorm: RenormOptions | None = None,
    action_size: int = 0,
) -> nn.Module:
    """Return a torso with some of its dense layers, or, if `part` leaves out the first ones, an MLP of the others.

    With `after_memory`, the layers of that MLP read the vectors that a memory returns, and not the torso's features.
    """
    kind = choose_kind(obs, kind, observations)
    if arguments and not custom.is_custom(kind):
        problem = f"network {kind} has no such option, got {next(iter(arguments))}"
        raise ValueError(f"network.options: {problem}; use a class, package.module:MyTorso")
    default_hidden, default_activation = {
        "mlp": ((64, 64), "tanh"),
        "simba": ((128,), "relu"),
        "minatar": ((128,), "relu"),
        "nature": ((512,), "relu"),
        "dqn2013": ((256,), "relu"),
        "impala": ((256,), "relu"),
    }.get(kind, ((), "relu"))
    activation = default_activation if activation == "auto" else activation
    widths = tuple(hidden) or default_hidden
    layers: dict[str, Any] = dict(activation=activation, layer_norm=layer_norm, dtype=dtype)
    inputs = with_action(obs, action_size)
    # Features of boards keep their axes [F, H', W'] up to the first dense layer: kernels.dense reads them as they lie.
    is_one = len(jax.tree.leaves(inputs)) == 1
    follows_boards = kind == "minatar" and is_one and not after_memory and 0 in range(len(widths))[part]
    mlp: nn.Module
    if kind == "simba":
        mlp = _residual(widths, part, after_memory, activation, dtype, noisy, batch_renorm)
    else:
        input_axes = 3 if follows_boards else 1
        mlp = MLP(widths[part], noisy=noisy, input_axes=input_axes, batch_renorm=batch_renorm, **layers)
    if part.start is not None:
        return mlp
    if custom.is_custom(kind):
        module = custom.make(kind, arguments, obs, observations, dtype)
        return custom.Custom(inputs, custom.JoinAction(module) if action_size else module, mlp, observations)
    stem = {
        "mlp": lambda: None,
        "simba": lambda: None,
        "minatar": lambda: Boards(16, 3, **layers),
        "nature": lambda: Convolutions(((32, 8, 4), (64, 4, 2), (64, 3, 1)), **layers),
        "dqn2013": lambda: Convolutions(((16, 8, 4), (32, 4, 2)), **layers),
        "impala": lambda: Residual((16, 32, 32), **layers),
    }[kind]()
    return Torso(inputs, stem, mlp, observations)


def _residual(
    widths: tuple[int, ...],
    part: slice,
    after_memory: bool,
    activation: str,
    dtype: jnp.dtype,
    noisy: bool,
    batch_renorm: RenormOptions | None,
) -> ResidualMLP:
    """Return some of the blocks of a simba network. Raise ValueError for options that simba does not support."""
    if len(set(widths)) > 1:
        got = ", ".join(map(str, widths))
        raise ValueError(f"network.hidden_sizes: simba's blocks must have one width, got {got}; repeat {widths[0]}")
    if batch_renorm or noisy:
        option, got = ("target", "none") if batch_renorm else ("noisy", "true")
        raise ValueError(f"{option}: network simba has layers of its own, got {got}; use network mlp")
    begins, ends = part.start is None or after_memory, part.stop is None
    return ResidualMLP(widths[0], len(widths[part]), activation, dtype, begins, ends)


def with_action(obs: PyTree, action_size: int = 0) -> PyTree:
    """Return the shapes and dtypes of a torso's input: `obs`, or (obs, action [D]) for an action of D numbers."""
    return (obs, ShapeDtypeStruct((action_size,), jnp.float32)) if action_size else obs


def choose_kind(obs: PyTree, kind: str = "auto", observations: str = "auto") -> str:
    """Return the kind of torso for observations like `obs` (ShapeDtypeStruct). Raise ValueError if it does not fit."""
    _check_word("network.observations", observations, reading.READINGS)
    if custom.is_custom(kind):
        return kind
    _check_word("network", kind, KINDS)
    leaves = jax.tree.leaves(obs)
    if observations == "image" and all(len(leaf.shape) < 2 for leaf in leaves):
        raise ValueError(f"network.observations: image requires [H, W] or [H, W, C], got {_describe(obs)}; use vector")
    shape = leaves[0].shape if len(leaves) == 1 else None
    if observations == "vector" and kind not in ("auto", *VECTORS):
        raise ValueError(
            f"network.observations: network {kind} requires an image or a board, got vector; use network mlp"
        )
    if kind in VECTORS or observations == "vector":
        return kind if kind in VECTORS else "mlp"
    images = [leaf for leaf in leaves if len(leaf.shape) == 3]
    has_image = len(images) == 1 and reading.is_image(images[0], observations)
    if kind == "auto" and (len(shape) < 3 if shape is not None else not has_image):
        return "mlp"
    shape = reading.shape(images[0], observations) if len(images) == 1 else shape
    if shape is None or len(shape) != 3:
        raise ValueError(f"network: {kind} requires one [H, W, C] observation, got {_describe(obs)}; use mlp")
    side, smallest = min(shape[:2]), {"nature": MIN_IMAGE_SIDE, "dqn2013": MIN_IMAGE_SIDE, "minatar": 3}.get(kind, 1)
    if side < smallest:
        raise ValueError(
            f"network: {kind} requires {smallest}x{smallest} pixels or more, got {_describe(obs)}; use mlp"
        )
    if kind == "auto":
        is_board = observations == "board" or side < MIN_IMAGE_SIDE
        return "nature" if not is_board else "minatar" if side >= 3 else "mlp"
    return kind


def describe(obs: PyTree, kind: str = "auto", observations: str = "auto") -> str:
    """Return the kind of torso, and how it reads each part of an observation, for a line of the terminal."""
    kind = choose_kind(obs, kind, observations)

    def part(leaf: ShapeDtypeStruct) -> str:
        size = "x".join(map(str, leaf.shape))
        if kind in VECTORS and not reading.is_image(leaf, observations):
            return f"vector {size}"
        order = ", channels first" if reading.has_channels_first(leaf, observations) else ""
        if reading.is_image(leaf, observations):
            return f"image {size}{order} / 255"
        return f"{'board' if len(leaf.shape) == 3 else 'vector'} {size}{order}"

    return f"{kind}   reads {', '.join(part(leaf) for leaf in jax.tree.leaves(obs))}"


class Torso(nn.Module):
    """Map observations to features: cast, convolve if there is a `stem`, then dense layers."""

    obs: PyTree
    stem: nn.Module | None
    mlp: nn.Module
    observations: str = "auto"

    def __call__(self, obs):
        pairs = list(zip(jax.tree.leaves(self.obs), jax.tree.leaves(obs), strict=True))
        if self.stem is None:
            return self.mlp(jnp.concatenate([self._flatten(spec, x) for spec, x in pairs], axis=-1))
        image = next(i for i, (spec, _) in enumerate(pairs) if len(spec.shape) == 3)
        spec, x = pairs.pop(image)
        features = self._convolve(spec, x)
        if pairs:
            features = features.reshape(*x.shape[:-3], -1)
            features = jnp.concatenate([features, *(self._flatten(spec, x) for spec, x in pairs)], axis=-1)
        return self.mlp(features)

    def _flatten(self, spec, x):
        """Return x [..., *shape] as [..., D]."""
        x = self._cast(x, spec)
        return x.reshape(*x.shape[: x.ndim - len(spec.shape)], -1)

    def _convolve(self, spec, x):
        """Return the stem's features of x [..., H, W, C]: [..., F, H', W'] of boards, else [..., D]."""
        batch, x = x.shape[:-3], x.reshape(-1, *spec.shape)
        if reading.has_channels_first(spec, self.observations):
            x = jnp.moveaxis(x, -3, -1)
        scaled = reading.is_image(spec, self.observations)
        if isinstance(self.stem, Boards):
            y = self.stem(self._cast(x, spec) if scaled else x)
            return y.reshape(*batch, *y.shape[1:])
        x = x if scaled and x.dtype == jnp.uint8 else self._cast(x, spec)  # convolutions divide bytes by 255
        flat = lambda torso, x: torso.stem(x).reshape(len(x), -1)
        x = in_blocks(self, flat, x) if isinstance(self.stem, Residual) else flat(self, x)
        return x.reshape(*batch, -1)

    def _cast(self, x, spec):
        return reading.cast(spec, x, self.mlp.dtype, self.observations)


def _check_word(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in ("auto", *known):
        raise ValueError(f"{option}: must be one of auto, {', '.join(known)}, got {value!r}; choose one of these")


def _describe(obs: PyTree) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(obs))
