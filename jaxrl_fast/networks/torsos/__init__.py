"""Choose a torso, which maps observations to features, by the shape of the observation.

    mlp      any shape, flattened: dense layers of widths `hidden`
    simba    any shape, flattened: a residual block for each of `hidden`, with layer normalization (Lee et al. 2025)
    flash    any shape, flattened: residual blocks with batch statistics and unit weights (Kim et al. 2026, FlashSAC)
    minatar  [H, W, C] small boards: 16 3x3 convolutions, one dense layer (Young & Tian 2019, "MinAtar", section 3)
    nature   [H, W, C] images of at least 36x36 (Mnih et al. 2015, "Human-level control ...", methods)
    dqn2013  the same, with a third of the work: two convolutions (Mnih et al. 2013, "Playing Atari ...", section 4.1)
    impala   [H, W, C]: three residual stages (Espeholt et al. 2018, "IMPALA", figure 3, the deep network)

Each kind has a file with its layers, its default widths and the shapes that it fits; `KINDS` lists them by name.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from jaxrl_fast.networks import reading
from jaxrl_fast.networks.options import Kind, Options
from jaxrl_fast.networks.torsos import custom, flash, impala, minatar, mlp, nature, simba
from jaxrl_fast.types import PyTree

KINDS = {
    "mlp": mlp.KIND,
    "simba": simba.KIND,
    "flash": flash.KIND,
    "minatar": minatar.KIND,
    "nature": nature.KIND,
    "dqn2013": nature.DQN2013,
    "impala": impala.KIND,
}
VECTORS = tuple(name for name, kind in KINDS.items() if kind.stem is None)  # for observations of any shape


def kind_of(name: str) -> Kind:
    """Return the kind of torso of this name, or what is common to all classes of users."""
    return KINDS.get(name, custom.KIND)


def make(obs: PyTree, options: Options = Options(), whole: bool = True) -> nn.Module:
    """Return a module from observations like `obs` (ShapeDtypeStruct) to features [..., hidden[-1]] of type `dtype`.

    Its last dense layer is left out unless it is `whole`. The module's `init` fills kernels with their gains;
    `init.init_params` draws them.
    """
    options = resolve(obs, options)
    kind = kind_of(options.kind)
    layers = kind.layers(obs, options, slice(None, None if whole else -1))
    if custom.is_custom(options.kind):
        return custom.make(obs, options, layers)
    stem = kind.stem and kind.stem(activation=options.activation, layer_norm=options.layer_norm, dtype=options.dtype)
    return Torso(options.inputs(obs), stem, layers, options.observations)


def last_layer(obs: PyTree, options: Options) -> nn.Module:
    """Return the last dense layer of a torso. With a memory, it reads the vectors that the memory returns."""
    options = resolve(obs, options)
    return kind_of(options.kind).layers(obs, options, slice(-1, None), options.memory != "none")


def resolve(obs: PyTree, options: Options) -> Options:
    """Return the options with the kind, the widths and the activation that "auto" and () mean for an observation."""
    kind = choose_kind(obs, options.kind, options.observations)
    if options.arguments and not custom.is_custom(kind):
        problem = f"network {kind} has no such option, got {next(iter(options.arguments))}"
        raise ValueError(f"network.options: {problem}; use a class, package.module:MyTorso")
    defaults = kind_of(kind)
    activation = defaults.activation if options.activation == "auto" else options.activation
    return options._replace(kind=kind, hidden=tuple(options.hidden) or defaults.hidden, activation=activation)


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
    image = reading.only_image(leaves, observations)
    has_image = image is not None and reading.is_image(leaves[image], observations)
    if kind == "auto" and (len(shape) < 3 if shape is not None else not has_image):
        return "mlp"
    shape = shape if image is None else reading.shape(leaves[image], observations)
    if shape is None or len(shape) != 3:
        raise ValueError(f"network: {kind} requires one [H, W, C] observation, got {_describe(obs)}; use mlp")
    side, smallest = min(shape[:2]), 1 if kind == "auto" else KINDS[kind].min_side
    if side < smallest:
        raise ValueError(
            f"network: {kind} requires {smallest}x{smallest} pixels or more, got {_describe(obs)}; use mlp"
        )
    if kind == "auto":
        is_board = observations == "board" or side < nature.MIN_SIDE
        return "nature" if not is_board else "minatar" if side >= minatar.KIND.min_side else "mlp"
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
        image = reading.only_image([spec for spec, _ in pairs], self.observations)
        assert image is not None, "`choose_kind` has found it"
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
        if isinstance(self.stem, minatar.Boards):
            y = self.stem(self._cast(x, spec) if scaled else x)
            return y.reshape(*batch, *y.shape[1:])
        x = x if scaled and x.dtype == jnp.uint8 else self._cast(x, spec)  # convolutions divide bytes by 255
        flat = lambda torso, x: torso.stem(x).reshape(len(x), -1)
        x = impala.in_blocks(self, flat, x) if isinstance(self.stem, impala.Residual) else flat(self, x)
        return x.reshape(*batch, -1)

    def _cast(self, x, spec):
        return reading.cast(spec, x, self.mlp.dtype, self.observations)


def _check_word(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in ("auto", *known):
        raise ValueError(f"{option}: must be one of auto, {', '.join(known)}, got {value!r}; choose one of these")


def _describe(obs: PyTree) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(obs))
