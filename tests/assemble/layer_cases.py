"""Random layers with inputs, and the comparison of a strategy with the plain definition.

Strategies are tested on the device of `devices.py`; the definition that they are compared with is computed in float64
on the CPU.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import COMPILED
from devices import DEVICE
from kernelwarehouse.assemble import STRATEGIES, Geometry, force
from kernelwarehouse.assemble.dispatch import evaluate
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.partition import Partition


@dataclass(frozen=True)
class Case:
    geometry: Geometry
    batch: int
    cells: int
    space: tuple[int, ...]
    seed: int
    threads: int | None = None  # among which work is split; or those that there are

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        partition = self.geometry.partition
        shapes = (
            (self.batch, self.geometry.in_channels, *self.space)
            if self.geometry.spatial_axes
            else (self.batch, *self.space, self.geometry.in_channels),
            (self.batch, partition.mixtures, self.cells),
            (self.cells, *partition.cell_shape),
        )
        x, attention, cells = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes
        )
        return x, attention, cells


_THREADS = st.sampled_from([1, 2, 3])


@st.composite
def cases(draw: st.DrawFn, *, native: bool = False, groups: bool = True) -> Case:
    """Layers of every kind; with `native`, those that the compiled kernels take, by several threads."""
    axes = draw(st.sampled_from([1, 2, 2, 2, 3]) if native else st.sampled_from([0, 1, 2, 2, 2, 3]))
    cell_out = draw(st.sampled_from([8, 16, 24, 40] if native else [1, 2, 3]))
    cell_in = draw(st.sampled_from([8, 16, 24] if native else [1, 2, 3]))
    out_groups, in_groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    several = groups and not native and axes > 0
    conv_groups = draw(st.sampled_from([1, 1, 2, 3])) if several else 1
    out = cell_out * out_groups * conv_groups
    kernel = [draw(st.integers(1, 3)) for _ in range(axes)]
    whole = not native and draw(st.booleans())
    partition = Partition((out, cell_in * in_groups, *kernel), (cell_out, cell_in, *(kernel if whole else [1] * axes)))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(axes))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    space = tuple(draw(st.integers(max(1, r - 2 * p), r + 4)) for r, p in zip(reach, padding, strict=True))
    if axes == 0:
        space = (draw(st.integers(1, 5)),)
    geometry = Geometry(partition, stride, padding, dilation, conv_groups)
    seed, threads = draw(st.integers(0, 2**31)), draw(_THREADS) if native else None
    return Case(geometry, draw(st.integers(1, 5)), draw(st.integers(1, 19)), space, seed, threads)


@st.composite
def winograd_cases(draw: st.DrawFn) -> Case:
    """Layers of 3x3 kernels at stride 1, on images of odd and even sizes."""
    cell = draw(st.sampled_from([8, 16, 24, 40])), draw(st.sampled_from([8, 16, 24]))
    shape = cell[0] * draw(st.integers(1, 3)), cell[1] * draw(st.integers(1, 2))
    padding = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    space = tuple(draw(st.integers(max(1, 3 - 2 * pad), 9)) for pad in padding)
    geometry = Geometry(Partition((*shape, 3, 3), (*cell, 1, 1)), (1, 1), padding, (1, 1))
    seed, threads = draw(st.integers(0, 2**31)), draw(_THREADS)
    return Case(geometry, draw(st.integers(1, 5)), draw(st.integers(1, 19)), space, seed, threads)


@st.composite
def pointwise_cases(draw: st.DrawFn) -> Case:
    """Layers of one kernel position."""
    axes, cell = draw(st.integers(1, 3)), (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    shape = (cell[0] * draw(st.integers(1, 3)), cell[1] * draw(st.integers(1, 3)))
    partition = Partition((*shape, *[1] * axes), (*cell, *[1] * axes))
    stride, space = (tuple(draw(st.integers(1, most)) for _ in range(axes)) for most in (2, 5))
    geometry = Geometry(partition, stride, (0,) * axes, (1,) * axes)
    return Case(geometry, draw(st.integers(1, 4)), draw(st.integers(1, 9)), space, draw(st.integers(0, 2**31)))


@st.composite
def rows_cases(draw: st.DrawFn, *, largest: int = 5) -> Case:
    """Layers of one kernel position that the compiled kernels take, on images of up to so many places a side."""
    axes, wide = draw(st.integers(1, 3)), st.sampled_from([8, 16, 24, 40])
    cell = draw(wide), draw(wide)
    shape = cell[0] * draw(st.integers(1, 3)), cell[1] * draw(st.integers(1, 3))
    stride, space = (tuple(draw(st.integers(1, most)) for _ in range(axes)) for most in (2, largest if axes < 3 else 5))
    geometry = Geometry(Partition((*shape, *[1] * axes), (*cell, *[1] * axes)), stride, (0,) * axes, (1,) * axes)
    seed, threads = draw(st.integers(0, 2**31)), draw(_THREADS)
    return Case(geometry, draw(st.integers(1, 5)), draw(st.integers(1, 19)), space, seed, threads)


@st.composite
def depthwise_cases(draw: st.DrawFn) -> Case:
    """Depth-wise layers that the compiled kernels take; some with two output channels for an input channel."""
    cell, count, shared = draw(st.sampled_from([8, 16, 24])), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    partition = Partition((cell * count * shared, 1, 3, 3), (cell, 1, 1, 1))
    dilation = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    padding = tuple(draw(st.integers(0, 2 * d)) for d in dilation)
    # Wide enough for several vectors of either width, and down to what padding alone makes large enough.
    space = tuple(
        draw(st.integers(max(1, 2 * d + 1 - 2 * p), most))
        for d, p, most in zip(dilation, padding, (12, 52), strict=True)
    )
    stride = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    geometry = Geometry(partition, stride, padding, dilation, cell * count)
    seed, threads = draw(st.integers(0, 2**31)), draw(_THREADS)
    return Case(geometry, draw(st.integers(1, 3)), draw(st.integers(1, 19)), space, seed, threads)


CASES: dict[str, st.SearchStrategy[Case]] = {
    "plain": cases(),
    "grouped": cases(),
    "matmul": cases(),
    "windows": cases(groups=False),
    "pointwise": pointwise_cases(),
    "native": cases(native=True),
    "depthwise": depthwise_cases(),
    "rows": rows_cases(),
    "planes": rows_cases(largest=40),
    "winograd": winograd_cases(),
}
"""Name of a strategy that mixes with attentions -> layers that it can evaluate."""

NEEDS_COMPILER = ("native", "depthwise", "rows", "planes", "winograd")
EVERYWHERE = [name for name in CASES if name not in NEEDS_COMPILER]
"""Strategies for every device and type."""


def evaluators(x: Tensor, geometry: Geometry) -> list[str]:
    """Strategies that can evaluate a layer from attentions, the definition aside."""
    return [name for name in CASES if name != "plain" and STRATEGIES[name].obstacle(x, geometry) is None]


def gradients(
    way: str, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output and the gradients of a fixed random function of it."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, attention, cells)]
    with force(way):
        out = evaluate(*leaves, geometry)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    return out.detach(), torch.autograd.grad(out, leaves, weight)


def exact_gradients(
    x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same by the plain definition, in float64 on the CPU."""
    return gradients("plain", x.cpu().double(), attention.cpu().double(), cells.cpu().double(), geometry)


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    """Of every tensor, relative to its length."""
    return [
        ((got.cpu().double() - expected).norm() / expected.norm()).item()
        for got, expected in zip(found, exact, strict=True)
    ]


def assert_same(way: str, case: Case, dtype: torch.dtype, tolerance: float) -> None:
    """A strategy agrees with the plain definition in float64, in output and in all gradients; one that needs compiled
    kernels is refused where there are none."""
    x, attention, cells = case.tensors(dtype)
    if case.threads is not None:  # until the test ends
        torch.set_num_threads(case.threads)
    if way in NEEDS_COMPILER and DEVICE.type != "cpu":
        pytest.skip(f"{way} is for the CPU")
    if way in NEEDS_COMPILER and not COMPILED:
        with pytest.raises(StrategyError, match="could not be built"):
            gradients(way, x, attention, cells, case.geometry)
        return
    with torch.no_grad(), force(way):
        inferred = evaluate(x, attention, cells, case.geometry)
    out, grads = gradients(way, x, attention, cells, case.geometry)
    exact_out, exact_grads = exact_gradients(x, attention, cells, case.geometry)
    torch.testing.assert_close(inferred, out, rtol=0, atol=0)
    for got, exact in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        assert got.shape == exact.shape
        assert got.dtype == dtype
        scale = max(1.0, exact.abs().max().item())  # terms of about 1 may cancel, their rounding does not
        assert (got.cpu().double() - exact).abs().max().item() <= tolerance * scale
