"""Evaluation of a layer by whichever strategy suits it."""

import torch
from torch import Tensor

from kernelwarehouse.assemble import factored, operator, plain
from kernelwarehouse.assemble.choose import choose
from kernelwarehouse.assemble.function import Recomputed
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.run import RECOMPUTING
from kernelwarehouse.errors import ShapeError


def evaluate(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias.

    `x` is `[batch, in, *space]`, or `[batch, tokens, in]` for a linear layer; `attention` is `[batch, m, n]` and
    `cells` `[n, *cell]`. Which strategy is used is for `choose` to say; all compute the same.
    """
    _check(x, attention, cells, geometry)
    dtype = _autocast_dtype(x)
    if dtype is None:
        return _run(x, attention, cells, geometry)
    with torch.autocast(x.device.type, enabled=False):
        return _run(x.to(dtype), attention.to(dtype), cells.to(dtype), geometry)


def evaluate_factored(x: Tensor, coefficients: Tensor, factors: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The same for the attention `coefficients @ factors`, which is not computed (see `factored`).

    `coefficients` are `[batch, m, r]`, `factors` `[m, r, n]`.
    """
    if x.numel() == 0:
        attention = torch.matmul(coefficients.transpose(0, 1), factors).transpose(0, 1)
        return plain.evaluate(x, attention, cells, geometry)
    dtype = _autocast_dtype(x)
    if dtype is not None:
        x, cells = x.to(dtype), cells.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        tensors = x, coefficients.to(cells.dtype), factors.to(cells.dtype), cells
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return factored.Factored.apply(geometry, *tensors)
        return factored.forward(*tensors, geometry)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast computes in, where it is on. It leaves float64 alone, and devices such as meta have none."""
    device = x.device.type
    casts = x.dtype != torch.float64 and torch.amp.is_autocast_available(device)
    return torch.get_autocast_dtype(device) if casts and torch.is_autocast_enabled(device) else None


def _run(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    if operator.wanted():
        return operator.evaluate_as_operator(x, attention, cells, geometry)
    name = choose(x, geometry).strategy
    if name == "plain":
        return plain.evaluate(x, attention, cells, geometry)
    strategy = RECOMPUTING[name]
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
