"""Deterministic weights and inputs behind the reference numbers in `tests/data`."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"


def fill(name: str, shape: tuple[int, ...]) -> Tensor:
    """The values of the published tensor `name`: drawn from a generator that its name seeds."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "num_batches_tracked":
        return torch.zeros(shape, dtype=torch.int64)
    values = random.standard_normal(shape).astype(np.float32)
    if leaf == "running_var":
        values = 1 + 0.1 * np.abs(values)
    elif leaf == "running_mean":
        values = 0.1 * values
    elif leaf == "gamma":
        values = 0.1 + 0.02 * values
    elif leaf in ("bias", "basis_bias"):
        values = 0.05 * values
    elif len(shape) == 1:
        values = 1 + 0.1 * values
    elif ".weights." in "." + name:
        values = values * np.float32(shape[0] ** 0.25 / np.sqrt(np.prod(shape[2:]) * 3))
    else:
        values = values / np.sqrt(np.prod(shape[1:])).astype(np.float32)
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def standard_normal(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape)).to(dtype)


def read_json(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def read_arrays(name: str) -> dict[str, Tensor]:
    with np.load(DATA / name) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest entry."""
    scale = reference.detach().abs().max().clamp_min(1e-30)
    return float((value.detach() - reference.detach()).abs().max() / scale)
