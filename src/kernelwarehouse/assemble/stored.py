"""How a basis is stored: with how many bits for a number, and in which order.

A basis is large, and a few samples wait for it to come from memory. Compiled kernels read one that takes less: whole
multiples of a step, which every cell of the basis has for itself, in 24 bits or, compact, in 16. Output channels are
brought to one scale before, so that small ones lose nothing beside large ones, and outputs back to their own at the
end. A number of 24 bits is off by at most 2^-23 of the largest one of its output channel: about what float32 itself
makes of that largest one. Only weights that are thousands of times smaller than others of their output channel, and
count because their inputs are as much larger, would lose by that. The first 16 bits and the last eight lie in two
tensors.

Compiled kernels take a basis in one of two orders (`csrc/basis.h`): as it is made, or in panels, in the order in which
kernels of several positions are multiplied, so that it is read from front to end. A single sample needs half of the
units, as the ReLU sets the others to 0, and saves the reading of them in the first order only; several samples together
need nearly all. They compute more for every number that is read, and find those in panels as they are, or in 16 bits.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernelwarehouse.assemble.build import panel_width
from kernelwarehouse.assemble.geometry import Geometry


@dataclass(frozen=True, eq=False)
class Stored:
    """The numbers of a basis `[out groups, positions * in groups, h + 1, *cell]`."""

    numbers: Tensor
    low: Tensor | None = None  # the last eight of 24 bits
    steps: Tensor | None = None  # [out groups, positions * in groups, h + 1], of whole numbers
    scales: Tensor | None = None  # [out groups, cell out], of whole numbers
    panels: bool = False

    @staticmethod
    def of(basis: Tensor, bits: int | None = None, panels: bool = False) -> "Stored":
        """A basis as whole numbers of so many bits, 16 or 24, or as it is; the one given may be changed.

        It stays as it is, too, where some numbers are not finite.
        """
        if bits not in (None, 16, 24) or (bits == 24 and panels):
            raise ValueError(f"bits is {bits}; 16, None or, without panels, 24 is wanted")
        found = None if bits is None else _whole_numbers(basis, bits)
        stored = Stored(basis) if found is None else found
        return replace(stored, numbers=make_panels(stored.numbers), panels=True) if panels else stored

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What compiled kernels read."""
        return self.numbers, self.low, self.steps

    @property
    def kind(self) -> str:
        """What files of choices call it."""
        kind = "basis" if self.steps is None else "compact basis" if self.low is None else "24-bit basis"
        return f"{kind} in panels" if self.panels else kind

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.numbers, self.low, self.steps, self.scales) if part is not None)

    def basis(self, geometry: Geometry) -> Tensor:
        """What this was made from, as far as it is kept."""
        numbers = from_panels(self.numbers, geometry) if self.panels else self.numbers
        if self.steps is None or self.scales is None:
            return numbers
        whole = numbers.to(self.steps.dtype)
        if self.low is not None:
            whole = whole.mul_(256).add_(self.low)
        return whole.mul_(_beside(self.steps, whole)).mul_(_beside(self.scales[:, None, None], whole))

    def scaled(self, out: Tensor) -> Tensor:
        """What compiled kernels make of it, `[batch, out channels, *space]`, each channel brought to its scale."""
        return out if self.scales is None else out.mul_(self.scales.view(-1, *[1] * (out.dim() - 2)))


def stored_bytes(cells: Tensor, geometry: Geometry, units: int, bits: int | None) -> int:
    """What the basis of a layer takes, whose hidden vector has so many units (h + 1)."""
    partition = geometry.partition
    kept = units * partition.mixtures
    if bits is None:
        return kept * partition.cell_size * cells.element_size()
    return kept * partition.cell_size * bits // 8 + 4 * (kept + geometry.out_channels)


def _whole_numbers(basis: Tensor, bits: int) -> Stored | None:
    """Not in panels; nothing where there are numbers that are not finite."""
    inside = tuple(range(4, basis.dim()))
    largest = torch.linalg.vector_norm(basis, math.inf, (1, 2, *inside))  # of every output channel
    if not largest.isfinite().all():
        return None
    scales = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(max=127))  # which round nothing
    steps, most = basis.new_empty(basis.shape[:3]), 2 ** (bits - 1) - 1
    high = torch.empty_like(basis, dtype=torch.int16)
    low = torch.empty_like(basis, dtype=torch.uint8) if bits == 24 else None
    for at in itertools.product(*map(range, basis.shape[:2])):  # a copy of all would be too much memory
        mixture = basis[at] / _beside(scales[at[0]], basis[at][0])
        steps[at] = mixture.flatten(1).abs().amax(1) / most
        mixture /= _beside(steps[at].masked_fill(steps[at] == 0, 1), mixture)
        multiples = mixture.round_().clamp_(-most, most).to(torch.int32)  # rounding had gone one too far
        if low is not None:
            low[at] = (multiples & 255).to(torch.uint8)
            multiples >>= 8
        high[at] = multiples.to(torch.int16)
    return Stored(high, low, steps, scales)


def _beside(few: Tensor, many: Tensor) -> Tensor:
    """With axes of 1 at the end, as many as there are of the other."""
    return few[(..., *[None] * (many.dim() - few.dim()))]


def make_panels(basis: Tensor) -> Tensor:
    """A basis in panels, `[out groups, positions * in groups, panel, input channel, h + 1, output channel]`.

    It takes the place of the one that is given: a second one would be too much memory.
    """
    (units, out, ins), width = basis.shape[2:5], panel_width()
    for mixture in basis.view(-1, units, out, ins):
        ordered = mixture.unflatten(1, (-1, width)).permute(1, 3, 0, 2).contiguous()
        mixture.view(ordered.shape).copy_(ordered)
    return basis.view(*basis.shape[:2], out // width, ins, units, width)


def from_panels(panels: Tensor, geometry: Geometry) -> Tensor:
    """The basis that `make_panels` was given."""
    return panels.permute(0, 1, 4, 2, 5, 3).reshape(*panels.shape[:2], panels.shape[4], *geometry.partition.cell_shape)
