"""Point-wise kernels by the compiled code for several positions: output channels, not positions, along the vectors.

On small maps positions fill no whole number of vectors, and what is mixed at a time stays nearer here. In exchange
inputs and outputs are turned around.
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


STRATEGY = Strategy("rows", forward, native.backward, obstacle, adds=True)
