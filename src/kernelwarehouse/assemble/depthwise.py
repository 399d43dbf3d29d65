"""The compiled kernels for depth-wise 3x3 convolutions, on the CPU, in float32.

Mixing costs next to nothing here; a convolution library, though, spends most of its time on copies and on starting up.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kernelwarehouse.assemble.build import GRAIN, load_native
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.mixtures import attention_pairs
from kernelwarehouse.assemble.strategy import Strategy


@lru_cache(maxsize=1024)
def _obstacle(geometry: Geometry) -> str | None:
    cell = geometry.partition.cell_shape
    if geometry.kernel_size != (3, 3) or geometry.in_channels != geometry.groups:
        return f"its kernel is {geometry.partition.kernel_shape} in {geometry.groups} groups, not depth-wise 3x3"
    if cell[0] % GRAIN or math.prod(cell[2:]) != 1:
        return f"its cells {cell} are no multiple of {GRAIN} channels at one position"
    if max(geometry.stride) > 2:
        return f"its stride is {geometry.stride}; 1 and 2 are what the kernels know"
    if any(pad > 2 * dilation for pad, dilation in zip(geometry.padding, geometry.dilation, strict=True)):
        return f"its padding {geometry.padding} is wider than the kernel reaches"
    return None


def obstacle(x: Tensor, geometry: Geometry) -> str | None:
    """Why these kernels cannot evaluate a layer on this input, or nothing."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or type(x) is not Tensor:
        return f"the input is {x.dtype} on {x.device.type}; a plain tensor of float32 on cpu is wanted"
    return _obstacle(geometry) or (None if load_native() else "the kernels could not be built, or are turned off")


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias."""
    pairs = attention_pairs(attention, geometry).contiguous()
    size = geometry.output_size(tuple(x.shape[2:]))
    return torch.ops.kernelwarehouse.forward_depthwise(
        x.contiguous(), pairs, cells.contiguous(), size, geometry.padding, geometry.dilation, geometry.stride
    )


def backward(
    grad: Tensor, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry, wants_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input, attentions and cells."""
    pairs, flat_cells = attention_pairs(attention, geometry).contiguous(), cells.flatten(2).contiguous()
    x, grad = x.contiguous(), grad.contiguous()
    grad_kernels = torch.ops.kernelwarehouse.depthwise_kernel_gradient(
        grad, x, flat_cells.shape[1], geometry.padding, geometry.dilation, geometry.stride
    )
    grad_pairs = torch.matmul(grad_kernels, flat_cells.flatten(1).t())
    grad_cells = torch.mm(pairs.flatten(0, 2).t(), grad_kernels.flatten(0, 2))
    grad_input = None
    if wants_input:
        grad_input = torch.ops.kernelwarehouse.depthwise_input_gradient(
            grad,
            pairs,
            flat_cells,
            geometry.in_channels,
            x.shape[2:],
            geometry.padding,
            geometry.dilation,
            geometry.stride,
        )
    return grad_input, grad_pairs.transpose(1, 2).reshape(attention.shape), grad_cells.view(cells.shape)


STRATEGY = Strategy("depthwise", forward, backward, obstacle)
