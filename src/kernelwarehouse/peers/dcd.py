"""DCD, dynamic convolution decomposition (Li et al., ICLR 2021): a static kernel scaled by output channel, plus a
dynamic mixing of a few latent channels.

    out = P v + Lambda * conv(x),   v = BN(Phi u) + u,   u = BN(Q x)

Q squeezes to L channels, P expands to the outputs; Phi (L x L) and Lambda (one scale an output) come from the pooled
input: with H(y) = relu6(y + 3) / 3 and s = Linear(pooled, squeeze), y = s * H(Linear(s)), Phi = Linear(y), Lambda =
H(Linear(y)). No linear map has a bias. In basic blocks the input is pooled to 2x2, in bottlenecks to 1x1.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers._surgery import classifier, replaced, residual_blocks

CLASSIFIER_WIDTH = 32


def hard_gate(y: Tensor) -> Tensor:
    """A piecewise linear sigmoid from 0 to 2."""
    return F.relu6(y + 3) / 3


class DynamicMixing(nn.Module):
    """Phi `[batch, L, L]` and Lambda `[batch, out]` from a pooled input `[batch, inputs]`."""

    def __init__(self, inputs: int, squeeze: int, latent: int, outputs: int) -> None:
        super().__init__()
        self.latent = latent
        self.squeeze = nn.Linear(inputs, squeeze, bias=False)
        self.gate = nn.Linear(squeeze, squeeze, bias=False)
        self.phi = nn.Linear(squeeze, latent * latent, bias=False)
        self.scale = nn.Linear(squeeze, outputs, bias=False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        y = self.squeeze(inputs)
        y = y * hard_gate(self.gate(y))
        return self.phi(y).view(-1, self.latent, self.latent), hard_gate(self.scale(y))


class DCDConv2d(nn.Module):
    """Takes the place of a `Conv2d`, and keeps it for the static part."""

    def __init__(self, conv: nn.Conv2d, pool: int = 2) -> None:
        super().__init__()
        if conv.groups != 1:
            raise ConvertError(f"DCD decomposes dense convolutions; this one has {conv.groups} groups")
        inputs = conv.in_channels * pool * pool
        latent = int(math.sqrt(inputs))
        squeeze = max(inputs, latent * latent) // 16
        self.conv = conv
        self.pool = nn.AdaptiveAvgPool2d(pool)
        self.mixing = DynamicMixing(inputs, squeeze, latent, conv.out_channels)
        self.q = nn.Conv2d(conv.in_channels, latent, 1, (conv.stride[0], conv.stride[1]), bias=False)
        self.q_norm = nn.BatchNorm2d(latent)
        self.phi_norm = nn.BatchNorm1d(latent)
        self.p = nn.Conv2d(latent, conv.out_channels, 1, bias=False)
        for new in (self.q, self.p):
            nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
        self.to(conv.weight)  # the new parts go where the old ones are

    def forward(self, x: Tensor) -> Tensor:
        phi, scale = self.mixing(self.pool(x).flatten(1))
        static = self.conv(x) * scale[:, :, None, None]
        u = self.q_norm(self.q(x))
        v = self.phi_norm(phi @ u.flatten(2)).view_as(u) + u
        return self.p(v) + static


class DCDLinear(nn.Module):
    """Takes the place of the classifier, with vectors for feature maps."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        width = CLASSIFIER_WIDTH
        self.linear = linear
        self.mixing = DynamicMixing(linear.in_features, width, width, linear.out_features)
        self.q = nn.Linear(linear.in_features, width, bias=False)
        self.q_norm = nn.BatchNorm1d(width)
        self.phi_norm = nn.BatchNorm1d(width)
        self.p = nn.Linear(width, linear.out_features, bias=False)
        self.to(linear.weight)  # the new parts go where the old ones are

    def forward(self, x: Tensor) -> Tensor:
        phi, scale = self.mixing(x)
        u = self.q_norm(self.q(x))
        v = self.phi_norm((phi @ u[:, :, None])[:, :, 0]) + u
        return self.p(v) + self.linear(x) * scale


def convert(model: nn.Module) -> nn.Module:
    """A copy of a ResNet with DCD for all convolutions of residual blocks but the shortcuts, and for the classifier."""
    new: dict[str, Callable[[Any], nn.Module]] = {}
    for block in residual_blocks(model):
        pool = 2 if len(block.convolutions) == 2 else 1
        new |= dict.fromkeys(block.convolutions, partial(DCDConv2d, pool=pool))
    new |= dict.fromkeys(classifier(model), DCDLinear)
    return replaced(model, new)
