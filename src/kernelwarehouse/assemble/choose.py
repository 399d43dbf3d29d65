"""The one rule that decides how a layer is evaluated."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelwarehouse.assemble import depthwise, native, pointwise
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.errors import StrategyError

STRATEGIES = ("plain", "depthwise", "grouped", "matmul", "native", "pointwise")

# Output positions up to which products of small matrices beat a grouped convolution (measured on a CPU with AVX2).
_FEW_POSITIONS = 400

# Below these the compiled point-wise product has too little to do in a tile, or enough to do for few samples.
_WIDE_CELL = 16
_SMALL_BATCH = 4
_LARGE_IMAGE = 1000
_LARGE_CELL = 128 * 128  # mixing dominates, and there the compiled kernels are ahead

# Strategies that cannot evaluate every layer.
_PARTICULAR = {"depthwise": depthwise, "native": native, "pointwise": pointwise}

# The rule looks at many things, which cost more than a small layer; it is asked once for every kind of input.
_REMEMBERED = 4096
_chosen: dict[tuple[Geometry, torch.Size, torch.dtype, str, type], "Choice"] = {}

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


def forced() -> str | None:
    """The strategy that a `with force(...)` around the caller asks for; compilers do not see it."""
    return None if torch.compiler.is_compiling() else _forced.get()


def choose(x: Tensor, geometry: Geometry) -> Choice:
    """How to evaluate a layer on this input."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return Choice("plain", "traced: compilers and function transforms should see the definition")
    wanted = forced()
    if wanted is not None:
        if wanted in _PARTICULAR:
            _PARTICULAR[wanted].require(x, geometry)
        return Choice(wanted, "forced")
    key = geometry, x.shape, x.dtype, x.device.type, type(x)
    choice = _chosen.get(key)
    if choice is None:
        if len(_chosen) >= _REMEMBERED:
            _chosen.clear()
        choice = _chosen[key] = _rule(x, geometry)
    return choice


def _rule(x: Tensor, geometry: Geometry) -> Choice:
    if x.numel() == 0 or x.device.type == "meta":
        return Choice("plain", "nothing to compute")
    if geometry.groups > 1 and geometry.partition.kernel_shape[1] == 1:
        hindrance = depthwise.obstacle(x, geometry)
        if hindrance is None:
            return Choice("depthwise", "compiled: channel by channel, in cache")
        return Choice("plain", f"depth-wise: the kernels are small enough to keep; not compiled, as {hindrance}")
    obstacle = native.obstacle(x, geometry)
    positions = math.prod(geometry.output_size(tuple(x.shape[2:])))
    if pointwise.obstacle(geometry) is None:
        return _choose_pointwise(x.shape[0], positions, geometry, obstacle)
    if obstacle is None:
        return Choice("native", "compiled: mixes and multiplies in cache")
    if math.prod(geometry.partition.cell_shape[2:]) > 1:
        return Choice("grouped", "cells wider than one position, which a product per position would copy first")
    if geometry.spatial_axes == 0:
        return Choice("matmul", "linear: one batched product")
    if x.device.type == "cpu" and positions <= _FEW_POSITIONS and x.dtype in (torch.float32, torch.float64):
        return Choice("matmul", f"{positions} output positions, at most {_FEW_POSITIONS}; not native, as {obstacle}")
    return Choice("grouped", f"{positions} output positions; not native, as {obstacle}")


def _choose_pointwise(batch: int, positions: int, geometry: Geometry, obstacle: str | None) -> Choice:
    if obstacle is not None:
        return Choice("pointwise", f"one kernel position; not native, as {obstacle}")
    if geometry.partition.cell_shape[0] < _WIDE_CELL:
        return Choice("pointwise", f"one kernel position, cells narrower than {_WIDE_CELL} output channels")
    few = native.MANY_POSITIONS if math.prod(geometry.partition.cell_shape) < _LARGE_CELL else _FEW_POSITIONS
    if positions > _LARGE_IMAGE or (positions > few and batch >= _SMALL_BATCH):
        return Choice("pointwise", f"one kernel position, {positions} output positions: large products")
    return Choice("native", "compiled: mixes and multiplies in cache")
