"""Every strategy computes what the plain definition computes."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from layer_cases import Case, assert_same, cases, depthwise_cases, pointwise_cases

from kernelwarehouse.assemble import Geometry, evaluate, force
from kernelwarehouse.partition import Partition

PURE = ["grouped", "matmul"]


@pytest.mark.parametrize("way", PURE)
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_float64(way: str, case: Case) -> None:
    assert_same(way, case, torch.float64, 1e-10)


@pytest.mark.parametrize("way", PURE)
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_float32(way: str, case: Case) -> None:
    assert_same(way, case, torch.float32, 1e-5)


@settings(max_examples=60, deadline=None)
@given(case=cases(native=True))
def test_native(case: Case) -> None:
    assert_same("native", case, torch.float32, 1e-5)


@pytest.mark.parametrize("kernel", [(256, 512, 1, 1), (256, 256, 3, 1)])
@pytest.mark.parametrize("batch", [1, 4, 9, 33])
def test_native_with_cells_that_no_cache_holds(kernel: tuple[int, ...], batch: int) -> None:
    """Few mixtures are streamed from memory, more are packed in pieces; hypothesis draws small layers only."""
    geometry = Geometry(Partition(kernel, (256, 256, 1, 1)), (1, 1), (kernel[2] // 2, 0), (1, 1))
    assert_same("native", Case(geometry, batch, 49, (3, 2), seed=0), torch.float32, 1e-5)


@settings(max_examples=40, deadline=None)
@given(case=depthwise_cases())
def test_depthwise(case: Case) -> None:
    assert_same("depthwise", case, torch.float32, 1e-5)


@settings(max_examples=40, deadline=None)
@given(case=pointwise_cases())
def test_pointwise(case: Case) -> None:
    assert_same("pointwise", case, torch.float64, 1e-10)


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_gradients_of_kernels_know_no_numbers_from_outside(stride: int) -> None:
    """Taps that do not see an infinite input have finite gradients, however the layer is evaluated."""
    geometry = Geometry(Partition((8, 1, 3, 3), (8, 1, 1, 1)), (stride, stride), (0, 0), (1, 1), 8)
    x, attention, cells = Case(geometry, 1, 9, (5, 9), seed=0).tensors(torch.float32)
    x[..., -1] = torch.inf
    finite = []
    for way in (force("plain"), nullcontext()):
        leaf = attention.clone().requires_grad_()
        with way:
            evaluate(x, leaf, cells, geometry).sum().backward()
        assert leaf.grad is not None
        finite.append(leaf.grad.isfinite())
    assert finite[0].any()
    assert torch.equal(*finite)
