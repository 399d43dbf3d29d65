"""The compiled kernels of `csrc`: mixing and product in one go, on the CPU, in float32."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernelwarehouse.assemble import pointwise
from kernelwarehouse.assemble.build import GRAIN, load_native
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.layout import channels_last, visited
from kernelwarehouse.assemble.mixtures import attention_pairs, from_pairs
from kernelwarehouse.assemble.stored import Stored
from kernelwarehouse.assemble.strategy import Strategy


@lru_cache(maxsize=1024)
def _obstacle(geometry: Geometry) -> str | None:
    cell = geometry.partition.cell_shape
    if geometry.spatial_axes == 0:
        return "it is a linear layer"
    if geometry.groups != 1:
        return f"it has {geometry.groups} groups"
    if math.prod(cell[2:]) != 1:
        return f"its cells are {'x'.join(map(str, cell[2:]))} positions wide"
    if cell[0] % GRAIN or cell[1] % GRAIN:
        return f"its cells of {cell[0]}x{cell[1]} channels are no multiples of {GRAIN}"
    return None


def obstacle(x: Tensor, geometry: Geometry) -> str | None:
    """Why the compiled kernels cannot evaluate a layer on this input, or nothing."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return f"the input is {x.dtype} on {x.device.type}; float32 on cpu is wanted"
    if type(x) is not Tensor:
        return f"the input is a {type(x).__name__}, not a plain tensor"
    return _obstacle(geometry) or (None if load_native() else "the kernels could not be built, or are turned off")


@dataclass(frozen=True, eq=False)
class _Rows:
    """How positions map to rows of the padded input, channels last (see `csrc/ops.cpp`)."""

    targets: Tensor  # the row of every place of the input
    padded: int  # rows in all
    places: Tensor  # the row that each output position starts from
    shifts: Tensor  # what each kernel position adds


@lru_cache(maxsize=1024)
def _rows(geometry: Geometry, space: tuple[int, ...]) -> _Rows:
    padded = [size + 2 * pad for size, pad in zip(space, geometry.padding, strict=True)]
    pitches = [math.prod(padded[axis + 1 :]) for axis in range(len(padded))]

    def index(*axes: Tensor) -> Tensor:
        grid = torch.meshgrid(*(axis * pitch for axis, pitch in zip(axes, pitches, strict=True)), indexing="ij")
        return torch.stack(grid).sum(0).flatten()

    with torch.inference_mode(False):
        inside = [torch.arange(size) + pad for size, pad in zip(space, geometry.padding, strict=True)]
        outside = [
            torch.arange(size) * stride
            for size, stride in zip(geometry.output_size(space), geometry.stride, strict=True)
        ]
        shifts = [sum(reach * pitch for reach, pitch in zip(tap.reach, pitches, strict=True)) for tap in geometry.taps]
        return _Rows(index(*inside), math.prod(padded), index(*outside), torch.tensor(shifts))


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias, channels last where the input is."""
    ops = torch.ops.kernelwarehouse
    mixing = attention_pairs(attention, geometry).contiguous(), cells.contiguous()
    return _product(x, ops.forward_pointwise, ops.forward_taps, mixing, geometry)


def forward_basis(x: Tensor, hidden: Tensor, scale: Tensor, stored: Stored, geometry: Geometry) -> Tensor:
    """The same, mixed from bases (see `basis.py`): `hidden` is `[batch, h + 1]`, `scale` is `[batch, m]`."""
    ops = torch.ops.kernelwarehouse
    mixing = hidden, attention_pairs(scale.unsqueeze(2), geometry).contiguous(), *stored.parts
    return stored.scaled(_product(x, ops.forward_pointwise_basis, ops.forward_taps_basis, mixing, geometry))


def _product(
    x: Tensor,
    one_position: Callable[..., Tensor],
    several_positions: Callable[..., Tensor],
    mixing: tuple[Tensor | None, ...],
    geometry: Geometry,
) -> Tensor:
    if pointwise.geometry_obstacle(geometry) is None and not channels_last(x):
        return one_position(visited(x, geometry).contiguous(), *mixing)
    return by_rows(x, several_positions, mixing, geometry)


def by_rows(
    x: Tensor, operator: Callable[..., Tensor], mixing: tuple[Tensor | None, ...], geometry: Geometry
) -> Tensor:
    """Output positions are the rows of a product, and output channels lie along the vectors."""
    space = tuple(x.shape[2:])
    rows, out_size = _rows(geometry, space), geometry.output_size(space)
    tables = rows.targets, rows.padded, rows.places, rows.shifts
    if channels_last(x):
        out = operator(x.movedim(1, -1).contiguous().flatten(1, -2), *mixing, *tables, True)
        return out.unflatten(1, out_size).movedim(-1, 1)
    out = operator(x.contiguous(), *mixing, *tables, False)
    return out.view(x.shape[0], geometry.out_channels, *out_size)  # not len(x), which is a constant to a tracer


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
    rows, pairs = _rows(geometry, tuple(x.shape[2:])), attention_pairs(attention, geometry).contiguous()
    grad_x, grad_pairs, grad_cells = torch.ops.kernelwarehouse.backward_taps(
        grad.contiguous().flatten(2),
        x.contiguous().flatten(2),
        pairs,
        cells.flatten(2).contiguous(),
        rows.targets,
        rows.padded,
        rows.places,
        rows.shifts,
        max(geometry.stride) == 1,
        wants_input,
        None if total is None else total.flatten(2),
    )
    grad_input, grad_attention = grad_x.view(x.shape) if wants_input else None, from_pairs(grad_pairs, geometry)
    return grad_input, grad_attention, grad_cells.view(cells.shape) if total is None else total


STRATEGY = Strategy("native", forward, backward, obstacle, adds=True)
