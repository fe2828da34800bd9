"""Define torsos, which map observations to features, and choose one by the shape of the observation."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from jaxrl_fast.networks import custom, reading
from jaxrl_fast.networks.conv import Boards, Convolutions, Residual, in_blocks
from jaxrl_fast.networks.dense import MLP, ResidualMLP
from jaxrl_fast.networks.options import Options
from jaxrl_fast.types import PyTree

MIN_IMAGE_SIDE = 36  # the smallest side for nature's three convolutions


class Kind(NamedTuple):
    """What distinguishes a kind of torso from others."""

    hidden: tuple[int, ...]  # default widths of the dense layers
    activation: str  # default
    min_rows: int  # the fewest rows of a gradient step that occupy a core of a CPU
    stem: Callable[..., nn.Module] | None = None  # from activation, layer_norm and dtype; None: observations are flat
    min_side: int = 1  # of an image or a board


KINDS = {
    "mlp": Kind((64, 64), "tanh", 512),
    "simba": Kind((128,), "relu", 512),
    "minatar": Kind((128,), "relu", 64, partial(Boards, 16, 3), 3),
    "nature": Kind((512,), "relu", 8, partial(Convolutions, ((32, 8, 4), (64, 4, 2), (64, 3, 1))), MIN_IMAGE_SIDE),
    "dqn2013": Kind((256,), "relu", 8, partial(Convolutions, ((16, 8, 4), (32, 4, 2))), MIN_IMAGE_SIDE),
    "impala": Kind((256,), "relu", 8, partial(Residual, (16, 32, 32))),
}
CUSTOM = Kind((), "relu", 64)
VECTORS = tuple(name for name, kind in KINDS.items() if kind.stem is None)  # for observations of any shape


def make(obs: PyTree, options: Options = Options()) -> nn.Module:
    """Return a module from observations like `obs` (ShapeDtypeStruct) to features [..., hidden[-1]] of type `dtype`.

    The module's `init` fills kernels with their gains; `init.init_params` draws them.
    """
    return _with_stem(obs, resolve(obs, options), slice(None))


def split(obs: PyTree, options: Options, num_streams: int) -> tuple[nn.Module, list[nn.Module]]:
    """Return a torso without its last dense layer, and that layer `num_streams` times, for streams of a network.

    With a memory, the streams read the vectors that it returns, and not the torso's features.
    """
    chosen = resolve(obs, options)
    streams = [_dense(obs, chosen, slice(-1, None), chosen.memory != "none") for _ in range(num_streams)]
    return _with_stem(obs, chosen, slice(None, -1)), streams


def resolve(obs: PyTree, options: Options) -> Options:
    """Return the options with the kind, the widths and the activation that "auto" and () mean for an observation."""
    kind = choose_kind(obs, options.kind, options.observations)
    if options.arguments and not custom.is_custom(kind):
        problem = f"network {kind} has no such option, got {next(iter(options.arguments))}"
        raise ValueError(f"network.options: {problem}; use a class, package.module:MyTorso")
    defaults = KINDS.get(kind, CUSTOM)
    activation = defaults.activation if options.activation == "auto" else options.activation
    return options._replace(kind=kind, hidden=tuple(options.hidden) or defaults.hidden, activation=activation)


def _with_stem(obs: PyTree, options: Options, part: slice) -> nn.Module:
    """Return a torso with some of its dense layers."""
    inputs, observations = with_action(obs, options.action_size), options.observations
    mlp = _dense(obs, options, part)
    if custom.is_custom(options.kind):
        module = custom.make(options.kind, options.arguments, obs, observations, options.dtype)
        return custom.Custom(inputs, custom.JoinAction(module) if options.action_size else module, mlp, observations)
    stem = KINDS[options.kind].stem
    made = stem and stem(activation=options.activation, layer_norm=options.layer_norm, dtype=options.dtype)
    return Torso(inputs, made, mlp, observations)


def _dense(obs: PyTree, options: Options, part: slice, after_memory: bool = False) -> nn.Module:
    """Return some of the dense layers of a torso."""
    if options.kind == "simba":
        return _residual(options, part, after_memory)
    # Features of boards keep their axes [F, H', W'] up to the first dense layer: kernels.dense reads them as they lie.
    is_one = len(jax.tree.leaves(with_action(obs, options.action_size))) == 1
    is_first = 0 in range(len(options.hidden))[part] and not after_memory
    return MLP(
        options.hidden[part],
        noisy=options.noisy,
        input_axes=3 if options.kind == "minatar" and is_one and is_first else 1,
        batch_renorm=options.batch_renorm,
        activation=options.activation,
        layer_norm=options.layer_norm,
        dtype=options.dtype,
    )


def _residual(options: Options, part: slice, after_memory: bool) -> ResidualMLP:
    """Return some of the blocks of a simba network. Raise ValueError for options that simba does not support."""
    widths = options.hidden
    if len(set(widths)) > 1:
        got = ", ".join(map(str, widths))
        raise ValueError(f"network.hidden_sizes: simba's blocks must have one width, got {got}; repeat {widths[0]}")
    if options.batch_renorm or options.noisy:
        option, got = ("target", "none") if options.batch_renorm else ("noisy", "true")
        raise ValueError(f"{option}: network simba has layers of its own, got {got}; use network mlp")
    begins, ends = part.start is None or after_memory, part.stop is None
    return ResidualMLP(widths[0], len(widths[part]), options.activation, options.dtype, begins, ends)


def with_action(obs: PyTree, action_size: int = 0) -> PyTree:
    """Return the shapes and dtypes of a torso's input: `obs`, or (obs, action [D]) for an action of D numbers."""
    return (obs, ShapeDtypeStruct((action_size,), jnp.float32)) if action_size else obs


def choose_kind(obs: PyTree, kind: str = "auto", observations: str = "auto") -> str:
    """Return the kind of torso for observations like `obs` (ShapeDtypeStruct). Raise ValueError if it does not fit."""
    _check_word("network.observations", observations, reading.READINGS)
    if custom.is_custom(kind):
        return kind
    _check_word("network", kind, (*KINDS,))
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
    side, smallest = min(shape[:2]), KINDS[kind].min_side if kind != "auto" else 1
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
