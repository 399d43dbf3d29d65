"""The chosen strategies inside PyTorch: gradients, precision, memory formats, compilation, parallel training."""

import gc
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_cases import DEVICE, EVERYWHERE, evaluators, exact_gradients, gradients
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kernelwarehouse.assemble import Geometry, evaluate, force
from kernelwarehouse.assemble.layout import channels_last
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import ShapeError, StrategyError
from kernelwarehouse.layers import Conv2d
from kernelwarehouse.partition import Partition

SQUARE = Geometry(Partition((16, 8, 3, 3), (8, 8, 1, 1)), (1, 1), (1, 1), (1, 1))
WAYS = evaluators(torch.zeros(1, 8, 6, 5, device=DEVICE), SQUARE)
PURE = [way for way in WAYS if way in EVERYWHERE]


def _tensors(
    batch: int = 3, dtype: torch.dtype = torch.float32, geometry: Geometry = SQUARE, cells: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    partition = geometry.partition
    shapes = (
        (batch, geometry.in_channels, 6, 5),
        (batch, partition.mixtures, cells),
        (cells, *partition.cell_shape),
    )
    x, attention, stored = (torch.randn(shape, generator=generator, dtype=dtype).to(DEVICE) for shape in shapes)
    return x, attention, stored


def _close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    got, expected = got.cpu().double(), expected.cpu().double()
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("way", EVERYWHERE)
@pytest.mark.parametrize("stride", [1, 2])
def test_gradcheck(way: str, stride: int) -> None:
    geometry = Geometry(Partition((4, 2, 2, 2), (2, 1, 1, 1)), (stride, 1), (1, 0), (1, 2), groups=2)
    if way == "windows":
        geometry = replace(geometry, groups=1)
    if way == "pointwise":
        geometry = Geometry(Partition((4, 2, 1, 1), (2, 1, 1, 1)), (stride, 1), (0, 0), (1, 1))
    inputs = [tensor.requires_grad_() for tensor in _tensors(2, torch.float64, geometry, cells=3)]
    with force(way):
        assert torch.autograd.gradcheck(lambda *args: evaluate(*args, geometry), inputs)


@pytest.mark.parametrize("way", WAYS)
def test_channels_last_and_strided_inputs(way: str) -> None:
    x, attention, cells = _tensors()
    expected_out, expected = exact_gradients(x, attention, cells, SQUARE)
    wide = torch.randn(6, 8, 6, 10, device=DEVICE)
    wide[::2, :, :, ::2] = x
    more = torch.randn(len(x), 24, *x.shape[2:], device=DEVICE).to(memory_format=torch.channels_last)
    more[:, 8:16] = x
    for odd in (x.to(memory_format=torch.channels_last), more[:, 8:16], wide[::2, :, :, ::2]):
        assert not odd.is_contiguous()
        spread = attention.repeat_interleave(2, dim=2)[..., ::2]
        out, grads = gradients(way, odd, spread, cells.transpose(0, 1).contiguous().transpose(0, 1), SQUARE)
        _close(out, expected_out, 1e-5)
        for got, exact in zip(grads, expected, strict=True):
            _close(got, exact, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_channels_last_stays_channels_last(way: str) -> None:
    x, attention, cells = _tensors()
    more = torch.cat([x, x], dim=1).to(memory_format=torch.channels_last)
    for images in (x.to(memory_format=torch.channels_last), *more.chunk(2, dim=1)):
        with force(way), torch.no_grad():
            out = evaluate(images, attention, cells, SQUARE)
        assert out.is_contiguous(memory_format=torch.channels_last)


def test_what_counts_as_channels_last() -> None:
    x = torch.randn(2, 8, 6, 5)
    last = x.to(memory_format=torch.channels_last)
    for images in (last, last[:, :4], last[:, 3:], last[:, :, 1:], last[:, :2, ::2], last[:, :2, :, :1], last[::2, :2]):
        assert channels_last(images)
        # Torch's own layers ask the same.
        static = torch.conv2d(images, torch.randn(4, images.shape[1], 1, 1))
        assert static.is_contiguous(memory_format=torch.channels_last)
    for images in (
        x,
        x[:, :4],
        x[..., ::2],
        x.transpose(2, 3),
        last[:, :1],
        last.transpose(2, 3),
        last[:1].expand_as(x),
    ):
        assert not channels_last(images)
    assert not channels_last(x[0, 0])


@pytest.mark.parametrize("batch", [0, 1])
def test_smallest_batches(batch: int) -> None:
    x, attention, cells = (tensor.requires_grad_() for tensor in _tensors(batch))
    out = evaluate(x, attention, cells, SQUARE)
    assert out.shape == (batch, 16, 6, 5)
    out.sum().backward()
    assert x.grad is not None
    assert attention.grad is not None
    assert cells.grad is not None
    assert cells.grad.abs().sum().isfinite()


@pytest.mark.parametrize("way", ["plain", *WAYS])
def test_zeros_give_zeros(way: str) -> None:
    x, attention, cells = _tensors()
    out, grads = gradients(way, torch.zeros_like(x), torch.zeros_like(attention), cells, SQUARE)
    assert not out.any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("way", ["plain", *WAYS])
def test_infinity_and_nan_are_not_lost(way: str) -> None:
    x, attention, cells = _tensors()
    x[0, 0, 0, 0], x[1, 0, 0, 0] = float("inf"), float("nan")
    with torch.no_grad(), force(way):
        out = evaluate(x, attention, cells, SQUARE)
    assert not out[0].isfinite().all()
    assert out[1].isnan().any()
    assert out[2].isfinite().all()


@pytest.mark.parametrize("way", ["plain", *PURE])
def test_bfloat16(way: str) -> None:
    x, attention, cells = (tensor.bfloat16() for tensor in _tensors())
    expected_out, expected = exact_gradients(x, attention, cells, SQUARE)
    out, grads = gradients(way, x, attention, cells, SQUARE)
    assert out.dtype == torch.bfloat16
    for got, exact in zip((out, *grads), (expected_out, *expected), strict=True):
        _close(got, exact, 0.05)


def test_autocast_computes_in_its_type_and_keeps_gradients_in_theirs() -> None:
    inputs = [tensor.requires_grad_() for tensor in _tensors()]
    expected = evaluate(*inputs, SQUARE).detach()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out = evaluate(*inputs, SQUARE)
    assert out.dtype == torch.bfloat16
    out.sum().backward()  # outside of autocast, as is usual
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in inputs)
    _close(out.detach(), expected, 0.05)


@pytest.mark.parametrize("way", WAYS)
def test_only_wanted_gradients(way: str) -> None:
    x, attention, cells = _tensors()
    _, expected = gradients("plain", x, attention, cells, SQUARE)
    cells.requires_grad_()
    weight = torch.randn(3, 16, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x)
    with force(way):
        evaluate(x, attention, cells, SQUARE).backward(weight)
    assert x.grad is None
    assert attention.grad is None
    assert cells.grad is not None
    _close(cells.grad, expected[2], 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_saves_its_inputs_and_nothing_else(way: str) -> None:
    inputs = [tensor.requires_grad_() for tensor in _tensors()]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t), force(way):
        evaluate(*inputs, SQUARE)
    assert saved == [tensor.data_ptr() for tensor in inputs]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_nobodys_views(way: str) -> None:
    """Only then does autograd add those of a warehouse's next layer in their place, without a third copy."""
    inputs = [tensor.requires_grad_() for tensor in _tensors()]
    with force(way):
        out = evaluate(*inputs, SQUARE)
    cells_gradient = torch.autograd.grad(out.sum(), inputs)[2]
    assert cells_gradient._base is None


def test_double_backward_is_refused_and_plain_allows_it() -> None:
    inputs = [tensor.requires_grad_() for tensor in _tensors()]
    out = evaluate(*inputs, SQUARE)
    with pytest.raises(StrategyError, match=r'force\("plain"\)'):
        torch.autograd.grad(out.pow(2).sum(), inputs, create_graph=True)
    with force("plain"):
        out = evaluate(*inputs, SQUARE)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), inputs[:1], create_graph=True)
    grad.sum().backward()
    assert inputs[2].grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    x, attention, cells = (tensor.requires_grad_() for tensor in _tensors())
    expected = torch.autograd.grad(evaluate(x, attention, cells, SQUARE).pow(2).sum(), (x, attention, cells))
    out = checkpoint(lambda *args: evaluate(*args, SQUARE), x, attention, cells, use_reentrant=reentrant)
    out.pow(2).sum().backward()
    for tensor, grad in zip((x, attention, cells), expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad)


