"""One batched matrix product for kernels of a single position, a chunk of samples at a time."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kernelwarehouse.assemble.blocks import kernel_chunks
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.layout import channels_last, matrices, new_images, visited, write_product
from kernelwarehouse.assemble.plain import assemble_kernels, split_kernels
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.assemble.sums import add_product, sum_from


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


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias, channels last where the input is."""
    last, space = channels_last(x), geometry.output_size(tuple(x.shape[2:]))
    columns = matrices(visited(x, geometry), last)
    slices = kernel_chunks(x, geometry.partition)
    if len(slices) == 1 and not last:  # without the views, which cost as much as a small product
        out = torch.bmm(assemble_kernels(attention, cells, geometry.partition).flatten(2), columns)
        return out.view(x.shape[0], geometry.out_channels, *space)
    images = new_images(x, geometry.out_channels, space, last)
    stack = images.flatten(2)
    for chunk in slices:
        kernels = assemble_kernels(attention[chunk], cells, geometry.partition).flatten(2)
        write_product(stack[chunk], kernels, columns[chunk])
    return images


def backward(
    grad: Tensor,
    x: Tensor,
    attention: Tensor,
    cells: Tensor,
    geometry: Geometry,
    wants_input: bool,
    total: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input, attentions and cells; each chunk's kernels are assembled again."""
    partition, flat_cells, last = geometry.partition, cells.flatten(1), channels_last(x)
    seen, grad = visited(x, geometry), matrices(grad, last)
    columns = matrices(seen, last)
    grad_seen = new_images(x, x.shape[1], tuple(seen.shape[2:]), last) if wants_input else None
    grad_attention, grad_cells = torch.empty_like(attention), sum_from(total, flat_cells)
    for chunk in kernel_chunks(x, partition):
        picked = attention[chunk]
        if grad_seen is not None:
            kernels = assemble_kernels(picked, cells, partition).flatten(2)
            write_product(grad_seen.flatten(2)[chunk], kernels.transpose(1, 2), grad[chunk])
            del kernels
        grad_mixtures = split_kernels(torch.bmm(grad[chunk], columns[chunk].transpose(1, 2)), partition)
        grad_attention[chunk] = grad_mixtures @ flat_cells.t()
        add_product(grad_cells, picked.flatten(0, 1).t(), grad_mixtures.flatten(0, 1))
    grad_input = grad_seen
    if grad_seen is not None and max(geometry.stride) > 1:
        grad_input = torch.zeros_like(x)
        visited(grad_input, geometry).copy_(grad_seen)
    return grad_input, grad_attention, grad_cells.to(cells.dtype).view(cells.shape) if total is None else total


STRATEGY = Strategy("pointwise", forward, backward, obstacle, adds=True)
