"""prepare_inference: the same outputs, within its limit, and undone when it must be."""

import copy

import pytest
import torch
from torch import Tensor, nn

import kernelwarehouse as kw
from compiled_kernels import CAN_BE, COMPILED, pretend
from devices import DEVICE
from kernelwarehouse.assemble import force, native
from kernelwarehouse.assemble.basis import Prepared, make_basis, suits_panels, whole_bits
from kernelwarehouse.assemble.branch import coefficients
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
    return _trained(kw.convert(model, kw.plan(model, config))).to(DEVICE)


def _images(batch: int = 64, seed: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 12, 12, generator=generator, dtype=dtype).to(DEVICE)


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
        "native, 3x3 at stride 1, many rows": (Conv2d(16, 16, 3, config=WarehouseConfig(2)), (17, 16, 5, 5)),
        "groups": (Conv2d(8, 12, 3, groups=2, config=WarehouseConfig(3)), (2, 8, 6, 6)),
        "linear": (Linear(6, 10, config=WarehouseConfig(8)), (3, 7, 6)),
    }


@pytest.mark.parametrize("compiled", CAN_BE)
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", _layers())
@torch.no_grad()
def test_basis_gives_what_the_cells_give(
    name: str, compact: bool, batch: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is kept for batches of any size, also where compiled kernels that it is for are not used after all.

    Output channels of any scale are as exact as the others.
    """
    layer, shape = _layers()[name]
    _trained(layer).to(DEVICE)
    rows = layer.warehouse.cells.shape[1]
    layer.warehouse.cells.mul_(
        torch.logspace(-6, 3, rows).view(-1, *[1] * (layer.warehouse.cells.dim() - 2)).to(DEVICE)
    )
    panels = suits_panels(layer.warehouse.cells, layer.geometry, batch)
    bits = whole_bits(layer.warehouse.cells, layer.geometry, compact, panels)
    if COMPILED and DEVICE.type == "cpu" and name == "native":
        assert panels == (batch == 64)
    pretend(monkeypatch, compiled)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    fused = native.obstacle(x, layer.geometry) is None
    assert fused == (compiled and name.startswith("native") and DEVICE.type == "cpu")
    with force("plain"):
        expected = layer.double()(x.double())
        layer.float()
    pooled = x.mean(1) if isinstance(layer, Linear) else x.flatten(2).mean(2)
    if layer.bias is not None:
        expected = expected - (layer.bias if isinstance(layer, Linear) else layer.bias.view(-1, 1, 1))
    prepared = Prepared.of(layer.attention, layer.warehouse.cells, layer.geometry, bits, panels)
    v, scale = coefficients(layer.attention, pooled)
    ways = prepared.strategies(x, layer.geometry)
    assert [way.name for way in ways] == (["basis", "winograd basis"] if fused and "3x3" in name else ["basis"])
    for way in ways:
        error = (way.forward(x, v, scale, layer.warehouse.cells, layer.geometry) - expected).abs()
        channels = [axis for axis in range(x.dim()) if axis != (2 if isinstance(layer, Linear) else 1)]
        assert (error.amax(channels) <= (1e-3 if compact else 1e-5) * expected.abs().amax(channels)).all()


@torch.no_grad()
def test_whole_numbers_take_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelwarehouse.inference._gain", lambda *asked: 1.0)  # which depends on the machine
    model = _network()
    x = _images(7, seed=3)
    before = model(x)
    found = {}
    for compact in (False, True):
        found[compact] = report = prepare_inference(model, batch=7, compact=compact)
        kept = [layer.prepared for layer in _prepared(model) if layer.prepared is not None]
        assert sum(each.stored.nbytes for each in kept) == report.bytes
        if COMPILED and DEVICE.type == "cpu":
            kind = "compact basis" if compact else "24-bit basis"
            assert [each.stored.kind for each in kept[1:]] == [kind] * (len(kept) - 1)  # the first has 3 input channels
        assert (model(x) - before).abs().max() <= (1e-3 if compact else 1e-5) * before.abs().max()
    assert found[False].layers == found[True].layers
    double = prepare_inference(model.double(), batch=7)  # not compiled
    assert double.layers == found[True].layers
    if COMPILED and DEVICE.type == "cpu":
        assert 0.24 * double.bytes < found[True].bytes < 0.3 * double.bytes
        assert 0.37 * double.bytes < found[False].bytes < 0.43 * double.bytes
        assert "compact bases" in str(found[True])


@torch.no_grad()
def test_what_is_prepared_in_half_precision_stays_as_it_is() -> None:
    layer = _trained(Conv2d(16, 16, 1, config=WarehouseConfig(4))).bfloat16()
    bits = whole_bits(layer.warehouse.cells, layer.geometry, compact=True, panels=False)
    assert bits is None
    stored = Prepared.of(layer.attention, layer.warehouse.cells, layer.geometry, bits).stored
    assert (stored.kind, stored.numbers.dtype) == ("basis", torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize(("low_rank", "tau"), [(None, 0.0), (0.25, 0.0), (None, 0.4), (None, 1.0)])
def test_outputs_stay_the_same(low_rank: float | None, tau: float) -> None:
    model = _network(low_rank=low_rank).double()
    kw.set_temperature(model, tau)
    x = _images(4, 3, torch.float64)
    before = model(x)
    report = prepare_inference(model, batch=64)
    assert len(_prepared(model)) == len(report.layers) > 0
    after = model(x.repeat(16, 1, 1, 1))[:4]
    assert (after - before).abs().max() <= 1e-10 * before.abs().max()


def test_basis_is_affine_part_of_the_logits() -> None:
    layer = _trained(Conv2d(16, 16, 1, config=WarehouseConfig(4))).to(DEVICE).double()
    attention, cells = layer.attention, layer.warehouse.cells
    basis = make_basis(attention, cells, layer.geometry)
    v = torch.rand(3, attention.shape.hidden, dtype=torch.float64).to(DEVICE)
    unscaled = torch.einsum("bk,oskcd->boscd", torch.cat([v, torch.ones_like(v[:, :1])], 1), basis.flatten(4))
    direct = torch.einsum("bmn,ncd->bmcd", attention.logits(v)[..., :-1], cells.flatten(2))
    torch.testing.assert_close(unscaled.flatten(1, 2), direct, rtol=1e-10, atol=1e-12)


def test_memory_limit_is_kept() -> None:
    model = _network()
    full = prepare_inference(model, batch=64)
    kept = sum(layer.prepared.stored.nbytes for layer in _prepared(model) if layer.prepared is not None)
    assert kept == full.bytes
    half = prepare_inference(model, memory_limit=full.bytes // 2, batch=64)
    assert 0 < half.bytes <= full.bytes // 2
    assert set(half.layers) < set(full.layers)
    assert prepare_inference(model, memory_limit=1, batch=64).layers == ()
    assert _prepared(model) == []


@pytest.mark.skipif(not COMPILED or DEVICE.type != "cpu", reason="panels are for compiled kernels")
@pytest.mark.parametrize("compact", [False, True])
@torch.no_grad()
def test_bases_are_laid_out_for_the_batch(compact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of other sizes get the same outputs."""
    monkeypatch.setattr("kernelwarehouse.inference._gain", lambda *asked: 1.0)  # which depends on the machine
    layer = _trained(Conv2d(32, 64, 3, config=WarehouseConfig(4)))
    narrow = _trained(Conv2d(32, 24, 3, config=WarehouseConfig(4)))  # ends within a panel
    one = _trained(Conv2d(32, 64, 1, config=WarehouseConfig(4)))
    model = nn.ModuleList([layer, narrow, one]).eval()
    for batch, panels in ((7, False), (8, True)):
        report = prepare_inference(model, batch=batch, compact=compact)
        assert len(report.layers) == 3
        assert [each.prepared is not None and each.prepared.stored.panels for each in (layer, narrow, one)] == [
            panels,
            False,
            False,
        ]
        for size in (1, 9):
            x = torch.randn(size, 32, 5, 5, generator=torch.Generator().manual_seed(size))
            with force("plain"):
                expected = layer(x)
            assert (layer(x) - expected).abs().max() <= (3e-4 if compact else 1e-5) * expected.abs().max()


@torch.no_grad()
def test_memory_limit_is_kept_where_numbers_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelwarehouse.inference._gain", lambda *asked: 1.0)  # which depends on the machine
    model = nn.Sequential(_trained(Conv2d(16, 16, 1, config=WarehouseConfig(2)))).to(DEVICE).eval()
    whole = prepare_inference(model)
    assert len(whole.layers) == 1
    model[0].warehouse.cells[0, 0, 0] = float("nan")
    report = prepare_inference(model, memory_limit=whole.bytes)
    assert report.bytes <= whole.bytes
    assert len(report.layers) == len(_prepared(model)) == (0 if COMPILED and DEVICE.type == "cpu" else 1)


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


def _step(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()


def _replace_cells(model: nn.Module) -> None:
    for layer in _prepared(model):
        layer.warehouse.cells = nn.Parameter(layer.warehouse.cells.detach() * 1.5)


def _replace_warehouses(model: nn.Module) -> None:
    for layer in _prepared(model):
        layer.warehouse = copy.deepcopy(layer.warehouse)
        layer.warehouse.cells.data *= 1.5


def _replace_logits(model: nn.Module) -> None:
    for layer in _prepared(model):
        fc2 = layer.attention.fc2
        layer.attention.fc2 = nn.Linear(fc2.in_features, fc2.out_features).to(DEVICE)


def _parametrise_logits(model: nn.Module) -> None:
    for layer in _prepared(model):
        layer.attention.fc2.weight.data *= 1.5
        nn.utils.parametrizations.weight_norm(layer.attention.fc2)


def _replace_attentions(model: nn.Module) -> None:
    for layer in _prepared(model):
        layer.attention = copy.deepcopy(layer.attention)
        layer.attention.fc2.weight.data += 0.2


def _negated(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return -output


CHANGES = {
    "cells": lambda model: [layer.warehouse.cells.mul_(1.5) for layer in _prepared(model)],
    "logits": lambda model: [layer.attention.fc2.weight.add_(0.2) for layer in _prepared(model)],
    "temperature": lambda model: kw.set_temperature(model, 0.5),
    "assigned state": lambda model: model.load_state_dict(
        {name: value * 2 if value.is_floating_point() else value for name, value in model.state_dict().items()},
        assign=True,
    ),
    "replaced cells": _replace_cells,
    "replaced warehouses": _replace_warehouses,
    "replaced logits": _replace_logits,
    "parametrised logits": _parametrise_logits,
    "replaced attentions": _replace_attentions,
    "replaced data": lambda model: [setattr(p, "data", p.data * 1.5) for p in model.parameters()],
    "optimiser": lambda model: _step(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    "fused optimiser": lambda model: _step(model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True)),
    "hook on the attention": lambda model: [
        layer.attention.register_forward_hook(_negated) for layer in _prepared(model)
    ],
}


@torch.no_grad()
@pytest.mark.parametrize("low_rank", [None, 0.25])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: str, low_rank: float | None) -> None:
    model = _network(low_rank=low_rank)
    x = _images()
    prepare_inference(model, batch=64)
    assert _prepared(model)
    before = model(x)
    CHANGES[change](model)
    with force("plain"):
        expected = model(x)
    scale = expected.abs().max().item()
    assert (before - expected).abs().max() > 0.01 * scale
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3 * scale)


@torch.no_grad()
def test_memory_of_replaced_values_is_not_used_again() -> None:
    """New values at the old address would pass for the old ones."""
    model = _network()
    prepare_inference(model, batch=64)
    for cells in {layer.warehouse.cells for layer in _prepared(model)}:
        before = cells.data_ptr()
        cells.data = cells.data * 1.5
        others = [torch.empty_like(cells) for _ in range(50)]
        assert before not in [other.data_ptr() for other in others]


@torch.no_grad()
def test_parameters_handed_in_for_a_call_are_noticed() -> None:
    model = _network()
    x = _images()
    prepare_inference(model, batch=64)
    before = model(x)
    others = {name: parameter * 1.2 for name, parameter in model.named_parameters()}
    with force("plain"):
        expected = torch.func.functional_call(model, others, (x,), tie_weights=False)
    found = torch.func.functional_call(model, others, (x,), tie_weights=False)
    assert (before - expected).abs().max() > 0.01 * expected.abs().max()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    layer = _prepared(model)[0]
    assert layer.prepared is not None
    assert layer.prepared.fresh(layer.attention, layer.warehouse.cells)  # the model's own are back
    torch.testing.assert_close(model(x), before)


def test_training_another_model_leaves_the_bases_alone() -> None:
    model, other = _network(), _network()
    prepare_inference(model, batch=64)
    _step(other, torch.optim.Adam(other.parameters(), fused=True))
    for layer in _prepared(model):
        assert layer.prepared is not None
        assert layer.prepared.fresh(layer.attention, layer.warehouse.cells)


def test_weights_that_are_computed_are_not_prepared() -> None:
    model = _network()
    for layer in model.modules():
        if isinstance(layer, WarehouseLayer):
            nn.utils.parametrizations.weight_norm(layer.attention.fc2)
    assert prepare_inference(model, batch=64).layers == ()


@torch.inference_mode()
def test_models_made_in_inference_mode() -> None:
    model = _network()
    x = _images()
    expected = model(x)
    assert prepare_inference(model, batch=64).layers
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_gradients_still_flow() -> None:
    model = _network()
    prepare_inference(model, batch=64)
    x = _images().requires_grad_()
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
    with pytest.raises(kw.KernelWarehouseError, match="compact is 16; True or False"):
        prepare_inference(model, compact=16)  # type: ignore[arg-type]
    with pytest.raises(kw.KernelWarehouseError, match="no converted layers"):
        prepare_inference(nn.Linear(2, 2).eval())
