"""Define the options of networks. `networks.torsos` makes them."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_fast.options.declare import Bounds, Part, choice, option

Observations = Literal["auto", "image", "board", "vector"]
Activation = Literal["auto", "tanh", "relu"]
KernelInit = Literal["orthogonal", "lecun_normal", "lecun_uniform", "he_normal", "he_uniform"]
WIDTH = Bounds(1, 2**16)  # wider layers overflow JAX's sizes


@dataclass(frozen=True)
class Network(Part):
    """A torso: layers from observations to features."""

    hidden_sizes: tuple[int, ...] = option(
        (), "Widths of the dense layers. Default: those of the network's paper (64 64 for mlp).", bounds=WIDTH
    )
    activation: Activation = option("auto", "Activation function; auto: that of the network's paper (tanh for mlp).")
    kernel_init: KernelInit = option("orthogonal", "Initialization of kernels, by its name in jax.nn.initializers.")
    compute_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Dtype of the network's computation; parameters stay float32. bfloat16 is for GPUs."
    )
    observations: Observations = option(
        "auto",
        "How observations [H, W] and [H, W, C] are read: image (pixels, divided by 255), board (unscaled) or vector "
        "(unscaled and flattened). auto: image for uint8 with sides of 16 or more.",
    )
    layer_norm = False  # an option of networks that do not normalize

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments of a custom network."""
        return {}


@dataclass(frozen=True)
class Plain(Network):
    """A torso to which layer normalization can be added."""

    layer_norm: bool = option(
        False,
        "Apply layer normalization before every activation; after convolutions, over the channels of each pixel.",
    )


@dataclass(frozen=True)
class Custom(Plain):
    """A flax module of a user, from observations to features."""

    options: dict[str, Any] = option({}, "Constructor arguments of the custom network.", sweepable=False)

    @property
    def arguments(self) -> dict[str, Any]:
        return self.options


def network(
    *,
    hidden_sizes: tuple[int, ...] = (),
    activation: Activation = "auto",
    kernel_init: KernelInit = "orthogonal",
    layer_norm: bool = False,
    batch_norm: bool = False,
) -> Any:
    """Return a field for a network with these defaults.

    With `batch_norm`, the algorithm can train networks with statistics of a batch.
    """
    shared: dict[str, Any] = {"hidden_sizes": hidden_sizes, "activation": activation, "kernel_init": kernel_init}
    plain, custom = Plain(**shared, layer_norm=layer_norm), Custom(**shared, layer_norm=layer_norm)
    others = {"flash": Network(hidden_sizes=(128, 128), activation="relu")} if batch_norm else {}
    return choice(
        "auto",
        "Architecture; auto chooses by the shape of the observation. package.module:Class is a custom flax module from "
        "observations to features.",
        custom=custom,
        auto=plain,
        mlp=plain,
        simba=Network(**shared),
        minatar=plain,
        nature=plain,
        dqn2013=plain,
        impala=plain,
        **others,
    )
