"""Batched matrix products, one for every kernel position, over shifted views of the input.

The rows of the attentions are ordered so that mixing gives, for one kernel position, the stack of matrices
`[samples, out, cell in]` that the product needs: nothing is permuted afterwards, and only the kernels of one position
and of one chunk of samples exist at a time. A point-wise or linear layer is the case of a single position.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.partition import Partition

# Assembled numbers alive at once. Larger temporaries are mapped and page-faulted anew by the allocator on every call.
_BLOCK = 4 << 20


@dataclass(frozen=True)
class _Tap:
    """One position of the kernel: the part of the padded input it sees, and where its numbers come from."""

    window: tuple[slice, ...]
    mixture: int  # spatial index among the mixtures
    inner: int  # position inside a cell (0 where the cells are one position wide)


def _taps(geometry: Geometry, out_size: tuple[int, ...]) -> list[_Tap]:
    partition = geometry.partition
    taps = []
    for position in product(*map(range, geometry.kernel_size)):
        window, mixture, inner = [], 0, 0
        for axis, at in enumerate(position):
            start, stride = at * geometry.dilation[axis], geometry.stride[axis]
            window.append(slice(start, start + (out_size[axis] - 1) * stride + 1, stride))
            count, width = partition.counts[2 + axis], partition.cell_shape[2 + axis]
            mixture = mixture * count + at // width
            inner = inner * width + at % width
        taps.append(_Tap(tuple(window), mixture, inner))
    return taps


def _chunks(batch: int, sample: int) -> Iterator[slice]:
    """Slices of the batch whose matrices of one position (`sample` numbers each) fit a block."""
    step = max(1, _BLOCK // sample)
    for start in range(0, batch, step):
        yield slice(start, min(start + step, batch))


def _attention_rows(attention: Tensor, partition: Partition) -> Tensor:
    """`[batch, m, n]` -> `[positions, in groups, batch, out groups, n]`."""
    grid = attention.unflatten(1, (partition.positions, partition.out_groups, partition.in_groups))
    return grid.permute(1, 3, 0, 2, 4).contiguous()


def cells_by_position(cells: Tensor, partition: Partition) -> Tensor:
    """`[n, *cell]` -> `[positions inside a cell, n, cell out * cell in]`."""
    flat = cells.reshape(cells.shape[0], partition.cell_shape[0] * partition.cell_shape[1], -1)
    return flat.permute(2, 0, 1).contiguous()


class _Input:
    """The padded input, given as `[samples * groups, in / groups, positions]` for any tap and chunk of samples."""

    def __init__(self, x: Tensor, geometry: Geometry) -> None:
        self.linear = geometry.spatial_axes == 0
        self.geometry = geometry
        self.out_size = geometry.output_size(tuple(x.shape[2:]))
        edges = [edge for pad in reversed(geometry.padding) for edge in (pad, pad)]
        self.padded = F.pad(x, edges) if any(edges) else x

    def columns(self, chunk: slice, tap: _Tap) -> Tensor:
        if self.linear:
            return self.padded[chunk].transpose(1, 2)
        seen = self.padded[(chunk, slice(None), *tap.window)]
        return seen.reshape(seen.shape[0] * self.geometry.groups, seen.shape[1] // self.geometry.groups, -1)

    def matrices(self, stacked: Tensor) -> Tensor:
        """Outputs or their gradients `[samples, out, *space]` as `[samples * groups, out / groups, positions]`."""
        if self.linear:
            return stacked.transpose(1, 2)
        groups = self.geometry.groups
        return stacked.reshape(stacked.shape[0] * groups, stacked.shape[1] // groups, -1)


def _mix(rows: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """Rows `[in groups, samples, out groups, n]` -> `[in groups, samples * groups, out / groups, cell in]`."""
    in_groups, samples = rows.shape[:2]
    mixed = torch.mm(rows.flatten(0, 2), cells)
    return mixed.view(in_groups, samples * geometry.groups, -1, geometry.partition.cell_shape[1])


def forward(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias."""
    partition, source = geometry.partition, _Input(x, geometry)
    cell_in, kernel_rows = partition.cell_shape[1], geometry.out_channels * partition.kernel_shape[1]
    rows, cell_stack = _attention_rows(attention, partition), cells_by_position(cells, partition)
    shape = (x.shape[1], geometry.out_channels) if source.linear else (geometry.out_channels, *source.out_size)
    out = x.new_empty(x.shape[0], *shape)
    for chunk in _chunks(x.shape[0], kernel_rows):
        product_out = source.matrices(out[chunk])
        started = False
        for tap in _taps(geometry, source.out_size):
            kernels = _mix(rows[tap.mixture][:, chunk], cell_stack[tap.inner], geometry)
            columns = source.columns(chunk, tap)
            for group, kernel in enumerate(kernels):
                seen = columns[:, group * cell_in : (group + 1) * cell_in]
                _accumulate(product_out, kernel, seen, started)
                started = True
    return out


