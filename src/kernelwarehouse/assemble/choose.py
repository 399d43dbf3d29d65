"""The one rule that decides how a layer is evaluated."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelwarehouse.assemble import native
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.errors import StrategyError

STRATEGIES = ("plain", "grouped", "matmul", "native")

# Output positions up to which products of small matrices beat a grouped convolution (measured on a CPU with AVX2).
_FEW_POSITIONS = 400

_forced: ContextVar[str | None] = ContextVar("kernelwarehouse_forced_strategy", default=None)


@dataclass(frozen=True)
class Choice:
    """The strategy for one call, and why."""

    strategy: str
    reason: str


@contextmanager
def force(strategy: str) -> Iterator[None]:
    """Evaluate every layer by this strategy inside the `with` block (backward follows its forward)."""
    if strategy not in STRATEGIES:
        raise StrategyError(f"there is no strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
    token = _forced.set(strategy)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Choice:
    """How to evaluate a layer on these tensors."""
    forced = _forced.get()
    if forced is not None:
        if forced == "native":
            native.require(x, geometry)
        return Choice(forced, "forced")
    if torch.compiler.is_compiling():
        return Choice("plain", "traced: a compiler should see the definition")
    if x.numel() == 0:
        return Choice("plain", "nothing to compute")
    if geometry.groups > 1 and geometry.partition.kernel_shape[1] == 1:
        return Choice("plain", "depth-wise: the kernels are small enough to keep")
    obstacle = native.obstacle(x, geometry)
    if math.prod(geometry.kernel_size) == 1:
        return Choice("matmul", "one kernel position: one batched product")
    if obstacle is None:
        return Choice("native", "compiled: mixes and multiplies in cache")
    if math.prod(geometry.partition.cell_shape[2:]) > 1:
        return Choice("grouped", "cells wider than one position: a product per position would copy all of them first")
    positions = math.prod(geometry.output_size(tuple(x.shape[2:])))
    if x.device.type == "cpu" and positions <= _FEW_POSITIONS and x.dtype in (torch.float32, torch.float64):
        return Choice("matmul", f"{positions} output positions, at most {_FEW_POSITIONS}; not native, as {obstacle}")
    return Choice("grouped", f"{positions} output positions; not native, as {obstacle}")
