"""SE, squeeze-and-excitation (Hu et al., CVPR 2018), after the last norm of every residual block:

    x * sigmoid(W2 relu(W1 mean of x))

The module is timm's, with a hidden width of C / 16 and no biases.
"""

from timm.layers.squeeze_excite import SEModule
from torch import nn

from kernelwarehouse.peers._surgery import gated


def squeeze_excite(channels: int) -> nn.Module:
    return SEModule(channels, rd_channels=channels // 16, bias=False)


def convert(model: nn.Module) -> nn.Module:
    """A copy of a ResNet with SE in every residual block."""
    return gated(model, lambda channels, stage: squeeze_excite(channels))
