"""CBAM, convolutional block attention (Woo et al., ECCV 2018), after the last norm of every residual block.

    channel gate: x * sigmoid(MLP(mean over space) + MLP(max over space)),   MLP C -> C / 16 -> C, ReLU, biased
    spatial gate: x * sigmoid(BN(conv 7x7 of [max over C, mean over C])),    no bias, the norm's weight starts at 0

Biases start at 0, and the spatial norm follows its batches slowly (momentum 0.01), both as in the authors' code.

The channel gate is timm's. timm's spatial gate is not used: it stacks the two maps the other way round.
"""

import torch
from timm.layers.cbam import ChannelAttn
from torch import Tensor, nn

from kernelwarehouse.peers._surgery import gated


class SpatialGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(1, momentum=0.01)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.cat([x.amax(1, keepdim=True), x.mean(1, keepdim=True)], dim=1)
        return x * self.norm(self.conv(maps)).sigmoid()


def block_attention(channels: int) -> nn.Module:
    channel_gate = ChannelAttn(channels, rd_channels=channels // 16, mlp_bias=True)
    for name, parameter in channel_gate.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return nn.Sequential(channel_gate, SpatialGate())


def convert(model: nn.Module) -> nn.Module:
    """A copy of a ResNet with CBAM in every residual block."""
    return gated(model, lambda channels, stage: block_attention(channels))
