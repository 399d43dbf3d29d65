"""How a batch is cut so that temporaries stay small, or launches few."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernelwarehouse.partition import Partition

# Numbers of temporaries alive at once. On a CPU, allocators map blocks of more than 32 MB anew, and fault in their
# pages, on every call. Elsewhere memory is kept, and every chunk costs a launch of each step: half the kernels of the
# largest layers of the zoo (512x512x3x3, a batch of 128) are a block.
ON_CPU = 4 << 20
ELSEWHERE = 160 << 20


def block_size(device: torch.device, on_cpu: int = ON_CPU) -> int:
    """Numbers that a temporary may have."""
    return on_cpu if device.type == "cpu" else max(on_cpu, ELSEWHERE)


def ranges(start: int, stop: int, step: int) -> Iterator[range]:
    """From start to stop in steps; the last may be shorter."""
    for first in range(start, stop, step):
        yield range(first, min(first + step, stop))


def chunks(batch: int, numbers: int, most: int) -> list[slice]:
    """Slices of the batch, for each sample of which a temporary holds `numbers`: `most` of them in a chunk."""
    step = max(1, most // max(1, numbers))
    # The size itself ends the last slice: to a tracer it is no number, which a range would make of it.
    return [slice(start, min(start + step, batch)) for start in range(0, batch, step)]


def kernel_chunks(x: Tensor, partition: Partition, on_cpu: int = ON_CPU) -> list[slice]:
    """Slices of the batch whose kernels fit a block."""
    return chunks(x.shape[0], partition.mixtures * partition.cell_size, block_size(x.device, on_cpu))


def even(count: int, most: int) -> int:
    """The size of parts of `count` that are about equal, and at most `most` (but 1)."""
    return -(-count // -(-count // max(1, most)))
