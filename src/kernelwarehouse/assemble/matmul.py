"""Batched matrix products, one for every kernel position, over shifted views of the input.

The rows of the attentions are ordered so that mixing gives, for one kernel position, the stack of matrices
`[samples, out, cell in]` that the product needs: nothing is permuted afterwards, and only the kernels of one position
and of one chunk of samples exist at a time. A point-wise or linear layer is the case of a single position.
"""

import torch
from torch import Tensor

from kernelwarehouse.assemble.blocks import block_size, chunks
from kernelwarehouse.assemble.geometry import Geometry, Tap
from kernelwarehouse.assemble.layout import channels_last, laid_out, with_padding
from kernelwarehouse.assemble.mixtures import cells_by_position, grid
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.assemble.sums import add_product, new_sum
from kernelwarehouse.partition import Partition
from kernelwarehouse.shared_gradient import sum_dtype


def _attention_rows(attention: Tensor, partition: Partition) -> Tensor:
    """`[batch, m, n]` -> `[positions, in groups, batch, out groups, n]`."""
    return grid(attention, partition).permute(1, 3, 0, 2, 4).contiguous()


class _Input:
    """The padded input, given as `[samples * groups, in / groups, positions]` for any tap and chunk of samples."""

    def __init__(self, x: Tensor, geometry: Geometry) -> None:
        self.linear = geometry.spatial_axes == 0
        self.geometry = geometry
        self.out_size = geometry.output_size(tuple(x.shape[2:]))
        self.padded = with_padding(x, geometry)

    def columns(self, chunk: slice, tap: Tap) -> Tensor:
        if self.linear:
            return self.padded[chunk].transpose(1, 2)
        seen = self.padded[(chunk, slice(None), *self.geometry.window(tap, self.out_size))]
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
    several = len(geometry.taps) * partition.in_groups > 1
    out = x.new_empty(x.shape[0], *shape, dtype=sum_dtype(x.dtype) if several else x.dtype)
    for chunk in chunks(x.shape[0], kernel_rows, block_size(x.device)):
        product_out = source.matrices(out[chunk])
        started = False
        for tap in geometry.taps:
            kernels = _mix(rows[tap.position][:, chunk], cell_stack[tap.inner], geometry)
            columns = source.columns(chunk, tap)
            for group, kernel in enumerate(kernels):
                seen = columns[:, group * cell_in : (group + 1) * cell_in]
                _accumulate(product_out, kernel, seen, started)
                started = True
    return out.to(x.dtype) if source.linear else laid_out(out.to(x.dtype), channels_last(x))


def _accumulate(out: Tensor, kernel: Tensor, columns: Tensor, started: bool) -> None:
    """`out (+)= kernel @ columns`; a transposed `out` (of a linear layer) is written through its transpose."""
    if out.is_contiguous():
        left, right = kernel, columns
    else:
        out, left, right = out.transpose(1, 2), columns.transpose(1, 2), kernel.transpose(1, 2)
    add_product(out, left, right, first=not started)


def backward(
    grad: Tensor, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry, wants_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input, attentions and cells; kernels are mixed again, position by position."""
    partition, source = geometry.partition, _Input(x, geometry)
    cell_in, kernel_rows = partition.cell_shape[1], geometry.out_channels * partition.kernel_shape[1]
    rows, cell_stack = _attention_rows(attention, partition), cells_by_position(cells, partition)
    grad_rows, grad_cells = new_sum(rows), new_sum(cell_stack)
    grad_padded = new_sum(source.padded) if wants_input else None
    grad = grad.contiguous()
    for chunk in chunks(x.shape[0], kernel_rows, block_size(x.device)):
        grad_out = source.matrices(grad[chunk])
        for tap in geometry.taps:
            columns, picked = source.columns(chunk, tap), rows[tap.position][:, chunk]
            grad_kernels = _kernel_gradients(grad_out, columns, cell_in).view(-1, cell_stack.shape[2])
            grad_rows[tap.position][:, chunk].add_((grad_kernels @ cell_stack[tap.inner].t()).view(picked.shape))
            add_product(grad_cells[tap.inner], picked.flatten(0, 2).t(), grad_kernels)
            del grad_kernels  # as large as what comes now
            if grad_padded is not None:
                kernels = _mix(picked, cell_stack[tap.inner], geometry)
                parts = [torch.bmm(kernel.transpose(1, 2), grad_out) for kernel in kernels]
                _scatter(grad_padded, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), chunk, tap, source)
                del kernels
    grad_attention = grad_rows.to(x.dtype).permute(2, 0, 3, 1, 4).reshape(attention.shape)
    grad_input = None if grad_padded is None else _unpad(grad_padded, x, geometry).to(x.dtype)
    if grad_input is not None and not source.linear and channels_last(x):
        grad_input = laid_out(grad_input, last=True)
    return grad_input, grad_attention, grad_cells.to(cells.dtype).permute(1, 2, 0).reshape(cells.shape)


def _kernel_gradients(grad_out: Tensor, columns: Tensor, cell_in: int) -> Tensor:
    """`[in groups, samples * groups, out / groups, cell in]`."""
    found = columns.new_empty(columns.shape[1] // cell_in, *grad_out.shape[:2], cell_in)
    for place, part in zip(found, columns.split(cell_in, dim=1), strict=True):
        torch.bmm(grad_out, part.transpose(1, 2), out=place)
    return found


def _scatter(grad_padded: Tensor, grad_columns: Tensor, chunk: slice, tap: Tap, source: _Input) -> None:
    if source.linear:
        grad_padded[chunk].add_(grad_columns.transpose(1, 2))
    else:
        target = grad_padded[(chunk, slice(None), *source.geometry.window(tap, source.out_size))]
        target += grad_columns.reshape(target.shape)


def _unpad(grad_padded: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    inside = tuple(slice(pad, pad + size) for pad, size in zip(geometry.padding, x.shape[2:], strict=False))
    return grad_padded[(slice(None), slice(None), *inside)]


STRATEGY = Strategy("matmul", forward, backward)
