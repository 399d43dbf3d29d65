"""What a machine can do in a second: measured there, in well under a second, once for a process."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from kernelwarehouse.assemble.timing import best_times


@dataclass(frozen=True)
class Rates:
    """Multiply-adds a second in products of many and of few rows, and numbers read from memory in a second."""

    products: float
    few_products: float
    reads: float


@lru_cache
def machine_rates(device: torch.device, threads: int) -> Rates:
    """Those of a device with so many threads (which torch has been told to use)."""
    with torch.no_grad(), torch.inference_mode(False):
        cells, far = torch.ones(256, 4096, device=device), torch.ones(24, 1 << 20, device=device)
        many, few, one = (torch.ones(rows, 256, device=device) for rows in (256, 9, 1))
        runs = {
            "products": lambda: _wait(many @ cells),
            "few_products": lambda: _wait(few @ cells),
            "reads": lambda: _wait(one[:, :24] @ far),  # more than caches hold
        }
        numbers = {"products": many.numel() * 4096, "few_products": few.numel() * 4096, "reads": far.numel()}
        # Each alone: they are not rivals.
        return Rates(**{name: numbers[name] / best_times({name: run}, device)[name] for name, run in runs.items()})


def _wait(result: torch.Tensor) -> None:
    if result.device.type == "cuda":
        torch.cuda.synchronize(result.device)
