"""Networks: a torso chosen by the shape of the observation, and linear heads on it.

A network is a record of pure functions. Observations are [..., *shape] with any leading axes; parameters are
float32 and so are outputs, whatever dtype is computed in between.

    mlp      any shape, flattened: dense layers of widths `hidden`
    minatar  [H, W, C] small boards: 16 3x3 convolutions, one dense layer (Young & Tian 2019, "MinAtar", section 3)
    nature   [H, W, C] images of at least 36x36 (Mnih et al. 2015, "Human-level control ...", methods)
    dqn2013  the same, with a third of the work: two convolutions (Mnih et al. 2013, "Playing Atari ...", section 4.1)
    impala   [H, W, C]: three residual stages (Espeholt et al. 2018, "IMPALA", figure 3, the deep network)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, ShapeDtypeStruct

from jaxrl_fast.convolutions import BOARDS, IMAGES, WHITE, Boards, Convolutions, Residual, in_blocks, rows_of_block
from jaxrl_fast.dense import has_c
from jaxrl_fast.dense_layers import MLP, Dense, NoisyDense
from jaxrl_fast.types import Key, PyTree

KINDS = ("mlp", "minatar", "nature", "dqn2013", "impala")
SMALLEST_IMAGE = 36  # what nature's three convolutions need
SMALLEST_PICTURE = 16  # of bytes that are shades; smaller ones are numbers of things, as in MiniGrid's 7x7


class Network(NamedTuple):
    """A function of observations with parameters."""

    init: Callable[[Key], PyTree]
    apply: Callable[..., Array]  # (params, obs [..., *shape], noise=()) -> [..., num_outputs (, num_atoms)]
    noise: Callable[[Key, tuple[int, ...]], PyTree]  # what noisy layers need, [*shape, K] each


class ActorCritic(NamedTuple):
    """A policy's parameters (logits, means ...) and the value, from one tree of parameters."""

    init: Callable[[Key], PyTree]
    actor: Callable[[PyTree, PyTree], Array]  # (params, obs) -> [..., num_outputs]
    critic: Callable[[PyTree, PyTree], Array]  # (params, obs) -> [...]
    both: Callable[[PyTree, PyTree], tuple[Array, Array]]


def network(
    obs: PyTree,
    num_outputs: int,
    *,
    num_atoms: int | None = None,
    dueling: bool = False,
    gain: float = 1.0,
    **options,
) -> Network:
    """A torso with a linear head, for observations like `obs` (ShapeDtypeStruct). Other options as in `torso`.

    With `num_atoms`, each output is so many numbers: a distribution. `dueling` gives the last dense layer and the head
    to each of two streams, one for the state's value and one for what each output adds to it, less their mean
    (Wang et al. 2016, "Dueling network architectures", eq. 9). Without noise, noisy layers use their means.
    """
    streams = [_torso(obs, slice(-1, None), **options) for _ in range(2)] if dueling else []
    trunk = torso(obs, **options) if not dueling else _torso(obs, slice(None, -1), **options)
    module: Any = _Outputs(trunk, streams, num_outputs, num_atoms, gain, options.get("noisy", False))

    def apply(params, obs, noise=()):
        return module.apply({**params, "noise": noise} if noise else params, obs)

    return Network(lambda key: _init(module, obs, key), apply, lambda key, shape: _noise(module, obs, key, shape))


def actor_critic(
    obs: PyTree,
    num_outputs: int,
    *,
    kind: str = "auto",
    shared: bool | None = None,
    actor_gain: float = 0.01,
    critic_gain: float = 1.0,
    **options,
) -> ActorCritic:
    """A policy and a value for observations like `obs` (ShapeDtypeStruct). Other options as in `torso`.

    By default convolutions are `shared` between the two, and dense networks are not.
    """
    kind = choose(obs, kind)
    shared = kind != "mlp" if shared is None else shared
    critic_torso = None if shared else torso(obs, kind=kind, **options)
    module: Any = _ActorCritic(torso(obs, kind=kind, **options), critic_torso, num_outputs, actor_gain, critic_gain)
    return ActorCritic(
        init=lambda key: _init(module, obs, key),
        actor=lambda params, obs: module.apply(params, obs, method="actor"),
        critic=lambda params, obs: module.apply(params, obs, method="critic"),
        both=module.apply,
    )


def torso(obs: PyTree, **options) -> nn.Module:
    """The module from observations like `obs` (ShapeDtypeStruct) to features [..., hidden[-1]] of type `dtype`.

    kind          "mlp", "minatar", "nature", "dqn2013", "impala", or "auto": by the shape of the observation
    hidden        widths of the dense layers; () means those of the kind's paper, (64, 64) for mlp
    activation    "tanh" or "relu"; "auto" is that of the kind's paper, tanh for mlp
    layer_norm    normalise before every activation, over the last axis: after a convolution, a pixel's channels
    noisy         dense layers with noise that is learnt (Fortunato et al. 2018, "Noisy networks for exploration")
    dtype         what is computed in
    conv          how convolutions are computed, not what: "lax", "matmul" (on a CPU) or "auto", the faster one here

    Its own `init` fills kernels with their gains; `network` and `actor_critic` make them orthogonal.
    """
    return _torso(obs, slice(None), **options)


