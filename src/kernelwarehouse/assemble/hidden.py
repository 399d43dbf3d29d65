"""Mixing through the hidden vector of the attention, in training too.

Before normalisation, logits are affine in the hidden vector, so that attentions are products of two small matrices:
`attention[b, i, :] = coefficients[b, i, :] @ factors[i, :, :]` (see `Attention.factored`), with r units in between. The
factors mix the cells into r kernels that do not depend on the sample, and the coefficients mix those: `r n + batch r`
multiply-adds for every number of a kernel instead of `batch n`, in forward and in each of the three steps of backward.

The kernels of the units are made for some output channels at a time and for as many mixtures as possible, which makes
large products; those of the samples for one mixture and a few samples, so that they stay in cache.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble.blocks import block_size, even, ranges
from kernelwarehouse.assemble.context import recorded
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.mixtures import cells_by_position
from kernelwarehouse.assemble.runs import Run, Runs
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.assemble.sums import add_product, new_sum
from kernelwarehouse.attention import Attention

# Numbers of the units' kernels and of the samples' kernels that are alive at once on a CPU, and of how many samples
# these are at least.
_UNITS = 8 << 20
_KERNELS = 1 << 20
_SAMPLES = 16


def obstacle(attention: Attention | None) -> str | None:
    """Why a layer cannot be mixed through the hidden vector of its attention, or nothing."""
    if attention is None:
        return "its attentions are given, not the branch that they come from"
    if recorded():
        return "a trace would keep the size of this batch"
    shape = attention.shape
    if shape.function != "caf":
        return f"its attention function is {shape.function!r}; 'caf' is wanted"
    if shape.own_cells_only:
        return "its mixtures see their own cells only"
    if not isinstance(attention.fc2, nn.Linear):
        return f"the last layer of its attention is a {type(attention.fc2).__name__}, not a linear one"
    for name, part in (("attention", attention), ("attention.fc2", attention.fc2)):
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return f"a hook wants to see what its {name} computes"
    return None


def saves(batch: int, attention: Attention) -> bool:
    """Whether there are fewer multiply-adds than in mixing all cells for every sample."""
    shape = attention.shape
    return (batch + shape.cells) * shape.units < batch * shape.cells


@dataclass(frozen=True)
class _Block:
    """Some output channels of the cells of some output groups at all positions."""

    inner: int  # position inside a cell
    out_groups: range
    channels: range


@dataclass(frozen=True)
class _Piece:
    """A part of a block: one mixture, a few of the channels, some samples."""

    run: Run
    mixture: int
    unit: tuple[int, slice, slice]  # where its numbers are among the units of the block
    samples: slice
    seen: slice  # input channels
    out: slice  # output channels

    @property
    def begins(self) -> bool:
        return self.samples.start == 0


def _scaled(some: range, size: int) -> slice:
    return slice(some.start * size, some.stop * size)


class _Layer:
    """The inputs of one call, and how they are cut."""

    def __init__(self, x: Tensor, coefficients: Tensor, factors: Tensor, cells: Tensor, geometry: Geometry) -> None:
        self.geometry, self.partition, self.batch = geometry, geometry.partition, x.shape[0]
        self.input = Runs(x, geometry)
        self.coefficients = coefficients.transpose(0, 1).contiguous()  # [m, batch, r]
        self.factors, self.cells = factors, cells_by_position(cells, self.partition)
        self.cell_out, self.cell_in = self.partition.cell_shape[:2]
        kernels, units = block_size(x.device, _KERNELS), block_size(x.device, _UNITS)
        self.samples = even(self.batch, max(_SAMPLES, kernels // (self.cell_out * self.cell_in)))
        self.channels = even(self.cell_out, kernels // (self.samples * self.cell_in))
        numbers = self.partition.positions * self.partition.in_groups * factors.shape[1] * self.cell_in  # of a channel
        self.block_groups = even(self.partition.out_groups, units // (numbers * self.cell_out))
        self.block_channels = even(self.cell_out, units // numbers)
        # Memory that is used again and again: fresh memory costs as much as what is computed in it.
        self.kernels = x.new_empty(self.samples * self.channels * self.cell_in)
        self.units = x.new_empty(numbers * self.block_groups * self.block_channels)

    def blocks(self) -> Iterator[_Block]:
        for inner in range(len(self.cells)):
            for out_groups in ranges(0, self.partition.out_groups, self.block_groups):
                for channels in ranges(0, self.cell_out, self.block_channels):
                    yield _Block(inner, out_groups, channels)

    def pieces(self, block: _Block) -> Iterator[_Piece]:
        partition, in_groups = self.partition, self.partition.in_groups
        for run in self.input.runs:
            if run.inner != block.inner:
                continue
            for out_group in block.out_groups:
                row = run.position * partition.out_groups + out_group
                block_row = run.position * len(block.out_groups) + out_group - block.out_groups.start
                for channels, group in self._channels(block, out_group):
                    out = slice(out_group * self.cell_out + channels.start, out_group * self.cell_out + channels.stop)
                    inside = range(channels.start - block.channels.start, channels.stop - block.channels.start)
                    for index in range(in_groups):
                        unit = block_row * in_groups + index, slice(None), _scaled(inside, self.cell_in)
                        part = group * in_groups + index
                        seen = _scaled(range(part, part + 1), self.cell_in)
                        for some in ranges(0, self.batch, self.samples):
                            samples = slice(some.start, some.stop)
                            yield _Piece(run, row * in_groups + index, unit, samples, seen, out)

    def _channels(self, block: _Block, out_group: int) -> Iterator[tuple[range, int]]:
        """Channels that are taken at once, none of two groups, and their group."""
        group_out, before = self.geometry.out_channels // self.geometry.groups, out_group * self.cell_out
        start = block.channels.start
        while start < block.channels.stop:
            group = (before + start) // group_out
            stop = min(start + self.channels, block.channels.stop, (group + 1) * group_out - before)
            yield range(start, stop), group
            start = stop

    def factors_of(self, block: _Block, factors: Tensor) -> Tensor:
        """The part `[positions, out groups, in groups, r, n]` of the factors, or of their gradients."""
        shape = self.partition.positions, self.partition.out_groups, self.partition.in_groups
        return factors.unflatten(0, shape)[:, block.out_groups.start : block.out_groups.stop]

    def cells_of(self, block: _Block, cells: Tensor) -> Tensor:
        """The part `[n, numbers]` of the cells, or of their gradients."""
        return cells[block.inner][:, _scaled(block.channels, self.cell_in)]

    def mix_units(self, factors: Tensor, cells: Tensor) -> Tensor:
        """`[mixtures of the block, r, numbers]`."""
        units = self.units[: len(factors) * cells.shape[1]].view(len(factors), -1)
        return torch.mm(factors, cells, out=units).unflatten(0, (-1, self.factors.shape[1]))

    def mix(self, piece: _Piece, units: Tensor) -> Tensor:
        """The kernels of some samples, `[samples, out, in]`; valid until the next call."""
        chosen, unit = self.coefficients[piece.mixture, piece.samples], units[piece.unit]
        kernels = self.kernels[: len(chosen) * unit.shape[1]].view(len(chosen), -1)
        return torch.mm(chosen, unit, out=kernels).unflatten(1, (-1, self.cell_in))

    def product(self, grad_out: Tensor, seen: Tensor) -> Tensor:
        """The gradients of kernels, `[samples, numbers]`, in the memory of the kernels."""
        shape = len(grad_out), grad_out.shape[1], seen.shape[2]
        return torch.bmm(grad_out, seen, out=self.kernels[: math.prod(shape)].view(shape)).flatten(1)


def forward(x: Tensor, coefficients: Tensor, factors: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias; coefficients are `[batch, m, r]`, factors `[m, r, n]`."""
    layer = _Layer(x, coefficients, factors, cells, geometry)
    out = layer.input.new_output()
    for block in layer.blocks():
        block_factors = layer.factors_of(block, factors).flatten(0, -2)
        units = layer.mix_units(block_factors, layer.cells_of(block, layer.cells))
        for piece in layer.pieces(block):
            seen = layer.input.phases[piece.run.phase][piece.samples, piece.seen, piece.run.places]
            add_product(out[piece.samples, piece.out, : layer.input.length], layer.mix(piece, units), seen)
    return layer.input.narrow(out.to(x.dtype))


