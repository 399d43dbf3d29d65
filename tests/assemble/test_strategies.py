"""Every strategy computes what the plain definition computes."""

import pytest
import torch
from hypothesis import given, settings
from layer_cases import Case, assert_same, cases, depthwise_cases, pointwise_cases

from kernelwarehouse.assemble import Geometry
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
