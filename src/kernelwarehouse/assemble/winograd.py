"""Winograd's transform for 3x3 kernels at stride 1, compiled: 16 products for an output tile of 2x2 instead of 36."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from kernelwarehouse.assemble import native
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.layout import channels_last
from kernelwarehouse.assemble.mixtures import attention_pairs, from_pairs
from kernelwarehouse.assemble.stored import Stored
from kernelwarehouse.assemble.strategy import Strategy

POINTS, TILE = 16, 2  # products of two channels for a tile, and how wide that is


@lru_cache(maxsize=1024)
def _geometry_obstacle(geometry: Geometry) -> str | None:
    if geometry.kernel_size != (3, 3):
        return f"its kernel is {'x'.join(map(str, geometry.kernel_size)) or 'one'} wide, not 3x3"
    if geometry.stride != (1, 1) or geometry.dilation != (1, 1):
        return f"its stride is {geometry.stride} and its dilation {geometry.dilation}; both have to be 1"
    return None


def obstacle(x: Tensor, geometry: Geometry) -> str | None:
    """Why a layer cannot be evaluated in this way on this input, or nothing."""
    return _geometry_obstacle(geometry) or native.obstacle(x, geometry)


def multiply_adds(geometry: Geometry, out_size: tuple[int, ...]) -> int:
    """Of the products for one sample."""
    tiles = math.prod(-(-size // TILE) for size in out_size)
    return tiles * POINTS * geometry.out_channels * geometry.in_channels


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias, channels last where the input is."""
    pairs = attention_pairs(attention, geometry).contiguous()
    return _product(x, torch.ops.kernelwarehouse.forward_winograd, (pairs, cells.contiguous()), geometry)


def forward_basis(x: Tensor, hidden: Tensor, scale: Tensor, stored: Stored, geometry: Geometry) -> Tensor:
    """The same, mixed from bases, as `native.forward_basis` does."""
    mixing = hidden, attention_pairs(scale.unsqueeze(2), geometry).contiguous(), *stored.parts
    return stored.scaled(_product(x, torch.ops.kernelwarehouse.forward_winograd_basis, mixing, geometry))


def _product(
    x: Tensor, operator: Callable[..., Tensor], mixing: tuple[Tensor | None, ...], geometry: Geometry
) -> Tensor:
    if channels_last(x):
        return operator(x.movedim(1, -1).contiguous(), *mixing, geometry.padding, True).movedim(-1, 1)
    return operator(x.contiguous(), *mixing, geometry.padding, False)


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
    grad_x, grad_pairs, grad_cells = torch.ops.kernelwarehouse.backward_winograd(
        grad.contiguous(),
        x.contiguous(),
        attention_pairs(attention, geometry).contiguous(),
        cells.flatten(2).contiguous(),
        geometry.padding,
        wants_input,
        None if total is None else total.flatten(2),
    )
    grad_attention = from_pairs(grad_pairs, geometry)
    return grad_x if wants_input else None, grad_attention, grad_cells.view(cells.shape) if total is None else total


STRATEGY = Strategy("winograd", forward, backward, obstacle, adds=True)
