"""Mixing through the hidden vector computes what the definition computes: through whole layers, and step by step."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import DEVICE, Case, cases
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import kernelwarehouse as kw
from kernelwarehouse.assemble import STRATEGIES, Geometry, evaluate, force, hidden
from kernelwarehouse.assemble.strategy import Recomputed
from kernelwarehouse.attention import Attention, AttentionShape
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.layers import Conv1d, Conv2d, Conv3d, Linear, WarehouseLayer
from kernelwarehouse.partition import Partition

SQUARE = Geometry(Partition((16, 8, 3, 3), (8, 8, 1, 1)), (1, 1), (1, 1), (1, 1))


@dataclass(frozen=True)
class Blocks:
    """How small the parts are that a call is cut into."""

    units: int
    kernels: int
    samples: int


BLOCKS = st.builds(
    Blocks, st.sampled_from([1, 40, 1 << 20]), st.sampled_from([1, 6, 1 << 20]), st.sampled_from([1, 2, 16])
)


def _cut(monkeypatch: pytest.MonkeyPatch, blocks: Blocks) -> None:
    monkeypatch.setattr(hidden, "_UNITS", blocks.units)
    monkeypatch.setattr(hidden, "_KERNELS", blocks.kernels)
    monkeypatch.setattr(hidden, "_SAMPLES", blocks.samples)
    monkeypatch.setattr(hidden, "block_size", lambda device, on_cpu: on_cpu)  # on every device


def evaluate_factored(x: Tensor, coefficients: Tensor, factors: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    way = STRATEGIES["hidden"]
    return Recomputed.apply(way, way, geometry, (), x, coefficients, factors, cells)


def _product(coefficients: Tensor, factors: Tensor) -> Tensor:
    return torch.matmul(coefficients.transpose(0, 1), factors).transpose(0, 1)


def _tensors(case: Case, units: int, dtype: torch.dtype) -> list[Tensor]:
    """Input, coefficients, factors and cells."""
    x, attention, cells = case.tensors(torch.float64)
    batch, mixtures, count = attention.shape
    generator = torch.Generator().manual_seed(case.seed)
    coefficients = torch.randn(batch, mixtures, units, generator=generator, dtype=torch.float64)
    factors = torch.randn(mixtures, units, count, generator=generator, dtype=torch.float64)
    return [tensor.to(DEVICE, dtype).requires_grad_() for tensor in (x, coefficients, factors, cells)]


def _results(way: str, leaves: list[Tensor], geometry: Geometry) -> list[Tensor]:
    x, coefficients, factors, cells = leaves
    if way == "hidden":
        out = evaluate_factored(x, coefficients, factors, cells, geometry)
    else:
        with force("plain"):
            out = evaluate(x, _product(coefficients, factors), cells, geometry)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    return [out, *torch.autograd.grad(out, leaves, weight)]


def _assert_close(got: Tensor, exact: Tensor, tolerance: float) -> None:
    assert got.shape == exact.shape
    if exact.numel():
        assert (got.double() - exact.double()).abs().max() <= tolerance * exact.abs().max() + 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@settings(max_examples=60, deadline=None)
@given(case=cases(), units=st.integers(1, 4), blocks=BLOCKS)
def test_any_layer_and_any_cut(dtype: torch.dtype, tolerance: float, case: Case, units: int, blocks: Blocks) -> None:
    leaves = _tensors(case, units, dtype)
    exact = _results("plain", [leaf.detach().double().requires_grad_() for leaf in leaves], case.geometry)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _cut(monkeypatch, blocks)
        found = _results("hidden", leaves, case.geometry)
        with torch.no_grad():
            assert torch.equal(evaluate_factored(*leaves, case.geometry), found[0])
    for got, expected in zip(found, exact, strict=True):
        assert got.dtype == dtype
        _assert_close(got, expected, tolerance)


def _low_rank() -> WarehouseLayer:
    """The second of three layers of a warehouse: it has cells of its own, and others before and after them."""
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3) for _ in range(4)))
    layer = kw.convert(model, kw.plan(model, WarehouseConfig(2, low_rank=0.25)))[2]
    low_rank = layer.attention.shape.low_rank
    assert 0 < low_rank.first < layer.attention.shape.cells - low_rank.local
    return layer


def _layers() -> dict[str, tuple[WarehouseLayer, tuple[int, ...]]]:
    torch.manual_seed(1)
    return {
        "3x3, stride": (Conv2d(16, 32, 3, padding=1, stride=2, config=WarehouseConfig(4)), (19, 16, 9, 8)),
        "point-wise, narrow cells": (
            Conv2d(16, 12, 1, config=WarehouseConfig(2, in_ratio=0.5, out_ratio=1 / 3)),
            (5, 16, 5, 5),
        ),
        "point-wise, stride": (Conv2d(8, 12, 1, stride=2, bias=False, config=WarehouseConfig(2)), (5, 8, 6, 5)),
        "dilation, reflected edges": (
            Conv2d(8, 8, 3, dilation=2, padding=2, padding_mode="reflect", config=WarehouseConfig(2)),
            (3, 8, 7, 7),
        ),
        "groups": (Conv2d(8, 12, 3, groups=2, config=WarehouseConfig(3)), (4, 8, 6, 6)),
        "depth-wise": (Conv2d(8, 8, 3, groups=8, padding=1, config=WarehouseConfig(1)), (3, 8, 5, 5)),
        "wide cells": (Conv2d(8, 8, 3, config=WarehouseConfig(2, spatial_partition=False)), (3, 8, 6, 6)),
        "low rank": (_low_rank(), (4, 16, 5, 5)),
        "layer norm": (Conv2d(8, 8, 3, config=WarehouseConfig(2, norm="layer")), (3, 8, 5, 5)),
        "1d": (Conv1d(8, 12, 5, stride=2, padding=2, config=WarehouseConfig(2)), (3, 8, 11)),
        "3d": (Conv3d(4, 6, (1, 3, 2), config=WarehouseConfig(2)), (3, 4, 2, 5, 4)),
        "linear": (Linear(6, 10, config=WarehouseConfig(8)), (3, 2, 4, 6)),
        "linear without tokens": (Linear(6, 10, config=WarehouseConfig(8)), (5, 6)),
    }


def _trained(layer: WarehouseLayer, tau: float) -> WarehouseLayer:
    """With biases and statistics that are not those of a new layer."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in layer.state_dict().items():
        if name.endswith(("running_mean", "fc2.bias", "norm.bias", "offset")):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    kw.set_temperature(layer, tau)
    return layer


