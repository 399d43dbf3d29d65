"""Attentions and cells in the orders that products want."""

from torch import Tensor

from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.partition import Partition


def grid(attention: Tensor, partition: Partition) -> Tensor:
    """`[batch, m, n]` -> `[batch, positions, out groups, in groups, n]`."""
    return attention.unflatten(1, (partition.positions, partition.out_groups, partition.in_groups))


def attention_pairs(attention: Tensor, geometry: Geometry) -> Tensor:
    """`[batch, m, n]` -> `[batch, out groups, positions * in groups, n]`."""
    partition = geometry.partition
    if partition.out_groups == 1 or partition.positions == 1:  # already in order
        return attention.reshape(attention.shape[0], partition.out_groups, -1, attention.shape[2])
    return grid(attention, partition).transpose(1, 2).flatten(2, 3)


def from_pairs(pairs: Tensor, geometry: Geometry) -> Tensor:
    """The other way round."""
    partition = geometry.partition
    parts = pairs.unflatten(2, (partition.positions, partition.in_groups)).transpose(1, 2)
    return parts.reshape(pairs.shape[0], partition.mixtures, pairs.shape[3])


def cells_by_position(cells: Tensor, partition: Partition) -> Tensor:
    """`[n, *cell]` -> `[positions inside a cell, n, cell out * cell in]`."""
    flat = cells.reshape(cells.shape[0], partition.cell_shape[0] * partition.cell_shape[1], -1)
    return flat.permute(2, 0, 1).contiguous()