def _torso(
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
    kind = choose(obs, kind)
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
    in_c = conv == "matmul" and kind in ("nature", "dqn2013") and has_c(ShapeDtypeStruct((), dtype))
    block = None if conv == "lax" or in_c else BOARDS if kind == "minatar" else IMAGES
    return Torso(obs, stem, mlp, block)


def choose(obs: PyTree, kind: str = "auto") -> str:
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


class _Outputs(nn.Module):
    """Linear heads on a torso, in float32: [..., num_outputs], or [..., num_outputs, num_atoms]."""

    torso: nn.Module
    streams: list[nn.Module]  # none, or of a state's value and of what each output adds
    num_outputs: int
    num_atoms: int | None
    gain: float
    noisy: bool

    def setup(self):
        widths = (1, self.num_outputs) if self.streams else (self.num_outputs,)
        layer = NoisyDense if self.noisy else Dense
        self.heads = [layer(width * (self.num_atoms or 1), self.gain) for width in widths]

    def __call__(self, obs):
        features = self.torso(obs)
        if not self.streams:
            return self._shape(self.heads[0](features), self.num_outputs)
        columns = not self.torso.mlp.hidden and self.torso.leaves_columns(obs)
        value, extra = (head(stream(features, columns)) for head, stream in zip(self.heads, self.streams, strict=True))
        value, extra = self._shape(value, 1), self._shape(extra, self.num_outputs)
        return value + extra - extra.mean(axis=-1 if self.num_atoms is None else -2, keepdims=True)

    def _shape(self, x, width):
        return x if self.num_atoms is None else x.reshape(*x.shape[:-1], width, self.num_atoms)


class _ActorCritic(nn.Module):
    torso: nn.Module
    critic_torso: nn.Module | None  # None: the critic looks through `torso` too
    num_outputs: int
    actor_gain: float
    critic_gain: float

    def setup(self):
        self.actor_head = Dense(self.num_outputs, self.actor_gain)
        self.critic_head = Dense(1, self.critic_gain)

    def actor(self, obs):
        return self.actor_head(self.torso(obs))

    def critic(self, obs):
        return self.critic_head((self.critic_torso or self.torso)(obs))[..., 0]

    def __call__(self, obs):
        features = self.torso(obs)
        critic_features = self.critic_torso(obs) if self.critic_torso else features
        return self.actor_head(features), self.critic_head(critic_features)[..., 0]


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
    """A picture's bytes become [0, 1], everything else its own number: what has been normalised, too."""
    return x.astype(dtype) / WHITE if _is_picture(spec) and x.dtype == jnp.uint8 else x.astype(dtype)


def _is_picture(obs: ShapeDtypeStruct) -> bool:
    """Whether an array like `obs` is a picture, of bytes that are shades, and not a small board."""
    return obs.dtype == jnp.uint8 and len(obs.shape) > 1 and min(obs.shape[:2]) >= SMALLEST_PICTURE


def _init(module: nn.Module, obs: PyTree, key: Key) -> PyTree:
    """Parameters of the module, its kernels orthogonal times their gain, everything else as it declares.

    All kernels come from one draw: a generator for each would take most of the time that a small agent compiles.
    """
    params, structure = jax.tree.flatten_with_path({"params": module.lazy_init(key, obs)["params"]})
    is_kernel = [path[-1].key == "kernel" for path, _ in params]
    sizes = [leaf.size if kernel else 0 for kernel, (_, leaf) in zip(is_kernel, params, strict=True)]
    noise = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])
    leaves = [
        leaf * _orthogonal(part.reshape(leaf.shape)) if kernel else leaf
        for kernel, (_, leaf), part in zip(is_kernel, params, noise, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def _noise(module: nn.Module, obs: PyTree, key: Key, shape: tuple[int, ...]) -> PyTree:
    """Normal noise [*shape, K] for each noisy layer, from one draw; () where there is none."""
    needed = jax.eval_shape(lambda: module.lazy_init(jax.random.key(0), obs)).get("noise", ())
    leaves, structure = jax.tree.flatten(needed)
    sizes = [leaf.size for leaf in leaves]
    parts = jnp.split(jax.random.normal(key, (*shape, sum(sizes))), np.cumsum(sizes)[:-1], axis=-1) if sizes else []
    return jax.tree.unflatten(structure, parts)


def _orthogonal(noise: Array) -> Array:
    """[..., O] normal noise to a uniformly random kernel of orthonormal columns, or rows where these are fewer.

    Signs follow R's diagonal, or Q would not be uniform (Mezzadri 2007, "How to generate random matrices ...").
    """
    matrix = noise.reshape(-1, noise.shape[-1])
    wide = matrix.shape[0] < matrix.shape[1]
    q, r = jnp.linalg.qr(matrix.T if wide else matrix)
    q = q * jnp.sign(jnp.diagonal(r))[None]
    return (q.T if wide else q).reshape(noise.shape)


def _describe(obs: PyTree) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(obs))
