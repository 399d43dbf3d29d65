"""Evaluation of a layer by whichever strategy suits it."""

import torch
from torch import Tensor

from kernelwarehouse.assemble import depthwise, grouped, matmul, native, plain, pointwise
from kernelwarehouse.assemble.choose import choose
from kernelwarehouse.assemble.function import Recomputed, Strategy
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.errors import ShapeError

_RECOMPUTING: dict[str, Strategy] = {
    "depthwise": depthwise,
    "grouped": grouped,
    "matmul": matmul,
    "native": native,
    "pointwise": pointwise,
}


def evaluate(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias.

    `x` is `[batch, in, *space]`, or `[batch, tokens, in]` for a linear layer; `attention` is `[batch, m, n]` and
    `cells` `[n, *cell]`. Which strategy is used is for `choose` to say; all compute the same.
    """
    _check(x, attention, cells, geometry)
    device = x.device.type
    # Autocast leaves float64 alone, and devices such as meta have none.
    casts = x.dtype != torch.float64 and torch.amp.is_autocast_available(device)
    if casts and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, attention, cells = x.to(dtype), attention.to(dtype), cells.to(dtype)
        with torch.autocast(device, enabled=False):
            return _run(x, attention, cells, geometry)
    return _run(x, attention, cells, geometry)


def _run(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    name = choose(x, geometry).strategy
    if name == "plain":
        return plain.evaluate(x, attention, cells, geometry)
    strategy = _RECOMPUTING[name]
    if torch.is_grad_enabled() and (x.requires_grad or attention.requires_grad or cells.requires_grad):
        return Recomputed.apply(strategy, geometry, x, attention, cells)
    return strategy.forward(x, attention, cells, geometry)


def _check(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> None:
    partition, batch = geometry.partition, x.shape[0]
    wanted = (batch, partition.mixtures, cells.shape[0])
    if attention.shape != wanted or cells.shape[1:] != partition.cell_shape:
        raise ShapeError(
            f"attention {tuple(attention.shape)} and cells {tuple(cells.shape)} given for a batch of {batch} and "
            f"the kernel {partition.kernel_shape}; {wanted} and {(cells.shape[0], *partition.cell_shape)} are wanted"
        )
    channels = x.shape[2 if geometry.spatial_axes == 0 else 1] if x.dim() == max(3, 2 + geometry.spatial_axes) else -1
    if channels != geometry.in_channels:
        raise ShapeError(
            f"input of shape {tuple(x.shape)} given to a layer of {geometry.in_channels} input channels and "
            f"{geometry.spatial_axes} spatial axes"
        )
