"""Define the record of what a network needs, and the record of what distinguishes a kind of torso."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from jaxrl_fast.networks.batch_renorm import RenormOptions
from jaxrl_fast.options.algorithm import Algorithm
from jaxrl_fast.options.memory import Recurrent
from jaxrl_fast.types import PyTree


class Options(NamedTuple):
    """The options of a network.

    kind          of torso: one of `torsos.KINDS`, or "auto": by the shape of the observation. An observation of several
                  parts, such as (image, action), may have one [H, W, C] part for a convolutional kind; the others join
                  its features before the dense layers. "auto" does so if that part is an image. Also a user's class
                  "my_package.my_module:MyTorso" (`torsos.custom`)
    observations  how arrays [H, W] and [H, W, C] are read: "image" (shades from 0 to 255, divided by 255; also
                  [C, H, W]), "board" (numbers, taken as they are), "vector" (the same, flattened), or "auto": bytes
                  with sides of at least 16 are images, other arrays are boards
    arguments     of a user's class
    hidden        widths of the dense layers; () takes those of the kind's paper, (64, 64) for mlp, none for a class
    activation    "tanh" or "relu"; "auto" takes that of the kind's paper, tanh for mlp
    layer_norm    normalize before every activation, over the last axis: after a convolution, a pixel's channels
    kernel_init   one of `init.KINDS`
    dtype         the type of all intermediate results
    memory        "none", "gru", "lstm", "lru", or a user's class "my_package.my_module:MyMemory"
    memory_size   the width of the memory
    num_atoms     M: each output is a distribution of M numbers; None: it is one number
    dueling       two streams each have the last dense layer and a head. One gives the state's value, the other the
                  advantages minus their mean (Wang et al. 2016, "Dueling network architectures", eq. 9)
    noisy         dense layers with learned noise (Fortunato et al. 2018, "Noisy networks for exploration"). Without
                  noise, they use their means
    batch_renorm  how the inputs and outputs of dense layers are normalized over the batch, if they are
    action_size   D: the input is a pair (obs, action [..., D]), and the action joins the features; 0: it is obs
    """

    kind: str = "auto"
    observations: str = "auto"
    arguments: Mapping[str, Any] = MappingProxyType({})
    hidden: tuple[int, ...] = ()
    activation: str = "auto"
    layer_norm: bool = False
    kernel_init: str = "orthogonal"
    dtype: Any = jnp.float32
    memory: str = "none"
    memory_size: int = 128
    num_atoms: int | None = None
    dueling: bool = False
    noisy: bool = False
    batch_renorm: RenormOptions | None = None
    action_size: int = 0

    def inputs(self, obs: PyTree) -> PyTree:
        """Return the shapes and dtypes of a torso's input, for observations like `obs` (ShapeDtypeStruct)."""
        return (obs, ShapeDtypeStruct((self.action_size,), jnp.float32)) if self.action_size else obs


class Kind(NamedTuple):
    """What distinguishes a kind of torso from others."""

    hidden: tuple[int, ...]  # default widths of the dense layers
    activation: str  # default
    min_rows: int  # the fewest rows of a gradient step that occupy a core of a CPU
    layers: Callable[..., nn.Module]  # dense layers, from (obs, options, part: slice, after_memory: bool)
    stem: Callable[..., nn.Module] | None = None  # from activation, layer_norm and dtype; None: observations are flat
    min_side: int = 1  # of an image or a board
    constrain: Callable[[PyTree], PyTree] = lambda params: params  # after each optimizer step, of all parameters


def options_of(config: Algorithm, **outputs: Any) -> Options:
    """Return the options of an algorithm's network and memory, and other fields of `Options` that it sets itself."""
    chosen, memory = config.network, config.memory
    if isinstance(memory, Recurrent):
        outputs |= dict(memory=memory.kind, memory_size=memory.size)
    return Options(
        kind=chosen.kind,
        observations=chosen.observations,
        arguments=chosen.arguments,
        hidden=chosen.hidden_sizes,
        activation=chosen.activation,
        layer_norm=chosen.layer_norm,
        kernel_init=chosen.kernel_init,
        dtype=jnp.dtype(chosen.compute_dtype),
        **outputs,
    )
