"""The plain definition: mix all cells, assemble a kernel for every sample, apply each to its own sample.

This is how the published code works, and what every faster way is compared with.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.partition import Partition

_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def assemble_kernels(attention: Tensor, cells: Tensor, partition: Partition) -> Tensor:
    """`[batch, m, n]` attentions and `[n, *cell]` cells -> kernels `[batch, out, in / groups, *k]`."""
    mixtures = torch.matmul(attention, cells.flatten(1))
    return partition.join(mixtures.unflatten(2, partition.cell_shape))


def apply_static(x: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
    """Apply one kernel to all samples, as a static layer does."""
    if geometry.spatial_axes == 0:
        return F.linear(x, kernel)
    convolve = _CONVOLVE[geometry.spatial_axes]
    return convolve(x, kernel, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)


def split_kernels(kernels: Tensor, partition: Partition) -> Tensor:
    """`[batch, out, in / groups, *k]` -> `[batch, m, cell size]`, the inverse of `Partition.join` for a batch."""
    axes = len(partition.kernel_shape)
    pairs = [size for pair in zip(partition.counts, partition.cell_shape, strict=True) for size in pair]
    grid = kernels.reshape(kernels.shape[0], *pairs)
    counts, inside = [*range(5, 2 * axes + 1, 2), 1, 3], list(range(2, 2 * axes + 1, 2))
    return grid.permute(0, *counts, *inside).reshape(kernels.shape[0], partition.mixtures, -1)


def apply_kernels(x: Tensor, kernels: Tensor, geometry: Geometry) -> Tensor:
    """Apply to every sample its own kernel, as one convolution with batch-many groups (or one batched product)."""
    if geometry.spatial_axes == 0:
        return torch.bmm(x, kernels.transpose(1, 2))
    batch = x.shape[0]
    if batch == 0:  # a convolution with zero groups does not exist; any kernel gives the shape
        out = apply_static(x, kernels.new_zeros(geometry.partition.kernel_shape), geometry)
        return out + kernels.sum()  # keeps the gradients of an empty batch defined (and zero)
    out = _CONVOLVE[geometry.spatial_axes](
        x.reshape(1, batch * x.shape[1], *x.shape[2:]),
        kernels.flatten(0, 1),
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.groups * batch,
    )
    return out.reshape(batch, geometry.out_channels, *out.shape[2:])


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias."""
    return apply_kernels(x, assemble_kernels(attention, cells, geometry.partition), geometry)


STRATEGY = Strategy("plain", forward, None)
