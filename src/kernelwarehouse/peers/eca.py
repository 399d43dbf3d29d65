"""ECA, efficient channel attention (Wang et al., CVPR 2020), after the last norm of every residual block:

    x * sigmoid(Conv1d(1, 1, ks, no bias) over the channel axis of the mean of x)

The module is timm's; the kernel sizes are those of the authors' ResNets, one a stage.
"""

from timm.layers.eca import EcaModule
from torch import nn

from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers._surgery import gated

RESNET18_KERNELS = (3, 5, 7, 7)
RESNET50_KERNELS = (3, 5, 5, 7)


def convert(model: nn.Module, kernel_sizes: tuple[int, ...] = RESNET18_KERNELS) -> nn.Module:
    """A copy of a ResNet with ECA in every residual block."""

    def gate(channels: int, stage: int) -> nn.Module:
        if stage >= len(kernel_sizes):
            raise ConvertError(f"kernel sizes {kernel_sizes} are for {len(kernel_sizes)} stages; the model has more")
        return EcaModule(kernel_size=kernel_sizes[stage])

    return gated(model, gate)
