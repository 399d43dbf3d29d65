"""What the compared convolutions share: the fixed facts of the layer they replace, and how new weights start."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernelwarehouse.assemble import Geometry, apply_kernels
from kernelwarehouse.config import check_positive
from kernelwarehouse.errors import ConvertError
from kernelwarehouse.padding import image_mean
from kernelwarehouse.partition import Partition

KERNEL_NUMBERS_AT_ONCE = 2 << 20
"""Larger temporaries are mapped and page-faulted anew by the allocator on every call."""


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
    """Global average pooling: `[batch, channels, *space]` -> `[batch, channels]`; of padded images, over the image."""
    of_image = image_mean(x)
    return x.flatten(2).mean(2) if of_image is None else of_image


def convolve(x: Tensor, make_kernels: Callable[..., Tensor], controls: Sequence[Tensor], geometry: Geometry) -> Tensor:
    """Apply to every sample its own kernel, where `make_kernels(*controls)` gives `[batch, out, in / groups, *k]`.

    Every control has the batch as its first axis. Only the kernels of a few samples exist at a time, and none is kept
    for the backward pass, which makes them again: kept, they would take batch times the layer's parameters.
    """

    def run(x: Tensor, *controls: Tensor) -> Tensor:
        return apply_kernels(x, make_kernels(*controls), geometry)

    if torch.compiler.is_compiling():
        return run(x, *controls)
    samples = max(1, KERNEL_NUMBERS_AT_ONCE // math.prod(geometry.partition.kernel_shape))
    parts = zip(x.split(samples), *(control.split(samples) for control in controls), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([run(*part) for part in parts])
    return torch.cat([checkpoint(run, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias[:, None, None]


def expert_kernels(kernel: Tensor, experts: int) -> nn.Parameter:
    """Fresh kernels `[experts, *kernel.shape]`, each kaiming-normal with the fan-out of one kernel."""
    check_positive(experts, "experts")
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
