"""prepare_inference: the same outputs, within its limit, and undone when it must be."""

import copy

import pytest
import torch
from torch import Tensor, nn

import kernelwarehouse as kw
from compiled_kernels import CAN_BE, pretend
from kernelwarehouse.assemble import force, hidden, native
from kernelwarehouse.assemble.hidden import Prepared, make_basis
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.inference import prepare_inference
from kernelwarehouse.layers import Conv2d, Linear, WarehouseLayer


def _trained(layer: nn.Module) -> nn.Module:
    """In eval mode at temperature 0, with statistics and biases that are not those of a new layer."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in layer.state_dict().items():
        if name.endswith(("running_mean", "fc2.bias", "norm.bias", "offset")):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    kw.set_temperature(layer, 0.0)
    return layer.eval()


def _network(budget: float = 4.0, low_rank: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    stages = [nn.Conv2d(3, 16, 3, padding=1)]
    for width in (16, 32):
        stages += [
            nn.Conv2d(stages[-1].out_channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        stages += [nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3)]
    model = nn.Sequential(*stages)
    config = WarehouseConfig(budget=budget, low_rank=low_rank)
    return _trained(kw.convert(model, kw.plan(model, config)))


def _prepared(model: nn.Module) -> list[WarehouseLayer]:
    return [layer for layer in model.modules() if isinstance(layer, WarehouseLayer) and layer.prepared is not None]


def _layers() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(1)
    return {
        "native": (Conv2d(16, 32, 3, padding=1, stride=2, config=WarehouseConfig(4)), (5, 16, 9, 8)),
        "native point-wise, several cells wide": (
            Conv2d(32, 48, 1, config=WarehouseConfig(2, in_ratio=0.5, out_ratio=1 / 3)),
            (3, 32, 5, 5),
        ),
        "native, many rows": (Conv2d(16, 16, 3, config=WarehouseConfig(2)), (17, 16, 5, 5)),
        "groups": (Conv2d(8, 12, 3, groups=2, config=WarehouseConfig(3)), (2, 8, 6, 6)),
        "linear": (Linear(6, 10, config=WarehouseConfig(8)), (3, 7, 6)),
    }


@pytest.mark.parametrize("compiled", CAN_BE)
@pytest.mark.parametrize("name", _layers())
@torch.no_grad()
def test_basis_gives_what_the_cells_give(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compiled)
    layer, shape = _layers()[name]
    _trained(layer)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    fused = native.obstacle(x, layer.geometry) is None
    assert fused == (compiled and name.startswith("native"))
    with force("plain"):
        expected = layer.double()(x.double())
        layer.float()
    pooled = x.mean(1) if isinstance(layer, Linear) else x.flatten(2).mean(2)
    prepared = Prepared.of(layer.attention, layer.warehouse.cells, layer.geometry)
    v, scale = hidden._coefficients(layer.attention, pooled)
    if fused:
        out = native.forward_basis(x, v, scale, prepared.basis, layer.geometry)
    else:
        out = hidden._forward(x, v, scale, prepared.basis, layer.geometry)
    if layer.bias is not None:
        out = out + (layer.bias if isinstance(layer, Linear) else layer.bias.view(-1, 1, 1))
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize(("low_rank", "tau"), [(None, 0.0), (0.25, 0.0), (None, 0.4), (None, 1.0)])
def test_outputs_stay_the_same(low_rank: float | None, tau: float) -> None:
    model = _network(low_rank=low_rank).double()
    kw.set_temperature(model, tau)
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    before = model(x)
    report = prepare_inference(model, batch=64)
    assert len(_prepared(model)) == len(report.layers) > 0
    after = model(x.repeat(16, 1, 1, 1))[:4]
    assert (after - before).abs().max() <= 1e-10 * before.abs().max()


def test_basis_is_affine_part_of_the_logits() -> None:
    layer = _trained(Conv2d(16, 16, 1, config=WarehouseConfig(4))).double()
    attention, cells = layer.attention, layer.warehouse.cells
    basis = make_basis(attention, cells, layer.geometry)
    v = torch.rand(3, attention.shape.hidden, dtype=torch.float64)
    unscaled = torch.einsum("bk,oskcd->boscd", torch.cat([v, torch.ones(3, 1)], 1).double(), basis.flatten(4))
    direct = torch.einsum("bmn,ncd->bmcd", attention.logits(v)[..., :-1], cells.flatten(2))
    torch.testing.assert_close(unscaled.flatten(1, 2), direct, rtol=1e-10, atol=1e-12)


def test_memory_limit_is_kept() -> None:
    model = _network()
    full = prepare_inference(model, batch=64)
    kept = sum(layer.prepared.basis.nbytes for layer in _prepared(model) if layer.prepared is not None)
    assert kept == full.bytes
    half = prepare_inference(model, memory_limit=full.bytes // 2, batch=64)
    assert 0 < half.bytes <= full.bytes // 2
    assert set(half.layers) < set(full.layers)
    assert prepare_inference(model, memory_limit=1, batch=64).layers == ()
    assert _prepared(model) == []


def test_training_mode_undoes_it() -> None:
    model = _network()
    prepare_inference(model, batch=64)
    assert _prepared(model)
    model.eval()
    assert _prepared(model)
    model.train()
    assert _prepared(model) == []


def test_copies_and_state_carry_no_basis() -> None:
    model = _network()
    keys = list(model.state_dict())
    prepare_inference(model, batch=64)
    assert list(model.state_dict()) == keys
    assert _prepared(copy.deepcopy(model)) == []


@torch.no_grad()
@pytest.mark.parametrize("change", ["cells", "logits", "temperature"])
def test_changed_weights_are_noticed(change: str) -> None:
    model = _network()
    x = torch.randn(64, 3, 12, 12, generator=torch.Generator().manual_seed(4))
    prepare_inference(model, batch=64)
    if change == "cells":
        for layer in _prepared(model):
            layer.warehouse.cells.mul_(1.5)
    elif change == "logits":
        for layer in _prepared(model):
            layer.attention.fc2.bias.add_(0.5)
    else:
        kw.set_temperature(model, 0.5)
    with force("plain"):
        expected = model(x)
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    assert all(not layer.prepared.fresh() for layer in _prepared(model) if layer.prepared is not None)


def test_gradients_still_flow() -> None:
    model = _network()
    prepare_inference(model, batch=64)
    x = torch.randn(64, 3, 12, 12, requires_grad=True)
    model(x).sum().backward()
    assert isinstance(x.grad, Tensor)
    assert all(layer.warehouse.cells.grad is not None for layer in _prepared(model))


def test_errors_say_what_to_do() -> None:
    model = _network()
    with pytest.raises(kw.KernelWarehouseError, match=r"call model.eval\(\)"):
        prepare_inference(copy.deepcopy(model).train())
    for name, value in (("memory_limit", 0), ("memory_limit", float("nan")), ("batch", True)):
        with pytest.raises(kw.KernelWarehouseError, match=f"{name} is {value}"):
            prepare_inference(model, **{name: value})
    with pytest.raises(kw.KernelWarehouseError, match="no converted layers"):
        prepare_inference(nn.Linear(2, 2).eval())