def _accumulate(out: Tensor, kernel: Tensor, columns: Tensor, started: bool) -> None:
    """`out (+)= kernel @ columns`; a transposed `out` (of a linear layer) is written through its transpose."""
    if out.is_contiguous():
        left, right = kernel, columns
    else:
        out, left, right = out.transpose(1, 2), columns.transpose(1, 2), kernel.transpose(1, 2)
    if started:
        out.baddbmm_(left, right)
    else:
        torch.bmm(left, right, out=out)


def backward(
    grad: Tensor, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry, wants_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input, attentions and cells; kernels are mixed again, position by position."""
    partition, source = geometry.partition, _Input(x, geometry)
    cell_in, kernel_rows = partition.cell_shape[1], geometry.out_channels * partition.kernel_shape[1]
    rows, cell_stack = _attention_rows(attention, partition), cells_by_position(cells, partition)
    grad_rows, grad_cells = torch.zeros_like(rows), torch.zeros_like(cell_stack)
    grad_padded = torch.zeros_like(source.padded) if wants_input else None
    grad = grad.contiguous()
    for chunk in _chunks(x.shape[0], kernel_rows):
        grad_out = source.matrices(grad[chunk])
        for tap in _taps(geometry, source.out_size):
            columns, picked = source.columns(chunk, tap), rows[tap.mixture][:, chunk]
            grad_kernels = torch.stack(
                [torch.bmm(grad_out, part.transpose(1, 2)) for part in columns.split(cell_in, dim=1)]
            ).view(-1, cell_stack.shape[2])
            grad_rows[tap.mixture][:, chunk] += (grad_kernels @ cell_stack[tap.inner].t()).view(picked.shape)
            grad_cells[tap.inner].addmm_(picked.flatten(0, 2).t(), grad_kernels)
            if grad_padded is not None:
                kernels = _mix(picked, cell_stack[tap.inner], geometry)
                grad_columns = torch.cat([torch.bmm(kernel.transpose(1, 2), grad_out) for kernel in kernels], dim=1)
                _scatter(grad_padded, grad_columns, chunk, tap, source)
    grad_attention = grad_rows.permute(2, 0, 3, 1, 4).reshape(attention.shape)
    grad_input = None if grad_padded is None else _unpad(grad_padded, x, geometry)
    return grad_input, grad_attention, grad_cells.permute(1, 2, 0).reshape(cells.shape)


def _scatter(grad_padded: Tensor, grad_columns: Tensor, chunk: slice, tap: _Tap, source: _Input) -> None:
    if source.linear:
        grad_padded[chunk] += grad_columns.transpose(1, 2)
    else:
        target = grad_padded[(chunk, slice(None), *tap.window)]
        target += grad_columns.reshape(target.shape)


def _unpad(grad_padded: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    inside = tuple(slice(pad, pad + size) for pad, size in zip(geometry.padding, x.shape[2:], strict=False))
    return grad_padded[(slice(None), slice(None), *inside)]
