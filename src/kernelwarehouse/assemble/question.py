"""What decides which way is the fastest for a call."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from kernelwarehouse.assemble.geometry import Geometry


class Question(NamedTuple):
    """All that the time of a call depends on."""

    geometry: Geometry
    shape: tuple[int, ...]  # of the input
    dtype: torch.dtype
    tf32: bool  # whether products of float32 are rounded to TF32, on a GPU
    device: torch.device
    channels_last: bool
    threads: int  # on a CPU, else 0
    cells: int
    units: int  # of the hidden vector, where cells can be mixed through it and that saves multiply-adds; else 0
    basis: int  # units of a basis that is at hand, else 0
    kept: str  # how that basis is kept
    training: bool
    wants_input: bool  # whether training asks for the gradient of the input

    @property
    def positions(self) -> int:
        """Output positions of a sample."""
        linear = self.geometry.spatial_axes == 0
        return self.shape[1] if linear else math.prod(self.geometry.output_size(self.shape[2:]))

    def key(self) -> str:
        """The name of all calls that are alike: sizes of batch and image are rounded up to a half power of two."""
        geometry, partition = self.geometry, self.geometry.partition
        sliding = "".join(
            f" {name} {_times(sizes)}"
            for name, sizes, usual in (
                ("stride", geometry.stride, 1),
                ("padding", geometry.padding, 0),
                ("dilation", geometry.dilation, 1),
                ("groups", (geometry.groups,), 1),
            )
            if any(size != usual for size in sizes)
        )
        counts = ("units", self.units), (self.kept, self.basis)
        mixing = "".join(f" {name} {count}" for name, count in counts if count)
        layout = (" with tf32" if self.tf32 else "") + (" channels last" if self.channels_last else "")
        threads = f", {self.threads} threads" if self.threads else ""
        return (
            f"{_device_name(self.device)}{threads}, {str(self.dtype).removeprefix('torch.')}{layout}: "
            f"{_times(partition.kernel_shape)}{sliding} of {self.cells} cells {_times(partition.cell_shape)}{mixing}, "
            f"batch {_bucket(self.shape[0])}, {_bucket(self.positions)} positions, "
            f"{self._mode()}"
        )

    def _mode(self) -> str:
        if not self.training:
            return "inference"
        return "training" if self.wants_input else "training, no gradient of the input"


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _bucket(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << max(0, size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


@lru_cache
def _device_name(device: torch.device) -> str:
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
