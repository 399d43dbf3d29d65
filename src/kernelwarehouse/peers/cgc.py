"""CGC, context-gated convolution (Lin et al., ECCV 2020): every sample gates the positions of one kernel.

With k kernel positions, l = int(k / 2 + 1) and groups of 16 channels (or of all, if fewer):

    e = Linear(k, l)(x pooled to the kernel's size)                    a code per input channel
    A = Linear(l, k)(relu(BN(e)))                                      gate of the input channels
    D = Linear(l, k)(relu(BN(Linear over a group's channels(relu(BN(e))))))   gate of the output channels
    kernel[o, i] = W[o, i] * sigmoid(A[i] + D[o])
"""

import math

from torch import Tensor, nn

from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers._conv import convolve, geometry_of, with_bias
from kernelwarehouse.peers._surgery import convolutions, replaced

GROUP = 16


class CGConv2d(nn.Module):
    """Takes the place of a `Conv2d`, and keeps its kernel."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        if conv.groups != 1:
            raise ConvertError(f"CGC gates every pair of channels; a convolution with {conv.groups} groups has not all")
        channels, outputs = conv.in_channels, conv.out_channels
        self.group = min(GROUP, channels)
        if channels % self.group or outputs * self.group % channels:
            raise ConvertError(
                f"CGC maps groups of {self.group} input channels to equal groups of output channels; "
                f"{channels} -> {outputs} channels cannot be split so"
            )
        self.geometry = geometry_of(conv)
        positions = math.prod(conv.kernel_size)
        code = int(positions / 2 + 1)
        self.pool = nn.AdaptiveAvgPool2d(conv.kernel_size)
        self.encode = nn.Linear(positions, code, bias=False)
        self.in_norm = nn.BatchNorm1d(channels)
        self.in_gate = nn.Linear(code, positions, bias=False)
        self.mix_norm = nn.BatchNorm1d(channels)
        self.mix = nn.Linear(self.group, outputs * self.group // channels, bias=False)
        self.out_norm = nn.BatchNorm1d(outputs)
        self.out_gate = nn.Linear(code, positions, bias=False)
        self.weight, self.bias = conv.weight, conv.bias
        self.to(conv.weight)  # the new parts go where the old ones are

    def forward(self, x: Tensor) -> Tensor:
        code = self.encode(self.pool(x).flatten(2))  # [batch, in, code]
        in_gate = self.in_gate(self.in_norm(code).relu())
        grouped = self.mix_norm(code).relu().unflatten(1, (-1, self.group))
        mixed = self.mix(grouped.transpose(2, 3)).transpose(2, 3).flatten(1, 2)  # [batch, out, code]
        out_gate = self.out_gate(self.out_norm(mixed).relu())
        return with_bias(convolve(x, self._kernels, (in_gate, out_gate), self.geometry), self.bias)

    def _kernels(self, in_gate: Tensor, out_gate: Tensor) -> Tensor:
        gate = (in_gate[:, None] + out_gate[:, :, None]).sigmoid()
        return self.weight * gate.unflatten(3, self.geometry.kernel_size)


def convert(model: nn.Module, stem: bool = False) -> nn.Module:
    """A copy of the model whose 3x3 convolutions are gated; with `stem` larger ones too, as in its authors' ResNets."""
    chosen = [
        layer.name
        for layer in convolutions(model)
        if layer.groups == 1 and (layer.kernel_size == (3, 3) or (stem and min(layer.kernel_size) > 3))
    ]
    return replaced(model, dict.fromkeys(chosen, CGConv2d))
