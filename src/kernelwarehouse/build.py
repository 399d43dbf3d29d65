"""Plan -> modules: warehouses with their first cells, attentions, layers."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kernelwarehouse.assignment import beta
from kernelwarehouse.attention import Attention
from kernelwarehouse.plan import PlannedWarehouse
from kernelwarehouse.warehouse import Warehouse, seed_cells

Initializer = Callable[[Tensor], object]
"""Fills a kernel in place, such as `torch.nn.init.kaiming_normal_`."""


kaiming_normal: Initializer = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
"""How static convolutions start, fan_out of the whole kernel."""


def build_warehouse(
    planned: PlannedWarehouse, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Warehouse:
    """An empty warehouse."""
    return Warehouse(planned.name, planned.cells, planned.cell_shape, device, dtype)


def build_attentions(
    planned: PlannedWarehouse, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> list[Attention]:
    """The attention branches of all layers of a warehouse."""
    attentions = []
    for index, ranges in enumerate(planned.starts()):
        starts = None if planned.start == "none" else beta(ranges, planned.cells)
        attentions.append(Attention(planned.attention_shape(index), starts, device, dtype))
    return attentions


@torch.no_grad()
def seed_from_kernels(warehouse: Warehouse, planned: PlannedWarehouse, kernels: Sequence[Tensor | None]) -> None:
    """Give the cells the values under which the layers, at temperature 1, come nearest to their static kernels.

    With a whole budget of 1 or more and a cell for every mixture they are met exactly. Cells that no mixture starts
    from are drawn anew, as wide as the kernel of the layer that claims them. With fewer cells than mixtures, a cell
    becomes the piece of the mixture that starts from it: the other mixtures are zero at temperature 1 whatever the
    cells are, so no other choice is nearer to the static kernel. The cells of a layer without a kernel are as new.
    """

    for index, kernel in enumerate(kernels):
        alike = kaiming_normal if kernel is None else partial(nn.init.normal_, std=float(kernel.std(correction=0)))
        _draw_claimed(warehouse.cells, planned, index, alike)
    # Without a start strategy there is nothing to meet, but trained values are still the better cells.
    starts = planned.starts("one_to_one" if planned.start == "none" else None)
    pieces, ranges = [], []
    for partition, kernel, layer_ranges in zip(planned.partitions, kernels, starts, strict=True):
        if kernel is not None:
            pieces.append(partition.split(kernel))
            ranges += layer_ranges
    seed_cells(warehouse.cells, torch.cat(pieces), ranges)


@torch.no_grad()
def initialise(warehouse: Warehouse, planned: PlannedWarehouse, initializer: Initializer) -> None:
    """Draw the cells of every layer as its static kernel would be."""
    for index in range(len(planned.layers)):
        _draw_claimed(warehouse.cells, planned, index, initializer)


def _draw_claimed(cells: Tensor, planned: PlannedWarehouse, index: int, initializer: Initializer) -> None:
    """Fill the cells that a layer claims with the pieces of whole kernels.

    With b cells a mixture, b kernels are drawn, and piece i of the j-th becomes cell `i * b + j` of the layer.
    """
    claim, partition = planned.claims[index], planned.partitions[index]
    if not claim:
        return
    kernels = math.ceil(len(claim) / partition.mixtures)
    drawn = []
    for _ in range(kernels):
        kernel = torch.empty(partition.kernel_shape, device=cells.device, dtype=cells.dtype)
        initializer(kernel)
        drawn.append(partition.split(kernel))
    pieces = torch.stack(drawn, 1).flatten(0, 1)
    chosen = torch.arange(len(claim), device=cells.device) * len(pieces) // len(claim)
    cells[claim.start : claim.stop] = pieces[chosen]