def backward(
    grad: Tensor,
    x: Tensor,
    coefficients: Tensor,
    factors: Tensor,
    cells: Tensor,
    geometry: Geometry,
    wants_input: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of input, coefficients, factors and cells; kernels are mixed again, block by block."""
    layer = _Layer(x, coefficients, factors, cells, geometry)
    phases, grad = layer.input.phases, layer.input.widen(grad)
    grad_phases = {name: new_sum(phase) for name, phase in phases.items()} if wants_input else {}
    grad_coefficients, grad_factors = new_sum(layer.coefficients), new_sum(factors)
    grad_cells, grad_units = (torch.empty_like(some, dtype=grad_factors.dtype) for some in (layer.cells, layer.units))
    for block in layer.blocks():
        block_factors, block_cells = layer.factors_of(block, factors).flatten(0, -2), layer.cells_of(block, layer.cells)
        units = layer.mix_units(block_factors, block_cells)
        grad_block = grad_units[: units.numel()].view(units.shape)
        for piece in layer.pieces(block):
            samples, place = piece.samples, (piece.samples, piece.seen, piece.run.places)
            grad_out = grad[samples, piece.out]
            if wants_input:
                kernels = layer.mix(piece, units)
                add_product(grad_phases[piece.run.phase][place], kernels.transpose(1, 2), grad_out)
            grad_kernels = layer.product(grad_out, phases[piece.run.phase][place].transpose(1, 2))
            add_product(grad_coefficients[piece.mixture, samples], grad_kernels, units[piece.unit].t())
            chosen = layer.coefficients[piece.mixture, samples]
            add_product(grad_block[piece.unit], chosen.t(), grad_kernels, first=piece.begins)
        flat, part = grad_block.flatten(0, 1).to(x.dtype), layer.factors_of(block, grad_factors)
        part += (flat @ block_cells.t()).view(part.shape)
        add_product(layer.cells_of(block, grad_cells), block_factors.t(), flat, first=block.out_groups.start == 0)
    grad_x = layer.input.join(grad_phases) if wants_input else None
    grad_mixing = grad_coefficients.transpose(0, 1).to(x.dtype), grad_factors.to(x.dtype)
    return grad_x, *grad_mixing, grad_cells.to(x.dtype).permute(1, 2, 0).reshape(cells.shape)


STRATEGY = Strategy("hidden", forward, backward, mixing="factors")
