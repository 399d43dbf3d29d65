"""ODConv (Li et al., ICLR 2022): attention over input channels, output channels, kernel positions and experts.

    v = relu(BatchNorm(Linear(in, h)(mean of x))),   h = max(in // 16, 16)
    kernel = position * sum_k kernel_k W_k,   out = filter * conv(channel * x, kernel)

Heads are linear in v. Channel, filter and position weights are sigmoid(z / T), the experts' softmax(z / T), with T as
in DY-Conv. A depth-wise layer has no filter head, a 1x1 kernel no position head. With `attention="caf"` the softmax
gives way to the contrasting-driven attention function; the sigmoids keep T.
"""

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn

from kernelwarehouse.assemble import assemble_kernels, evaluate
from kernelwarehouse.peers._conv import convolve, expert_kernels, geometry_of, head, pooled, with_bias
from kernelwarehouse.peers._surgery import convolutions, replaced
from kernelwarehouse.peers.dyconv import ExpertAttention, KernelAttention


class ODConv2d(nn.Module):
    """Takes the place of a `Conv2d`; a bias stays as it is."""

    def __init__(self, conv: nn.Conv2d, experts: int = 4, attention: KernelAttention = "softmax") -> None:
        super().__init__()
        self.geometry = geometry_of(conv)
        self.weight = expert_kernels(conv.weight, experts)
        hidden = max(conv.in_channels // 16, 16)
        self.squeeze = head(conv.in_channels, hidden, bias=False)
        self.norm = nn.BatchNorm1d(hidden)
        self.channel = head(hidden, conv.in_channels)
        depthwise = conv.groups == conv.in_channels == conv.out_channels
        self.filter = None if depthwise else head(hidden, conv.out_channels)
        positions = conv.weight[0, 0].numel()
        self.position = None if positions == 1 else head(hidden, positions)
        self.kernel = head(hidden, experts)
        self.attention = ExpertAttention(attention)
        self.bias = conv.bias
        self.to(conv.weight)  # the new parts go where the old ones are

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.squeeze(pooled(x))).relu()
        softening = self.attention.softening(hidden.dtype)
        experts = self.attention(self.kernel(hidden))[:, None]
        x = x * (self.channel(hidden) / softening).sigmoid()[:, :, None, None]
        if self.position is None:
            out = evaluate(x, experts, self.weight, self.geometry)
        else:
            position = (self.position(hidden) / softening).sigmoid()
            out = convolve(x, self._kernels, (experts, position), self.geometry)
        if self.filter is not None:
            out = out * (self.filter(hidden) / softening).sigmoid()[:, :, None, None]
        return with_bias(out, self.bias)

    def _kernels(self, experts: Tensor, position: Tensor) -> Tensor:
        kernels = assemble_kernels(experts, self.weight, self.geometry.partition)
        return kernels * position.unflatten(1, self.geometry.kernel_size)[:, None, None]


def convert(
    model: nn.Module, experts: int = 4, attention: KernelAttention = "softmax", exclude: Iterable[str] = ()
) -> nn.Module:
    """A copy of the model with ODConv for every convolution but those that `exclude` fits."""
    chosen = [layer.name for layer in convolutions(model, exclude)]
    return replaced(model, dict.fromkeys(chosen, partial(ODConv2d, experts=experts, attention=attention)))
