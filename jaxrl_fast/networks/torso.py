"""Torsos: from observations to features, chosen by the shape of the observation."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jaxrl_fast.kernels.dense import has_kernels
from jaxrl_fast.networks.conv import BOARDS, IMAGES, WHITE, Boards, Convolutions, Residual, in_blocks, rows_of_block
from jaxrl_fast.networks.dense import MLP
from jaxrl_fast.types import PyTree

KINDS = ("mlp", "minatar", "nature", "dqn2013", "impala")
SMALLEST_IMAGE = 36  # what nature's three convolutions need
SMALLEST_PICTURE = 16  # of bytes that are shades; smaller ones are numbers of things, as in MiniGrid's 7x7


def make(obs: PyTree, **options) -> nn.Module:
    """The module from observations like `obs` (ShapeDtypeStruct) to features [..., hidden[-1]] of type `dtype`.

    kind          "mlp", "minatar", "nature", "dqn2013", "impala", or "auto": by the shape of the observation
    hidden        widths of the dense layers; () means those of the kind's paper, (64, 64) for mlp
    activation    "tanh" or "relu"; "auto" is that of the kind's paper, tanh for mlp
    layer_norm    normalize before every activation, over the last axis: after a convolution, a pixel's channels
    noisy         dense layers with noise that is learned (Fortunato et al. 2018, "Noisy networks for exploration")
    dtype         what is computed in
    conv          how convolutions are computed, not what: "lax", "matmul" (on a CPU) or "auto", the faster one here

    Its own `init` fills kernels with their gains; `network` and `actor_critic` make them orthogonal.
    """
    return make_part(obs, slice(None), **options)


def make_part(
    obs: PyTree,
    part: slice,
    *,
    kind: str = "auto",
    hidden: tuple[int, ...] = (),
    activation: str = "auto",
    layer_norm: bool = False,
    noisy: bool = False,
    dtype: jnp.dtype = jnp.float32,
    conv: str = "auto",
) -> nn.Module:
    """Some of a torso's dense layers: the first ones come with what is before them, the others stand alone."""
    kind = choose_kind(obs, kind)
    if conv == "auto":
        conv = "matmul" if jax.default_backend() == "cpu" else "lax"
    default_hidden, default_activation = {
        "mlp": ((64, 64), "tanh"),
        "minatar": ((128,), "relu"),
        "nature": ((512,), "relu"),
        "dqn2013": ((256,), "relu"),
        "impala": ((256,), "relu"),
    }[kind]
    activation = default_activation if activation == "auto" else activation
    layers: dict[str, Any] = dict(activation=activation, layer_norm=layer_norm, dtype=dtype)
    mlp = MLP((tuple(hidden) or default_hidden)[part], noisy=noisy, **layers)
    if part.start is not None:
        return mlp
    stem = {
        "mlp": lambda: None,
        "minatar": lambda: Boards(16, 3, conv=conv, **layers),
        "nature": lambda: Convolutions(((32, 8, 4), (64, 4, 2), (64, 3, 1)), conv=conv, **layers),
        "dqn2013": lambda: Convolutions(((16, 8, 4), (32, 4, 2)), conv=conv, **layers),
        "impala": lambda: Residual((16, 32, 32), conv=conv, **layers),
    }[kind]()
    in_c = conv == "matmul" and kind in ("nature", "dqn2013") and has_kernels(ShapeDtypeStruct((), dtype))
    block = None if conv == "lax" or in_c else BOARDS if kind == "minatar" else IMAGES
    return Torso(obs, stem, mlp, block)


def choose_kind(obs: PyTree, kind: str = "auto") -> str:
    """The kind of torso for observations like `obs` (ShapeDtypeStruct): checks a given one, decides "auto"."""
    if kind not in ("auto", *KINDS):
        raise ValueError(f"there is no network kind {kind!r}; choose one of auto, {', '.join(KINDS)}")
    leaves = jax.tree.leaves(obs)
    shape = leaves[0].shape if len(leaves) == 1 else None
    if kind == "mlp":
        return kind
    if kind == "auto" and (shape is None or len(shape) < 3):
        return "mlp"
    if shape is None or len(shape) != 3:
        wanted = "a convolutional network wants one [H, W, C] observation"
        raise ValueError(f"{wanted}, not {_describe(obs)}; try the network 'mlp'")
    side, smallest = min(shape[:2]), {"nature": SMALLEST_IMAGE, "dqn2013": SMALLEST_IMAGE, "minatar": 3}.get(kind, 1)
    if side < smallest:
        raise ValueError(
            f"{kind} needs at least {smallest}x{smallest} pixels, not {_describe(obs)}; try the network 'mlp'"
        )
    if kind == "auto":
        return "nature" if side >= SMALLEST_IMAGE else "minatar" if side >= 3 else "mlp"
    return kind


class Torso(nn.Module):
    """Observations to features: cast, convolve if there is a `stem`, flatten, dense layers."""

    obs: PyTree
    stem: nn.Module | None
    mlp: nn.Module
    block: int | None  # observations that the stem sees at a time; None: all

    def __call__(self, obs):
        pairs = zip(jax.tree.leaves(self.obs), jax.tree.leaves(obs), strict=True)
        features = jnp.concatenate([self._see(spec, x) for spec, x in pairs], axis=-1)
        return self.mlp(features, self.leaves_columns(obs))

    def leaves_columns(self, obs):
        """Whether boards are all convolved together, so that what is seen of them lies in memory turned."""
        if not (isinstance(self.stem, Boards) and self.stem.conv == "matmul"):
            return False
        (spec,), (x,) = jax.tree.leaves(self.obs), jax.tree.leaves(obs)
        num_rows = x.size // max(spec.size, 1)
        return rows_of_block(num_rows, self.block) == num_rows

    def _see(self, spec, x):
        """[..., *shape] to [..., D]."""
        batch = x.shape[: x.ndim - len(spec.shape)]
        x = x.reshape(-1, *spec.shape)
        flat = lambda x: x.reshape(len(x), -1)
        if self.stem is None:
            x = flat(_cast(x, spec, self.mlp.dtype))
        else:
            bytes_too = not isinstance(self.stem, Boards) and _is_picture(spec)
            look = lambda torso, x: flat(torso.stem(x if bytes_too else _cast(x, spec, torso.mlp.dtype)))
            x = in_blocks(self, look, x, self.block)
        return x.reshape(*batch, -1)


def _cast(x: Array, spec: ShapeDtypeStruct, dtype: jnp.dtype) -> Array:
    """A picture's bytes become [0, 1], everything else its own number: what has been normalized, too."""
    return x.astype(dtype) / WHITE if _is_picture(spec) and x.dtype == jnp.uint8 else x.astype(dtype)


def _is_picture(obs: ShapeDtypeStruct) -> bool:
    """Whether an array like `obs` is a picture, of bytes that are shades, and not a small board."""
    return obs.dtype == jnp.uint8 and len(obs.shape) > 1 and min(obs.shape[:2]) >= SMALLEST_PICTURE


def _describe(obs: PyTree) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(obs))
