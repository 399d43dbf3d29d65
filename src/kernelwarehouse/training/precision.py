"""Automatic mixed precision, by the recipe's `precision`."""

from contextlib import AbstractContextManager

import torch


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    return torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")


def gradient_scaler(device: torch.device, precision: str) -> torch.amp.GradScaler:
    """Only float16 has a range so small that gradients need scaling; for the others this one does nothing."""
    return torch.amp.GradScaler(device.type, enabled=precision == "float16")
