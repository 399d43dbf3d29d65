"""What the compared convolutions share: the fixed facts of the layer they replace, and how new weights start."""

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble import Geometry
from kernelwarehouse.errors import ConvertError
from kernelwarehouse.partition import Partition


def geometry_of(layer: nn.Conv2d | nn.Linear) -> Geometry:
    """The geometry of a layer whose kernel is not partitioned: one mixture, a cell as large as the kernel."""
    kernel = tuple(layer.weight.shape)
    whole = Partition(kernel, kernel)
    if isinstance(layer, nn.Linear):
        return Geometry(whole)
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise ConvertError(
            f"convolution pads by {layer.padding!r} with {layer.padding_mode!r}; "
            "the compared methods take symmetric padding, in numbers, with zeros"
        )
    return Geometry(whole, layer.stride, layer.padding, layer.dilation, layer.groups)


def pooled(x: Tensor) -> Tensor:
    """Global average pooling: `[batch, channels, *space]` -> `[batch, channels]`."""
    return x.flatten(2).mean(2)


def with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias[:, None, None]


def expert_kernels(kernel: Tensor, experts: int) -> nn.Parameter:
    """Fresh kernels `[experts, *kernel.shape]`, each kaiming-normal with the fan-out of one kernel."""
    kernels = torch.empty(experts, *kernel.shape, device=kernel.device, dtype=kernel.dtype)
    for expert in kernels:
        nn.init.kaiming_normal_(expert, mode="fan_out", nonlinearity="relu")
    return nn.Parameter(kernels)


def head(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear map of an attention branch, started like KernelWarehouse's: kaiming-normal weights, zero biases."""
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.kaiming_normal_(linear.weight, mode="fan_out", nonlinearity="relu")
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
