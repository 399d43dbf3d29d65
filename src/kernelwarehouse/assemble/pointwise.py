"""One batched matrix product for kernels of a single position, a chunk of samples at a time."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kernelwarehouse.assemble.blocks import ON_CPU
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.grouped import kernel_chunks
from kernelwarehouse.assemble.plain import assemble_kernels, split_kernels
from kernelwarehouse.assemble.strategy import Strategy


@lru_cache(maxsize=1024)
def geometry_obstacle(geometry: Geometry) -> str | None:
    """Why a layer is not one product, or nothing."""
    if geometry.spatial_axes == 0:
        return "it is a linear layer"
    if math.prod(geometry.kernel_size) != 1 or any(geometry.padding):
        return f"its kernel is {geometry.kernel_size}, padded by {geometry.padding}"
    return None if geometry.groups == 1 else f"it has {geometry.groups} groups"


def obstacle(x: Tensor, geometry: Geometry) -> str | None:
    """The same for any input."""
    return geometry_obstacle(geometry)


def visited(x: Tensor, geometry: Geometry) -> Tensor:
    """The places that the kernel visits."""
    if max(geometry.stride) == 1:
        return x
    return x[(slice(None), slice(None), *(slice(None, None, stride) for stride in geometry.stride))]


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias."""
    columns = visited(x, geometry).flatten(2)
    slices = kernel_chunks(x, geometry.partition, ON_CPU)
    if len(slices) == 1:  # without the views, which cost as much as a small product
        out = torch.bmm(assemble_kernels(attention, cells, geometry.partition).flatten(2), columns)
    else:
        out = x.new_empty(x.shape[0], geometry.out_channels, columns.shape[2])
        for chunk in slices:
            kernels = assemble_kernels(attention[chunk], cells, geometry.partition).flatten(2)
            torch.bmm(kernels, columns[chunk], out=out[chunk])
    return out.view(x.shape[0], geometry.out_channels, *geometry.output_size(tuple(x.shape[2:])))


def backward(
    grad: Tensor, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry, wants_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input, attentions and cells; each chunk's kernels are assembled again."""
    partition, flat_cells = geometry.partition, cells.flatten(1)
    seen, grad = visited(x, geometry), grad.contiguous().flatten(2)
    columns = seen.flatten(2)
    grad_columns = torch.empty_like(columns, memory_format=torch.contiguous_format) if wants_input else None
    grad_attention, grad_cells = torch.empty_like(attention), torch.zeros_like(flat_cells)
    for chunk in kernel_chunks(x, partition, ON_CPU):
        picked = attention[chunk]
        if grad_columns is not None:
            kernels = assemble_kernels(picked, cells, partition).flatten(2)
            torch.bmm(kernels.transpose(1, 2), grad[chunk], out=grad_columns[chunk])
        grad_kernels = torch.bmm(grad[chunk], columns[chunk].transpose(1, 2))
        grad_mixtures = split_kernels(grad_kernels, partition)
        grad_attention[chunk] = grad_mixtures @ flat_cells.t()
        grad_cells.addmm_(picked.flatten(0, 1).t(), grad_mixtures.flatten(0, 1))
    grad_input = grad_columns
    if grad_columns is not None:
        grad_input = grad_columns.view(seen.shape)
        if max(geometry.stride) > 1:
            spread = torch.zeros_like(x)
            visited(spread, geometry).copy_(grad_input)
            grad_input = spread
    return grad_input, grad_attention, grad_cells.view(cells.shape)


STRATEGY = Strategy("pointwise", forward, backward, obstacle)
