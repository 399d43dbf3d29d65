"""The peak memory of a training step, in a process of its own: `python -m kernelwarehouse.compare.memory NAME ...`.

Prints bytes above what imports took, or nothing where the system does not tell. Linux's own high-water mark is read
because `ru_maxrss` of a child starts at its parent's peak.
"""

import sys
from pathlib import Path

import torch

from kernelwarehouse.compare.measure import Setting, build, random_batch, training_step

_STATUS = Path("/proc/self/status")


def status_bytes(field: str) -> int | None:
    """A field of this process's status in bytes, such as VmHWM, the most it ever held; nothing where there is none."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def main(arguments: list[str]) -> int:
    name, *numbers = arguments
    image_size, batch_size, threads, classes = map(int, numbers)
    setting = Setting(image_size=image_size, batch_size=batch_size, threads=threads, classes=classes)
    torch.set_num_threads(threads)
    imports = status_bytes("VmRSS")
    step = training_step(build(name, setting), *random_batch(setting))
    for _ in range(2):
        step()
    peak = status_bytes("VmHWM")
    if imports is not None and peak is not None:
        print(peak - imports)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
