"""Kernels of one position, compiled, the other way round than `native` has them: as it has those of several positions.

Output channels lie along the vectors instead of positions, which on small maps fill no whole number of them, and what
is mixed at a time stays nearer. In exchange inputs and outputs are turned around.
"""

import torch
from torch import Tensor

from kernelwarehouse.assemble import native, pointwise
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.layout import channels_last
from kernelwarehouse.assemble.mixtures import attention_pairs
from kernelwarehouse.assemble.strategy import Strategy


def obstacle(x: Tensor, geometry: Geometry) -> str | None:
    """Why a layer cannot be evaluated in this way on this input, or nothing."""
    problem = native.obstacle(x, geometry) or pointwise.geometry_obstacle(geometry)
    if problem is None and channels_last(x):
        return "its channels are last, where `native` is the same"
    return problem


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias."""
    mixing = attention_pairs(attention, geometry).contiguous(), cells.contiguous()
    return native.by_rows(x, torch.ops.kernelwarehouse.forward_taps, mixing, geometry)


def forward_basis(
    x: Tensor, hidden: Tensor, scale: Tensor, basis: Tensor, steps: Tensor | None, geometry: Geometry
) -> Tensor:
    """The same, mixed from bases, as `native.forward_basis` does."""
    mixing = hidden, attention_pairs(scale.unsqueeze(2), geometry).contiguous(), basis, steps
    return native.by_rows(x, torch.ops.kernelwarehouse.forward_taps_basis, mixing, geometry)


STRATEGY = Strategy("rows", forward, native.backward, obstacle, adds=True)
