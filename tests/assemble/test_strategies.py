"""Every strategy computes what the plain definition computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import CASES, EVERYWHERE, Case, assert_same, errors, exact_gradients, gradients
from torch import Tensor

from compiled_kernels import COMPILED, LEVEL2
from devices import DEVICE
from kernelwarehouse.assemble import STRATEGIES, Geometry, blocks, evaluate, force, matmul, windows
from kernelwarehouse.partition import Partition


def test_every_strategy_has_layers_to_be_tested_with() -> None:
    assert CASES.keys() == {name for name, way in STRATEGIES.items() if way.mixing == "weights"}


@pytest.mark.parametrize("way", EVERYWHERE)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_float64(way: str, data: st.DataObject) -> None:
    assert_same(way, data.draw(CASES[way]), torch.float64, 1e-10)


@pytest.mark.parametrize("way", CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_float32(way: str, data: st.DataObject) -> None:
    assert_same(way, data.draw(CASES[way]), torch.float32, 1e-5)


# Strategies of compiled kernels are for the CPU, wherever the others are tested.
HERE_COMPILED = COMPILED and DEVICE.type == "cpu"

SQUARE = Geometry(Partition((16, 8, 3, 3), (8, 4, 1, 1)), (1, 1), (1, 1), (1, 1))
POINT = Geometry(Partition((16, 8, 1, 1), (8, 4, 1, 1)), (2, 2), (0, 0), (1, 1))


def _layer_for(way: str) -> Geometry:
    return POINT if way == "pointwise" else SQUARE


def _cut_into_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, matmul, windows):
        monkeypatch.setattr(module, "block_size", lambda *_: 1)


@pytest.mark.parametrize("way", EVERYWHERE)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_sample_by_sample(way: str, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _cut_into_samples(monkeypatch)
        assert_same(way, data.draw(CASES[way]), torch.float64, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", [name for name in EVERYWHERE if name != "plain"])
def test_many_chunks_are_as_accurate_as_one(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = _layer_for(way)
    tensors = Case(geometry, 100, 5, (5, 4), seed=0).tensors(dtype)
    exact_out, exact_grads = exact_gradients(*tensors, geometry)
    found = []
    for cut in (lambda _: None, _cut_into_samples):
        cut(monkeypatch)
        out, grads = gradients(way, *tensors, geometry)
        assert {tensor.dtype for tensor in (out, *grads)} == {dtype}
        found.append(errors((out, *grads), (exact_out, *exact_grads)))
    for one, many in zip(*found, strict=True):
        assert many <= 1.5 * one


@pytest.mark.parametrize("way", [name for name in EVERYWHERE if name != "plain"])
def test_sums_over_kernel_positions_are_accurate(way: str) -> None:
    """A result in bfloat16 is as near to the exact one as rounding that and the mixed kernels allows."""
    geometry = POINT if way == "pointwise" else Geometry(Partition((8, 16, 9), (8, 4, 1)), (1,), (4,), (1,))
    space = (7,) * geometry.spatial_axes
    tensors = Case(geometry, 8, 5, space, seed=0).tensors(torch.bfloat16)
    out, grads = gradients(way, *tensors, geometry)
    exact_out, exact_grads = exact_gradients(*tensors, geometry)
    assert all(error <= 5e-3 for error in errors((out, *grads), (exact_out, *exact_grads)))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("way", ["grouped", "matmul", "pointwise", "windows"])
def test_channels_last_stays_channels_last(way: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if cut:
        _cut_into_samples(monkeypatch)
    geometry = _layer_for(way)
    x, attention, cells = Case(geometry, 3, 5, (6, 5), seed=0).tensors(torch.float32)
    x = x.to(memory_format=torch.channels_last)
    out, grads = gradients(way, x, attention, cells, geometry)
    for images in (out, grads[0]):
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert not images.is_contiguous()
    exact_out, exact_grads = exact_gradients(x, attention, cells, geometry)
    assert all(error <= 1e-6 for error in errors((out, *grads), (exact_out, *exact_grads)))


@pytest.mark.parametrize("kernel", [(256, 512, 1, 1), (256, 256, 3, 1)])
@pytest.mark.parametrize("batch", [1, 4, 9])
def test_native_with_cells_that_no_cache_holds(kernel: tuple[int, ...], batch: int) -> None:
    """Few mixtures are streamed from memory, more are packed in pieces; hypothesis draws small layers only."""
    geometry = Geometry(Partition(kernel, (256, 256, 1, 1)), (1, 1), (kernel[2] // 2, 0), (1, 1))
    count = 24 * LEVEL2 // (256 * 256) + 1  # see `third_level` in csrc/memory.h: four times that comes from memory
    assert_same("native", Case(geometry, batch, count, (3, 2), seed=0), torch.float32, 1e-5)


def _assert_finite_where_the_definition_is(
    strategy: str, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry
) -> None:
    """Of an input that is not finite everywhere, the attentions' gradients are in the same places."""
    finite = []
    for way in ("plain", strategy):
        leaf = attention.clone().requires_grad_()
        with force(way):
            evaluate(x, leaf, cells, geometry).sum().backward()
        assert leaf.grad is not None
        finite.append(leaf.grad.isfinite())
    assert finite[0].any()
    assert not finite[0].all()
    assert torch.equal(*finite)


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_gradients_of_kernels_know_no_numbers_from_outside(stride: int) -> None:
    """Taps that do not see an infinite input have finite gradients, however the layer is evaluated."""
    geometry = Geometry(Partition((8, 1, 3, 3), (8, 1, 1, 1)), (stride, stride), (0, 0), (1, 1), 8)
    x, attention, cells = Case(geometry, 1, 9, (5, 9), seed=0).tensors(torch.float32)
    x[..., -1] = torch.inf
    _assert_finite_where_the_definition_is("depthwise" if HERE_COMPILED else "grouped", x, attention, cells, geometry)


