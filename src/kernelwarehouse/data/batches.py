"""In which order images are read: the same for any number of processes, from any step on."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from kernelwarehouse.data.seeds import derive_seed
from kernelwarehouse.errors import TrainingError


class TrainingBatches(Sampler[list[tuple[int, int]]]):
    """The micro-batches of one process, as lists of `(epoch, index)`, from `start_step` to the end of the run.

    A step takes `batch_size` images over all processes. They are cut into `accumulation` micro-batches, and each of
    those is dealt to the processes in turn. Every epoch has its own order; the images beyond the last whole batch of an
    epoch wait for the next epoch's order.
    """

    def __init__(
        self,
        images: int,
        batch_size: int,
        epochs: int,
        seed: int,
        *,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
    ) -> None:
        if batch_size % (accumulation * world_size):
            raise TrainingError(
                f"batch size {batch_size} cannot be dealt evenly to {world_size} processes in {accumulation} parts; "
                f"use a multiple of {accumulation * world_size}"
            )
        self.steps_per_epoch = images // batch_size
        if self.steps_per_epoch == 0:
            raise TrainingError(
                f"batch size {batch_size} is larger than the {images} training images; use a smaller one"
            )
        self.images = images
        self.batch_size = batch_size
        self.steps = epochs * self.steps_per_epoch
        self.seed = seed
        self.accumulation = accumulation
        self.rank = rank
        self.world_size = world_size
        self.start_step = start_step

    def order(self, epoch: int) -> list[int]:
        """The images of an epoch, shuffled."""
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(self.images, generator=generator).tolist()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        part = self.batch_size // self.accumulation
        order: list[int] = []
        for step in range(self.start_step, self.steps):
            epoch, position = divmod(step, self.steps_per_epoch)
            if position == 0 or not order:
                order = self.order(epoch)
            first = position * self.batch_size
            for start in range(first, first + self.batch_size, part):
                yield [(epoch, index) for index in order[start : start + part][self.rank :: self.world_size]]

    def __len__(self) -> int:
        return (self.steps - self.start_step) * self.accumulation


class EvaluationShare(Sampler[int]):
    """Every image exactly once over all processes: no padding, so shares may differ by one image."""

    def __init__(self, images: int, *, rank: int = 0, world_size: int = 1) -> None:
        self._indices = range(rank, images, world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)
