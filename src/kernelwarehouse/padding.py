"""Batches of images of several sizes: what is image and what is padding, for layers whose kernels come from a mean.

Images that are padded to one size lie in the upper left corners of their batch. A dynamic layer makes the kernels of an
image from the mean of its input; were the padding part of that mean, the kernels of an image would depend on the images
beside it. Inside `padded_batch`, the mean is that over the image alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from kernelwarehouse.errors import ShapeError


class PaddedBatch:
    """The sizes of the images of a batch, and the size to which they are padded: height, width."""

    def __init__(self, sizes: Sequence[tuple[int, int]], padded: tuple[int, int]) -> None:
        for height, width in sizes:
            if not (0 < height <= padded[0] and 0 < width <= padded[1]):
                raise ShapeError(f"an image of {height} x {width} cannot lie in a batch padded to {padded}")
        self.sizes, self.padded = tuple(sizes), padded
        self._shares: dict[tuple[int, int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def shares(self, like: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """`[batch, height]` and `[batch, width]`: what every row and column of a feature map adds to the mean.

        A position belongs to the image if any of its pixels does. Both are kept apart because float16 has no number for
        their product, in large maps.
        """
        key = (height, width, like.device, like.dtype)
        if key not in self._shares:
            self._shares[key] = (self._along(0, height).to(like), self._along(1, width).to(like))
        return self._shares[key]

    def _along(self, axis: int, length: int) -> Tensor:
        """`[batch, length]`: 1 / count for the positions of the image, 0 for the padding."""
        counts = [-(-size[axis] * length // self.padded[axis]) for size in self.sizes]
        inside = torch.arange(length, device="cpu") < torch.tensor(counts, device="cpu")[:, None]
        return inside / torch.tensor(counts, device="cpu")[:, None]


_BATCH: ContextVar[PaddedBatch | None] = ContextVar("kernelwarehouse_padded_batch", default=None)


@contextmanager
def padded_batch(sizes: Sequence[tuple[int, int]], padded: tuple[int, int]) -> Iterator[None]:
    """Let dynamic layers that are called inside look at the images alone: `sizes` of them, in a batch of `padded`.

    Compilers do not see it, nor does a backward pass that computes a part of the forward pass again.
    """
    batch = PaddedBatch(sizes, padded)
    # Nothing to leave out: layers go their usual ways.
    token = _BATCH.set(None if all(size == padded for size in batch.sizes) else batch)
    try:
        yield
    finally:
        _BATCH.reset(token)


def image_mean(x: Tensor, *, channels_last: bool = False) -> Tensor | None:
    """`[batch, channels]`: the mean of a feature map over its image; `None` where there is no padding to leave out.

    `x` is `[batch, channels, height, width]`, or `[batch, height, width, channels]`. Anything else is no feature map.
    """
    batch = None if torch.compiler.is_compiling() else _BATCH.get()
    if batch is None or x.dim() != 4:
        return None
    if x.shape[0] != len(batch.sizes):
        raise ShapeError(f"a feature map of {x.shape[0]} samples in a padded batch of {len(batch.sizes)} images")
    maps = x.permute(0, 3, 1, 2) if channels_last else x
    rows, columns = batch.shares(maps, maps.shape[2], maps.shape[3])
    # Products that read the map in the order in which it lies in memory: for another, torch would copy it first.
    if maps.is_contiguous(memory_format=torch.channels_last) and not maps.is_contiguous():
        by_column = torch.bmm(rows[:, None], maps.permute(0, 2, 3, 1).flatten(2))
        return torch.bmm(columns[:, None], by_column.view(*columns.shape, -1)).squeeze(1)
    return torch.bmm(torch.matmul(maps, columns[:, None, :, None]).squeeze(3), rows[:, :, None]).squeeze(2)