@pytest.mark.skipif(not HERE_COMPILED, reason="there are no compiled kernels here")
@pytest.mark.parametrize("channel, place", [(8, 0), (7, -1)])
@pytest.mark.parametrize("places", [5, 21])
def test_gradients_along_planes_know_no_numbers_of_other_channels(places: int, channel: int, place: int) -> None:
    """Of two groups of input channels, one knows an infinite number. The other ends, or begins, beside it in memory."""
    geometry = Geometry(Partition((16, 16, 1), (8, 8, 1)), (1,), (0,), (1,))
    x, attention, cells = Case(geometry, 2, 5, (places,), seed=0).tensors(torch.float32)
    x[0, channel, place] = torch.inf
    _assert_finite_where_the_definition_is("planes", x, attention, cells, geometry)


@pytest.mark.parametrize("place", [(1, 2), (-1, -1)])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("stride, dilation", [((1, 1), 1), ((2, 2), 1), ((1, 1), 2), ((2, 2), 2), ((1, 2), 1)])
def test_depthwise_gradients_of_inputs_come_from_what_has_read_them(
    stride: tuple[int, int], dilation: int, shared: int, place: tuple[int, int]
) -> None:
    """An infinite gradient of one output reaches the places that it has seen, and no others."""
    partition = Partition((8 * shared, 1, 3, 3), (8, 1, 1, 1))
    geometry = Geometry(partition, stride, (1, 1), (dilation, dilation), 8)
    x, attention, cells = Case(geometry, 1, 9, (9, 23), seed=0).tensors(torch.float32)
    finite = []
    for way in ("plain", "depthwise") if HERE_COMPILED else ("plain", "grouped"):
        leaf = x.clone().requires_grad_()
        with force(way):
            out = evaluate(leaf, attention, cells, geometry)
        grad = torch.ones_like(out)
        grad[:, :, place[0], place[1]] = torch.inf
        out.backward(grad)
        assert leaf.grad is not None
        finite.append(leaf.grad.isfinite())
    assert 0 < (~finite[0]).sum() <= 8 * 9
    assert torch.equal(*finite)
