"""How a kernel is cut into cells, and put together again."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kernelwarehouse.errors import PlanError


@dataclass(frozen=True)
class Partition:
    """The cut of a kernel `[out, in / groups, *k]` into `mixtures` pieces of `cell_shape`.

    Pieces are numbered with the spatial position slowest, then the output group, then the input group.
    A linear layer has no spatial axes. On each spatial axis the cell is 1 wide or as wide as the kernel.
    """

    kernel_shape: tuple[int, ...]
    cell_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        kernel, cell = self.kernel_shape, self.cell_shape
        if len(kernel) != len(cell) or len(kernel) < 2:
            raise PlanError(f"cell shape {cell} does not have the {len(kernel)} axes of the kernel {kernel}")
        for axis, (whole, part) in enumerate(zip(kernel, cell, strict=True)):
            if part < 1 or whole % part:
                raise PlanError(
                    f"kernel {kernel} cannot be split into cells {cell}: axis {axis} is {whole}, cell {part}"
                )
            if axis >= 2 and part not in (1, whole):
                raise PlanError(f"cell {cell} is {part} wide on spatial axis {axis - 2}; it must be 1 or {whole}")

    @property
    def cell_size(self) -> int:
        return math.prod(self.cell_shape)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Pieces per axis: output groups, input groups, then each spatial axis."""
        return tuple(whole // part for whole, part in zip(self.kernel_shape, self.cell_shape, strict=True))

    @property
    def out_groups(self) -> int:
        return self.counts[0]

    @property
    def in_groups(self) -> int:
        return self.counts[1]

    @cached_property
    def positions(self) -> int:
        """Spatial positions that are pieces of their own (1 without spatial partition)."""
        return math.prod(self.counts[2:])

    @cached_property
    def mixtures(self) -> int:
        """The paper's m."""
        return math.prod(self.counts)

    def split(self, kernel: Tensor) -> Tensor:
        """`[out, in / groups, *k]` -> `[mixtures, *cell_shape]`."""
        if tuple(kernel.shape) != self.kernel_shape:
            raise PlanError(
                f"kernel of shape {tuple(kernel.shape)} given where the partition is of {self.kernel_shape}"
            )
        axes = len(self.kernel_shape)
        pairs = [size for pair in zip(self.counts, self.cell_shape, strict=True) for size in pair]
        count_axes = [*range(4, 2 * axes, 2), 0, 2]
        cell_axes = list(range(1, 2 * axes, 2))
        return kernel.reshape(pairs).permute(count_axes + cell_axes).reshape(self.mixtures, *self.cell_shape)

    def join(self, pieces: Tensor) -> Tensor:
        """`[..., mixtures, *cell_shape]` -> `[..., out, in / groups, *k]`, the inverse of `split`."""
        axes = len(self.kernel_shape)
        lead = pieces.dim() - axes - 1
        batch = pieces.shape[:lead]
        grid = pieces.reshape(*batch, *self.counts[2:], self.out_groups, self.in_groups, *self.cell_shape)
        spatial = axes - 2
        order = [spatial, axes, spatial + 1, axes + 1]  # out group, cell out, in group, cell in
        for axis in range(spatial):
            order += [axis, axes + 2 + axis]
        return grid.permute(*range(lead), *(lead + axis for axis in order)).reshape(*batch, *self.kernel_shape)
