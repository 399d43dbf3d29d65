"""Automatic mixed precision, by the recipe's `precision`."""

from contextlib import AbstractContextManager

import torch

from kernelwarehouse._bfloat16 import require_computable


def require_precision(device: torch.device, precision: str) -> None:
    """Raise where torch would die of this precision. Asked early, before torch multiplies, it may still be helped."""
    if precision != "float32":
        require_computable(device, getattr(torch, precision))


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    require_precision(device, precision)
    return torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")


def gradient_scaler(device: torch.device, precision: str) -> torch.amp.GradScaler:
    """Only float16 has a range so small that gradients need scaling; for the others this one does nothing."""
    return torch.amp.GradScaler(device.type, enabled=precision == "float16")
