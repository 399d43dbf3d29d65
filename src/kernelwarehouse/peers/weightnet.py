"""WeightNet (Ma et al., ECCV 2020), with M = G = 2: every sample scales the two halves of each output's kernel.

    a = sigmoid(Linear(h, 2 out)(Linear(in, h)(mean of x))),   h = max(8, in // 16)

The first half of the flattened (in, k, k) axis of output o is scaled by a[2 o], the second by a[2 o + 1].
"""

from torch import Tensor, nn

from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers._conv import convolve, geometry_of, pooled, with_bias
from kernelwarehouse.peers._surgery import convolutions, replaced, residual_blocks


class WeightNetConv2d(nn.Module):
    """Takes the place of a `Conv2d`, and keeps its kernel."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        size = conv.weight[0].numel()
        if size % 2:
            raise ConvertError(f"WeightNet scales kernels by halves; {size} weights an output cannot be halved")
        self.geometry = geometry_of(conv)
        hidden = max(8, conv.in_channels // 16)
        self.reduce = nn.Linear(conv.in_channels, hidden)
        self.scales = nn.Linear(hidden, 2 * conv.out_channels)
        self.weight, self.bias = conv.weight, conv.bias
        self.to(conv.weight)  # the new parts go where the old ones are

    def forward(self, x: Tensor) -> Tensor:
        scales = self.scales(self.reduce(pooled(x))).sigmoid()
        return with_bias(convolve(x, self._kernels, (scales,), self.geometry), self.bias)

    def _kernels(self, scales: Tensor) -> Tensor:
        halves = self.weight.view(self.geometry.out_channels, 2, -1) * scales.unflatten(1, (-1, 2))[..., None]
        return halves.view(scales.shape[0], *self.weight.shape)


def convert(model: nn.Module) -> nn.Module:
    """A copy of a ResNet whose 3x3 convolutions in residual blocks are scaled."""
    in_blocks = {name for block in residual_blocks(model) for name in block.convolutions}
    chosen = [layer.name for layer in convolutions(model) if layer.kernel_size == (3, 3) and layer.name in in_blocks]
    return replaced(model, dict.fromkeys(chosen, WeightNetConv2d))