def _step(layer: WarehouseLayer, x: Tensor, way: str) -> dict[str, Tensor]:
    """Output and the gradients of the input and of all parameters."""
    layer.to(DEVICE)
    x = x.detach().to(DEVICE).requires_grad_()
    layer.zero_grad(set_to_none=True)
    with force(way):
        out = layer(x)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    out.backward(weight)
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", _layers())
def test_whole_layers(name: str, tau: float, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape = _layers()[name]
    _trained(layer, tau).double().train(training)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = _step(layer, x, "plain")
    _cut(monkeypatch, Blocks(20000, 1000, 3))
    found = _step(layer, x, "hidden")
    assert found.keys() == expected.keys()
    for key, exact in expected.items():
        _assert_close(found[key], exact, 1e-10)
    layer.float()
    for key, got in _step(layer, x.float(), "hidden").items():
        # Dividing by the spread of three samples costs float32 a digit or two, and another number of them elsewhere.
        _assert_close(got, expected[key], 1e-4 if training else 1e-5)


@pytest.mark.parametrize("batch", [0, 1])
def test_smallest_batches(batch: int) -> None:
    layer = _trained(Conv2d(8, 8, 3, padding=1, config=WarehouseConfig(2)), 0.5).double()
    found = _step(layer, torch.ones(batch, 8, 4, 4, dtype=torch.float64), "hidden")
    expected = _step(layer, torch.ones(batch, 8, 4, 4, dtype=torch.float64), "plain")
    assert found["out"].shape == (batch, 8, 4, 4)
    for key, exact in expected.items():
        _assert_close(found[key], exact, 1e-12)


@settings(max_examples=30, deadline=None)
@given(tau=st.sampled_from([0.0, 0.3, 1.0]), low_rank=st.booleans(), seed=st.integers(0, 2**31))
def test_factors_multiply_to_the_attention(tau: float, low_rank: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = _low_rank() if low_rank else Conv2d(16, 32, 3, config=WarehouseConfig(4))
    attention = _trained(layer, tau).to(DEVICE).double().attention
    pooled = torch.randn(5, 16, dtype=torch.float64).to(DEVICE)
    coefficients, factors = attention.factored(pooled)
    assert factors.shape[1] == attention.shape.units + (tau > 0)
    torch.testing.assert_close(_product(coefficients, factors), attention(pooled), rtol=1e-10, atol=1e-13)


def test_zero_logits_give_no_nan() -> None:
    layer = Conv2d(8, 8, 3, config=WarehouseConfig(2))
    nn.init.zeros_(layer.attention.fc2.weight)
    kw.set_temperature(layer, 0.0)
    found = _step(layer, torch.randn(4, 8, 5, 5), "hidden")
    assert not (found.pop("out") - layer.bias.detach().view(-1, 1, 1)).any()
    assert all(grad.isfinite().all() for grad in found.values())


@pytest.mark.parametrize("stride", [1, 2])
def test_gradcheck(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _cut(monkeypatch, Blocks(8, 2, 1))
    geometry = Geometry(Partition((4, 2, 2, 2), (2, 1, 1, 1)), (stride, 1), (1, 0), (1, 2), groups=2)
    leaves = _tensors(Case(geometry, 2, 3, (3, 3), 0), 2, torch.float64)
    assert torch.autograd.gradcheck(lambda *args: evaluate_factored(*args, geometry), leaves)


def test_many_pieces_are_as_accurate_as_one_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = _tensors(Case(SQUARE, 64, 5, (4, 4), 0), 3, torch.bfloat16)
    exact = _results("plain", [leaf.detach().double().requires_grad_() for leaf in leaves], SQUARE)
    found = []
    for blocks in (Blocks(1 << 20, 1 << 20, 64), Blocks(1, 1, 1)):
        _cut(monkeypatch, blocks)
        found.append(_results("hidden", leaves, SQUARE))
    for one, many, expected in zip(*found, exact, strict=True):
        errors = [((got.double() - expected).norm() / expected.norm()).item() for got in (one, many)]
        assert many.dtype == torch.bfloat16
        assert errors[1] <= max(1.5 * errors[0], 5e-3)


def test_second_derivatives_are_refused() -> None:
    leaves = _tensors(Case(SQUARE, 2, 5, (4, 4), 0), 2, torch.float32)
    out = evaluate_factored(*leaves, SQUARE)
    with pytest.raises(StrategyError, match=r"create_graph=True.*force\(\"plain\"\)"):
        torch.autograd.grad(out.sum(), leaves, create_graph=True)


def test_only_wanted_gradients() -> None:
    leaves = _tensors(Case(SQUARE, 3, 5, (4, 4), 0), 2, torch.float64)
    _, _, _, _, expected = _results("plain", leaves, SQUARE)
    x, coefficients, factors, cells = (leaf.detach() for leaf in leaves)
    cells.requires_grad_()
    out = evaluate_factored(x, coefficients, factors, cells, SQUARE)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out))
    assert x.grad is None
    _assert_close(cells.grad, expected, 1e-12)


def test_other_memory_formats() -> None:
    leaves = _tensors(Case(SQUARE, 4, 5, (6, 5), 0), 3, torch.float64)
    expected = _results("plain", leaves, SQUARE)
    wide = torch.zeros(8, 8, 6, 10, dtype=torch.float64, device=DEVICE)
    wide[::2, :, :, ::2] = leaves[0].detach()
    for odd in (leaves[0].detach().to(memory_format=torch.channels_last), wide[::2, :, :, ::2]):
        assert not odd.is_contiguous()
        found = _results("hidden", [odd.requires_grad_(), *leaves[1:]], SQUARE)
        for got, exact in zip(found, expected, strict=True):
            _assert_close(got, exact, 1e-12)


def test_autocast_computes_in_its_type_and_keeps_gradients_in_theirs() -> None:
    layer = _trained(Conv2d(16, 16, 3, padding=1, config=WarehouseConfig(2)), 0.3)
    x = torch.randn(8, 16, 6, 6, device=DEVICE)
    expected = _step(layer, x, "plain")
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16), force("hidden"):
        out = layer(x)
    layer.zero_grad(set_to_none=True)
    assert out.dtype == torch.bfloat16
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out))
    assert (out - expected["out"]).abs().max() <= 0.05 * expected["out"].abs().max()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - expected[name]).abs().max() <= 0.1 * expected[name].abs().max() + 0.05, name


