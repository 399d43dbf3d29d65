"""Images into batches, in worker processes."""

import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kernelwarehouse.data.batches import EvaluationShare, TrainingBatches
from kernelwarehouse.data.images import Images
from kernelwarehouse.data.seeds import derive_seed, seed_generators
from kernelwarehouse.errors import ConfigError, DataError, KernelWarehouseError, UnreadableImageError
from kernelwarehouse.training.augment import Transform
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.task import Unreadable

MOST_WORKERS = 8
MOST_WORKERS_ASKED = 256
BATCHES_AHEAD = 4

# What ends a run is for its main process to decide. Workers that ended by themselves would take it with them, halfway
# through a step, and print tracebacks.
LEFT_TO_THE_MAIN_PROCESS = (signal.SIGINT, signal.SIGTERM)


Result = TypeVar("Result")
Collate = Callable[[Sequence[Any]], Any]


class Sample(NamedTuple):
    """One image; `image` is missing where it could not be read, and `unreadable` then says why."""

    image: Tensor | None
    target: int
    unreadable: tuple[str, ...] = ()


class Batch(NamedTuple):
    images: Tensor
    targets: Tensor
    unreadable: list[str]


class TrainingImages(Dataset[Sample]):
    """Augmented images by `(epoch, index)`: the same pair always gives the same tensor.

    With `unreadable="skip"` the next readable image takes the place of one that cannot be read, so that all batches
    keep their size.
    """

    def __init__(self, images: Images, transform: Transform, seed: int, unreadable: Unreadable = "stop") -> None:
        self._images = images
        self._transform = transform
        self._seed = seed
        self._unreadable = unreadable

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        epoch, index = place
        found, image, problems = read_or_next(self._images.load, index, len(self._images.labels), self._unreadable)
        seed_generators(derive_seed("augment", self._seed, epoch, found))
        return Sample(self._transform(image), int(self._images.labels[found]), problems)


def read_or_next(
    read: Callable[[int], Result], index: int, count: int, unreadable: Unreadable
) -> tuple[int, Result, tuple[str, ...]]:
    """What is read at this index, or with "skip" at the next one that can be read, where that is, and what could not be
    read before it."""
    problems: list[str] = []
    for candidate in ((index + offset) % count for offset in range(count)):
        try:
            return candidate, read(candidate), tuple(problems)
        except UnreadableImageError as error:
            if unreadable == "stop":
                raise
            problems.append(str(error))
    raise DataError(f"none of the {count} training images can be read; the first: {problems[0]}")


class EvaluationImages(Dataset[Sample]):
    """Images by index, not augmented. Unreadable ones are left out of the batch with `unreadable="skip"`."""

    def __init__(self, images: Images, transform: Transform, unreadable: Unreadable = "stop") -> None:
        self._images = images
        self._transform = transform
        self._unreadable = unreadable

    def __getitem__(self, index: int) -> Sample:
        target = int(self._images.labels[index])
        try:
            return Sample(self._transform(self._images.load(index)), target)
        except UnreadableImageError as error:
            if self._unreadable == "stop":
                raise
            return Sample(None, target, (str(error),))


def collate(samples: Sequence[Sample]) -> Batch:
    readable = [sample for sample in samples if sample.image is not None]
    images = [sample.image for sample in readable if sample.image is not None]
    sizes = {tuple(image.shape) for image in images}
    if len(sizes) > 1:
        raise DataError(f"images of different sizes {sorted(sizes)} in one batch; set the recipe's image_size")
    return Batch(
        torch.stack(images) if images else torch.empty(0),
        torch.tensor([sample.target for sample in readable]),
        [problem for sample in samples for problem in sample.unreadable],
    )


def read_batches(loader: "DataLoader[Any]") -> Generator[Any, None, None]:
    """The loader's batches. An error of ours in a worker comes as in this process, without the worker's traceback.

    To be closed by who reads them: workers leave SIGTERM to the main process, and so have to be told that they can go.
    """
    with _signals_held_back():
        batches = iter(loader)
    try:
        yield from batches
    except KernelWarehouseError as error:
        last_line = str(error).strip().splitlines()[-1]
        if "Original Traceback" not in str(error):
            raise
        raise type(error)(last_line.partition(": ")[2]) from error
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):  # what torch says of one that was killed
            raise
        raise DataError(f"a process that reads images has died ({error}); fewer --workers need less memory") from error
    finally:
        # torch does this itself when the iterator is forgotten; but the traceback of an error remembers it, and Python
        # then waits for the workers at its end for ever.
        shut_down = getattr(batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Processes that start meanwhile never get these signals; this one gets them afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_MAIN_PROCESS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(worker: int) -> None:
    """For workers that do not inherit what `_signals_held_back` did, as those of a fork server do not."""
    for number in LEFT_TO_THE_MAIN_PROCESS:
        signal.signal(number, signal.SIG_IGN)


def check_workers(workers: int | None) -> None:
    """Every worker is a process of its own: a number mistyped by some digits would bring the machine down."""
    if workers is not None and not 0 <= workers <= MOST_WORKERS_ASKED:
        raise ConfigError(f"workers (={workers}) must be 0, to read in this process, or at most {MOST_WORKERS_ASKED}")


def default_workers(processes: Processes) -> int:
    """As many as there are cores for this process, within reason."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cores // processes.local_world_size))


def training_loader(
    samples: Dataset[Any],
    batches: TrainingBatches,
    workers: int,
    processes: Processes,
    collate_fn: Collate = collate,
) -> DataLoader[Any]:
    """All micro-batches from `batches.start_step` to the end of the run, so that workers read on across epochs."""
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate_fn,
        worker_init_fn=ignore_signals,
        pin_memory=processes.device.type == "cuda",
        prefetch_factor=BATCHES_AHEAD if workers else None,
    )


def evaluation_loader(
    samples: Dataset[Any],
    count: int,
    batch_size: int,
    workers: int,
    processes: Processes,
    collate_fn: Collate = collate,
) -> DataLoader[Any]:
    """This process's share of `count` samples."""
    return DataLoader(
        samples,
        batch_size=batch_size,
        sampler=EvaluationShare(count, rank=processes.rank, world_size=processes.world_size),
        num_workers=workers,
        collate_fn=collate_fn,
        worker_init_fn=ignore_signals,
        pin_memory=processes.device.type == "cuda",
    )
