"""Backward of point-wise kernels by compiled code that reads images as they are, with positions along the vectors.

On large maps `native` takes longer to turn them around than to multiply; on small ones, positions fill no whole number
of vectors here. Forward is that of `native`, which turns nothing around either.
"""

import torch
from torch import Tensor

from kernelwarehouse.assemble import native, pointwise
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.layout import channels_last, visited
from kernelwarehouse.assemble.mixtures import attention_pairs, from_pairs
from kernelwarehouse.assemble.strategy import Strategy


def obstacle(x: Tensor, geometry: Geometry) -> str | None:
    """Why a layer cannot be evaluated in this way on this input, or nothing."""
    problem = native.obstacle(x, geometry) or pointwise.geometry_obstacle(geometry)
    if problem is None and channels_last(x):
        return "its channels are last: positions lie along no vector"
    return problem


def backward(
    grad: Tensor,
    x: Tensor,
    attention: Tensor,
    cells: Tensor,
    geometry: Geometry,
    wants_input: bool,
    total: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input, attentions and cells; kernels are mixed again, block by block."""
    grad_seen, grad_pairs, grad_cells = torch.ops.kernelwarehouse.backward_planes(
        grad.contiguous(),
        visited(x, geometry).contiguous(),
        attention_pairs(attention, geometry).contiguous(),
        cells.contiguous(),
        wants_input,
        total,
    )
    grad_input = grad_seen if wants_input else None
    if wants_input and max(geometry.stride) > 1:
        grad_input = torch.zeros_like(x)
        visited(grad_input, geometry).copy_(grad_seen)
    return grad_input, from_pairs(grad_pairs, geometry), grad_cells.view(cells.shape) if total is None else total


STRATEGY = Strategy("planes", native.forward, backward, obstacle, adds=True)
