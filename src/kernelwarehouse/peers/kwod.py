"""KW* (the paper's table `odconv_kernelwarehouse`): KernelWarehouse with ODConv's other attentions.

The hidden vector v of a layer's KernelWarehouse attention also feeds biased linear heads with sigmoids, for the input
channels, the output channels (depth-wise layers too) and, where the kernel is larger than 1, its positions:

    out = filter * conv(channel * x, position * kernel mixed from the warehouse)
"""

import math

from torch import Tensor, nn

from kernelwarehouse.assemble import assemble_kernels, evaluate
from kernelwarehouse.errors import ConvertError
from kernelwarehouse.layers import Conv2d
from kernelwarehouse.peers._conv import convolve, head, pooled, with_bias
from kernelwarehouse.peers._surgery import replaced


class KWODConv2d(nn.Module):
    """Takes the place of a convolution that draws on a warehouse, and keeps it for its cells and attention."""

    def __init__(self, conv: Conv2d) -> None:
        super().__init__()
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ConvertError(
                f"convolution pads by {conv.padding!r} with {conv.padding_mode!r}; "
                "KW* takes symmetric padding, in numbers, with zeros"
            )
        self.conv = conv
        hidden, positions = conv.attention.shape.hidden, math.prod(conv.geometry.kernel_size)
        self.channel = head(hidden, conv.in_channels)
        self.filter = head(hidden, conv.out_channels)
        self.position = None if positions == 1 else head(hidden, positions)
        self.to(conv.warehouse.cells)  # the new parts go where the old ones are

    def forward(self, x: Tensor) -> Tensor:
        attention, geometry, cells = self.conv.attention, self.conv.geometry, self.conv.warehouse.cells
        hidden = attention.hidden(pooled(x))
        weights = attention.weights(attention.logits(hidden)).to(cells.dtype)
        x = x * self.channel(hidden).sigmoid()[:, :, None, None]
        if self.position is None:
            out = evaluate(x, weights, cells, geometry)
        else:
            out = convolve(x, self._kernels, (weights, self.position(hidden).sigmoid()), geometry)
        return with_bias(out * self.filter(hidden).sigmoid()[:, :, None, None], self.conv.bias)

    def _kernels(self, weights: Tensor, position: Tensor) -> Tensor:
        geometry = self.conv.geometry
        kernels = assemble_kernels(weights, self.conv.warehouse.cells, geometry.partition)
        return kernels * position.unflatten(1, geometry.kernel_size)[:, None, None]


def convert(model: nn.Module) -> nn.Module:
    """A copy of a model with warehouses, in which every convolution that draws on one has the further attentions."""
    names = [name for name, module in model.named_modules() if isinstance(module, Conv2d)]
    if not names:
        raise ConvertError(f"no convolution of {type(model).__name__} draws on a warehouse; convert it first")
    return replaced(model, dict.fromkeys(names, KWODConv2d))
