"""Evaluation of a layer along its route."""

import torch
from torch import Tensor

from kernelwarehouse.assemble import operator
from kernelwarehouse.assemble.basis import Prepared
from kernelwarehouse.assemble.branch import attend
from kernelwarehouse.assemble.context import forced, traced
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.registry import BASES, STRATEGIES
from kernelwarehouse.assemble.routing import Route, route
from kernelwarehouse.assemble.strategy import Recomputed
from kernelwarehouse.attention import Attention
from kernelwarehouse.errors import ShapeError
from kernelwarehouse.warehouse import Warehouse


def evaluate(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias, from attentions.

    `x` is `[batch, in, *space]`, or `[batch, tokens, in]` for a linear layer; `attention` is `[batch, m, n]` and
    `cells` `[n, *cell]`. Which strategies are used is for `route` to say; all compute the same.
    """
    _check(x, attention, cells, geometry)
    dtype = _autocast_dtype(x)
    if dtype is None:
        return _run(route(x, cells, geometry), geometry, x, attention, cells)
    with torch.autocast(x.device.type, enabled=False):
        x, attention, cells = x.to(dtype), attention.to(dtype), cells.to(dtype)
        return _run(route(x, cells, geometry), geometry, x, attention, cells)


def evaluate_layer(
    x: Tensor, seen: Tensor, attention: Attention, warehouse: Warehouse, geometry: Geometry, prepared: Prepared | None
) -> tuple[Tensor, Route]:
    """The output of a layer without its bias, and the way it took; the attention looks at `seen`."""
    dtype, cast = _autocast_dtype(x), None
    cells: Tensor = warehouse.cells
    if dtype is not None:
        x = x.to(dtype)
        if traced() or forced() == "plain":
            cells = cells.to(dtype)
        else:
            cast = warehouse.cells_as(dtype, attention)
    way = route(x, cells if cast is None else cast, geometry, attention, prepared)
    if way.forward in BASES and prepared is not None:
        return prepared.evaluate(x, seen, geometry, way.forward), way
    factored = STRATEGIES[way.forward].mixing == "factors"
    mixing: tuple[Tensor, ...] = attention.factored(seen) if factored else (attend(attention, seen),)
    if mixing[0].dtype != (dtype or cells.dtype):
        mixing = tuple(part.to(dtype or cells.dtype) for part in mixing)
    if STRATEGIES[way.forward].backward is not None and not traced():
        shared = warehouse.cells_to_share(cells, attention)
        if shared is not cells and cast is None:
            cast = cells  # what is kept for backward is still the parameter, which others know from activations
        cells = shared
    if dtype is None:
        return _run(way, geometry, x, *mixing, cells, cast=cast), way
    with torch.autocast(x.device.type, enabled=False):
        return _run(way, geometry, x, *mixing, cells, cast=cast), way


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast computes in, where it is on. It leaves float64 alone, and devices such as meta have none."""
    device = x.device.type
    casts = x.dtype != torch.float64 and torch.amp.is_autocast_available(device)
    return torch.get_autocast_dtype(device) if casts and torch.is_autocast_enabled(device) else None


def _run(way: Route, geometry: Geometry, *tensors: Tensor, cast: Tensor | None = None) -> Tensor:
    """Input, mixing and cells -> output; `cast` are the values of the cells in the type of the others."""
    if operator.wanted():
        x, attention, cells = tensors
        return operator.evaluate_as_operator(x, attention, cells if cast is None else cells.to(cast.dtype), geometry)
    strategy, (*others, cells) = STRATEGIES[way.forward], tensors
    if strategy.backward is None:
        return strategy.forward(*others, cells if cast is None else cells.to(cast.dtype), geometry)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        values = () if cast is None else (cast,)  # no tensor of its own in the graph
        return Recomputed.apply(strategy, STRATEGIES[way.backward or way.forward], geometry, values, *tensors)
    return strategy.forward(*others, cells if cast is None else cast, geometry)


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