def test_nothing_of_the_size_of_a_kernel_is_kept_for_any_sample() -> None:
    layer, batch = Conv2d(32, 32, 3, config=WarehouseConfig(4), device=DEVICE), 64
    x, sizes = torch.randn(batch, 32, 5, 5, device=DEVICE), []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), force("hidden"):
        layer(x)
    kernels = batch * 32 * 32 * 9 * 4
    known = (x.untyped_storage().nbytes(), *(parameter.nbytes for parameter in layer.parameters()))
    assert sizes
    assert max(size for size in sizes if size not in known) < kernels / 4


def _attention(**changes: object) -> Attention:
    shape = replace(AttentionShape(16, mixtures=4, cells=552, hidden=16), **changes)
    return Attention(shape, torch.zeros(4, shape.cells, dtype=torch.bool), device="meta")


def test_multiply_adds_decide_whether_it_is_thought_of() -> None:
    assert hidden.saves(128, _attention())
    assert not hidden.saves(16, _attention())  # the units themselves cost as much as all mixtures
    assert not hidden.saves(128, _attention(cells=17))  # no more cells than units


def test_obstacles() -> None:
    assert hidden.obstacle(_attention()) is None
    assert "given" in (hidden.obstacle(None) or "")
    assert "'softmax'" in (hidden.obstacle(_attention(function="softmax")) or "")
    assert "own cells" in (hidden.obstacle(_attention(own_cells_only=True)) or "")
    attention = _attention()
    handle = attention.register_forward_hook(lambda *_: None)
    assert "hook" in (hidden.obstacle(attention) or "")
    handle.remove()
    assert hidden.obstacle(attention) is None


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (WarehouseConfig(2, attention="softmax"), "'softmax'; 'caf' is wanted"),
        (WarehouseConfig(2, sharing="none"), "own cells only"),
    ],
)
def test_forced_where_it_cannot_be_is_refused(config: WarehouseConfig, why: str) -> None:
    layer = Conv2d(8, 8, 3, config=config, device=DEVICE)
    with pytest.raises(StrategyError, match=rf"\(8, 8, 3, 3\) cannot be hidden: .*{why}"), force("hidden"):
        layer(torch.randn(2, 8, 5, 5, device=DEVICE))
    x, attention, cells = Case(SQUARE, 2, 5, (4, 4), 0).tensors(torch.float32)
    with pytest.raises(StrategyError, match="cannot be hidden: its attentions are given"), force("hidden"):
        evaluate(x, attention, cells, SQUARE)