def test_compiles_in_one_graph() -> None:
    torch.manual_seed(0)
    layer = Conv2d(8, 16, 3, padding=1, config=WarehouseConfig(), device=DEVICE)
    x = torch.randn(2, 8, 6, 6, device=DEVICE, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    _close(got, expected, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_threads_change_nothing(way: str) -> None:
    x, attention, cells = _tensors(batch=5)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out, grads = gradients(way, x, attention, cells, SQUARE)
            found.append((out, *grads))
    finally:
        torch.set_num_threads(before)
    for one, many in zip(*found, strict=True):
        _close(many, one, 1e-6)


def _train_one_rank(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = DistributedDataParallel(_one_layer())
    torch.manual_seed(rank)
    model(torch.randn(2, 8, 6, 6)).pow(2).mean().backward()
    torch.save([parameter.grad for parameter in model.parameters()], f"{folder}/{rank}.pt")
    del model  # torch may wait for itself forever where the wrapper is what lets go of the processes' group
    gc.collect()
    torch.distributed.destroy_process_group()


def _one_layer() -> nn.Module:
    torch.manual_seed(0)
    return Conv2d(8, 16, 3, config=WarehouseConfig(norm="layer"))


def test_distributed_gradients_are_means(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        multiprocessing.spawn(_train_one_rank, (str(tmp_path),), nprocs=2)
    alone = []
    for rank in range(2):
        model = _one_layer()
        torch.manual_seed(rank)
        model(torch.randn(2, 8, 6, 6)).pow(2).mean().backward()
        alone.append([parameter.grad for parameter in model.parameters()])
    for rank in range(2):
        grads = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for got, first, second in zip(grads, *alone, strict=True):
            torch.testing.assert_close(got, (first + second) / 2, rtol=1e-4, atol=1e-6)


def test_wrong_shapes_are_named() -> None:
    x, attention, cells = _tensors()
    with pytest.raises(ShapeError, match=r"attention \(3, 17, 5\).*\(3, 18, 5\)"):
        evaluate(x, attention[:, 1:], cells, SQUARE)
    with pytest.raises(ShapeError, match=r"input of shape \(3, 7, 6, 5\).*8 input channels"):
        evaluate(x[:, 1:], attention, cells, SQUARE)
    with pytest.raises(ShapeError, match="2 spatial axes"):
        evaluate(x.flatten(2), attention, cells, SQUARE)
