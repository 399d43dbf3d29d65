"""Convolution with a group for every sample, a chunk of samples at a time.

A convolution library is at its best where the output is large; the chunk keeps the assembled kernels small. A chunk of
one sample is an ordinary convolution.
"""

import torch
from torch import Tensor

from kernelwarehouse.assemble.blocks import kernel_chunks
from kernelwarehouse.assemble.geometry import Geometry, looks_at_padding_alone
from kernelwarehouse.assemble.layout import channels_last, new_images
from kernelwarehouse.assemble.plain import apply_kernels, assemble_kernels, split_kernels
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.assemble.sums import add_product, sum_from

# Assembled numbers alive at once on a CPU.
_BLOCK = 2 << 20


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias, channels last where the input is."""

    def piece(chunk: slice) -> Tensor:
        return apply_kernels(x[chunk], assemble_kernels(attention[chunk], cells, geometry.partition), geometry)

    slices, last = kernel_chunks(x, geometry.partition, _BLOCK), geometry.spatial_axes > 0 and channels_last(x)
    if not last:
        return piece(slices[0]) if len(slices) == 1 else torch.cat([piece(chunk) for chunk in slices])
    # A convolution with a group for every sample lays the samples side by side, so that this is a copy in any case.
    out = new_images(x, geometry.out_channels, geometry.output_size(tuple(x.shape[2:])), last)
    for chunk in slices:
        out[chunk] = piece(chunk)
    return out


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
    partition = geometry.partition
    flat_cells = cells.reshape(cells.shape[0], -1)
    grad_input = torch.empty_like(x) if wants_input else None
    grad_attention, grad_cells = torch.empty_like(attention), sum_from(total, flat_cells)
    for chunk in kernel_chunks(x, partition, _BLOCK):
        picked = attention[chunk]
        kernels = assemble_kernels(picked, cells, partition)
        grad_x, grad_kernels = _product_backward(grad[chunk], x[chunk], kernels, geometry, wants_input)
        del kernels
        if grad_input is not None and grad_x is not None:
            grad_input[chunk] = grad_x
        grad_mixtures = split_kernels(grad_kernels, partition)
        del grad_kernels
        grad_attention[chunk] = grad_mixtures @ flat_cells.t()
        add_product(grad_cells, picked.flatten(0, 1).t(), grad_mixtures.flatten(0, 1))
    return grad_input, grad_attention, grad_cells.to(cells.dtype).view(cells.shape) if total is None else total


def _product_backward(
    grad: Tensor, x: Tensor, kernels: Tensor, geometry: Geometry, wants_input: bool
) -> tuple[Tensor | None, Tensor]:
    if geometry.spatial_axes == 0:
        return torch.bmm(grad, kernels) if wants_input else None, torch.bmm(grad.transpose(1, 2), x)
    batch = x.shape[0]
    grad_x, grad_kernels, _ = torch.ops.aten.convolution_backward(
        grad.reshape(1, -1, *grad.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        kernels.flatten(0, 1),
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        False,
        [0] * geometry.spatial_axes,
        geometry.groups * batch,
        [wants_input, True, False],
    )
    grad_kernels = grad_kernels.view(kernels.shape)
    # Of an input of a single position, oneDNN's bfloat16 leaves what was in memory at the places that see none of it.
    for axis, place in looks_at_padding_alone(geometry, tuple(x.shape[2:])):
        grad_kernels.select(3 + axis, place).zero_()
    return grad_x.view(x.shape) if wants_input else None, grad_kernels


STRATEGY = Strategy("grouped", forward, backward, adds=True)
