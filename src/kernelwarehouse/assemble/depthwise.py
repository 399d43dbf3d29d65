"""The compiled kernels for depth-wise 3x3 convolutions of stride 1, on the CPU, in float32.

Mixing costs next to nothing here; a convolution library, though, spends most of its time on copies and on starting up.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.native import LANES, attention_pairs
from kernelwarehouse.errors import StrategyError


@lru_cache(maxsize=1024)
def _obstacle(geometry: Geometry) -> str | None:
    cell = geometry.partition.cell_shape
    if geometry.kernel_size != (3, 3) or geometry.in_channels != geometry.groups:
        return f"its kernel is {geometry.partition.kernel_shape} in {geometry.groups} groups, not depth-wise 3x3"
    if cell[0] % LANES or math.prod(cell[2:]) != 1:
        return f"its cells {cell} are no multiple of {LANES} channels at one position"
    if geometry.stride != (1, 1):
        return f"its stride is {geometry.stride}"
    if any(pad > 2 * dilation for pad, dilation in zip(geometry.padding, geometry.dilation, strict=True)):
        return f"its padding {geometry.padding} is wider than the kernel reaches"
    return None


def obstacle(x: Tensor, geometry: Geometry) -> str | None:
    """Why these kernels cannot evaluate a layer on this input, or nothing."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or type(x) is not Tensor:
        return f"the input is {x.dtype} on {x.device.type}; a plain tensor of float32 on cpu is wanted"
    return _obstacle(geometry) or (None if load_native() else "the kernels could not be built, or are turned off")


def require(x: Tensor, geometry: Geometry) -> None:
    """Raise where these kernels cannot evaluate a layer on this input."""
    problem = obstacle(x, geometry)
    if problem is not None:
        raise StrategyError(f"the layer with kernel {geometry.partition.kernel_shape} cannot be depthwise: {problem}")


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias."""
    pairs, flat_cells = attention_pairs(attention, geometry), cells.flatten(2).contiguous()
    return torch.ops.kernelwarehouse.forward_depthwise(
        x.contiguous(),
        pairs,
        flat_cells,
        geometry.output_size(tuple(x.shape[2:])),
        geometry.padding,
        geometry.dilation,
    )


def backward(
    grad: Tensor, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry, wants_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input, attentions and cells."""
    grad, partition = grad.contiguous(), geometry.partition
    pairs, flat_cells = attention_pairs(attention, geometry), cells.flatten(1)
    grad_kernels = torch.ops.kernelwarehouse.depthwise_kernel_gradient(
        grad, x.contiguous(), partition.cell_shape[0], geometry.padding, geometry.dilation
    )
    grad_pairs = torch.matmul(grad_kernels, flat_cells.t())  # [batch, out groups, positions, n]
    grad_cells = pairs.flatten(0, 2).t() @ grad_kernels.flatten(0, 2)
    grad_attention = grad_pairs.transpose(1, 2).reshape(attention.shape)
    grad_input = _input_gradient(grad, pairs, cells, geometry, x) if wants_input else None
    return grad_input, grad_attention, grad_cells.view(cells.shape)


def _input_gradient(grad: Tensor, pairs: Tensor, cells: Tensor, geometry: Geometry, x: Tensor) -> Tensor:
    """The same convolution with its kernels turned around; channels that share an input are summed up."""
    around = [2 * dilation - pad for dilation, pad in zip(geometry.dilation, geometry.padding, strict=True)]
    flowing = torch.ops.kernelwarehouse.forward_depthwise(
        grad, pairs.flip(2), cells.flatten(2).contiguous(), x.shape[2:], around, geometry.dilation
    )
    shared = geometry.out_channels // geometry.in_channels
    return flowing if shared == 1 else flowing.unflatten(1, (-1, shared)).sum(2)
