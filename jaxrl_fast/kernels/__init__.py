"""Compute layers: each function runs C on a CPU where that is faster, and XLA everywhere else.

    dense(x, kernel, bias, activation)                       a dense layer
    conv2d(x, kernel, bias, stride, padding, activation)     a convolution of images
    layer_norm(x, scale, offset, activation)                 layer normalization over the last axis
    batch_norm(x, scale, offset, epsilon, activation)        batch normalization over all other axes
    board_conv(x, kernel, bias, scale, offset, activation)   a convolution of small boards, normalized

`README.md` in this folder explains how the C is compiled and how JAXRL_FAST_KERNELS switches it off. Inside
`target.tracing_for("any")`, layers are traced in XLA's operations alone, for any device.
"""

from jaxrl_fast.kernels.activations import ACTIVATIONS
from jaxrl_fast.kernels.batch_norm import batch_norm
from jaxrl_fast.kernels.blocks import image_block
from jaxrl_fast.kernels.boards import board_conv
from jaxrl_fast.kernels.conv import conv2d
from jaxrl_fast.kernels.dense import dense
from jaxrl_fast.kernels.layer_norm import layer_norm

__all__ = ["ACTIVATIONS", "batch_norm", "board_conv", "conv2d", "dense", "image_block", "layer_norm"]
