"""DY-Conv (Chen et al., CVPR 2020): every sample's kernel is a mixture of a layer's own expert kernels.

    kernel = sum_k a_k W_k,   a = softmax(z / T),   z = Linear(h, experts)(relu(Linear(in, h)(mean of x)))

with h = max(in // 4, 4). T falls from 30 to 1 with the model's temperature tau, T = 1 + 29 tau, and is 1 when
evaluating. With `attention="caf"` the softmax gives way to the paper's contrasting-driven attention function, which
takes tau itself, in training and evaluation alike.
"""

from collections.abc import Iterable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble import evaluate
from kernelwarehouse.attention_functions import normaliser
from kernelwarehouse.config import check_choice
from kernelwarehouse.peers._conv import expert_kernels, geometry_of, head, pooled, with_bias
from kernelwarehouse.peers._surgery import convolutions, replaced
from kernelwarehouse.temperature import HasTemperature

KernelAttention = Literal["softmax", "caf"]
HOTTEST = 30.0
"""T at the start of training."""


class ExpertAttention(HasTemperature):
    """From logits `[batch, experts]` to the weights of the experts."""

    def __init__(self, function: KernelAttention) -> None:
        super().__init__()
        check_choice(function, "attention", get_args(KernelAttention))
        self.function = function

    def softening(self, dtype: torch.dtype) -> Tensor:
        """T, by which logits are divided before a softmax or a sigmoid."""
        if not self.training:
            return torch.ones((), dtype=dtype, device=self.temperature.device)
        return 1 + (HOTTEST - 1) * self.tau(dtype)

    def forward(self, logits: Tensor) -> Tensor:
        if self.function == "softmax":
            return torch.softmax(logits / self.softening(logits.dtype), dim=1)
        tau = self.tau(logits.dtype)
        start = torch.zeros_like(logits)
        start[:, 0] = 1
        return tau * start + (1 - tau) * logits / normaliser(logits)

    def extra_repr(self) -> str:
        return f"function={self.function}"


class DYConv2d(nn.Module):
    """Takes the place of a `Conv2d`; a bias stays as it is."""

    def __init__(self, conv: nn.Conv2d, experts: int = 4, attention: KernelAttention = "softmax") -> None:
        super().__init__()
        self.geometry = geometry_of(conv)
        self.weight = expert_kernels(conv.weight, experts)
        hidden = max(conv.in_channels // 4, 4)
        self.squeeze = head(conv.in_channels, hidden)
        self.excite = head(hidden, experts)
        self.attention = ExpertAttention(attention)
        self.bias = conv.bias
        self.to(conv.weight)  # the new parts go where the old ones are

    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention(self.excite(self.squeeze(pooled(x)).relu()))
        out = evaluate(x, attention[:, None], self.weight, self.geometry)
        return with_bias(out, self.bias)


def convert(
    model: nn.Module, experts: int = 4, attention: KernelAttention = "softmax", exclude: Iterable[str] = ()
) -> nn.Module:
    """A copy of the model with experts in every convolution but the stem, and but those that `exclude` fits."""
    stem = convolutions(model)[:1]
    chosen = [layer.name for layer in convolutions(model, exclude) if layer not in stem]
    return replaced(model, dict.fromkeys(chosen, partial(DYConv2d, experts=experts, attention=attention)))
