"""Calls like the one before take a short way; whatever has changed since is seen."""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import kernelwarehouse as kw
from compiled_kernels import COMPILED
from kernelwarehouse import layers
from kernelwarehouse.assemble import route_table
from kernelwarehouse.assemble.basis import Prepared
from kernelwarehouse.assemble.registry import BASIS
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.layers import Conv1d, Conv2d, Conv3d, Linear, WarehouseLayer
from kernelwarehouse.padding import padded_batch

pytestmark = pytest.mark.skipif(not COMPILED, reason="without compiled kernels every call goes the long way")

LAYERS: dict[str, tuple[Callable[..., WarehouseLayer], tuple[int, ...]]] = {
    "one position": (partial(Conv2d, 16, 32, 1), (2, 16, 6, 5)),
    "3x3": (partial(Conv2d, 16, 16, 3, padding=1), (2, 16, 6, 5)),
    "strided": (partial(Conv2d, 16, 16, 3, stride=2, padding=1, padding_mode="circular"), (2, 16, 6, 5)),
    "depth-wise": (partial(Conv2d, 16, 16, 3, padding=1, groups=16), (1, 16, 6, 5)),
    "one axis": (partial(Conv1d, 16, 16, 3), (2, 16, 9)),
    "three axes": (partial(Conv3d, 8, 8, 3, padding=1), (1, 8, 3, 4, 5)),
    "linear": (partial(Linear, 16, 24), (2, 5, 16)),
    "odd sizes": (partial(Conv2d, 5, 7, 3), (2, 5, 6, 5)),
}


def made(name: str, **settings: Any) -> tuple[WarehouseLayer, Tensor]:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make(config=WarehouseConfig(1, **settings)).eval()
    kw.set_temperature(layer, 0.0)
    for key, tensor in layer.state_dict().items():
        if key.endswith(("running_mean", "fc2.bias", "norm.bias", "bias")):
            tensor.copy_(0.3 * torch.randn(tensor.shape))
    return layer, torch.randn(shape)


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call that goes the long way."""
    calls: list[int] = []
    evaluate_layer = layers.evaluate_layer

    def counted(*arguments: Any) -> Any:
        calls.append(len(calls))
        return evaluate_layer(*arguments)

    monkeypatch.setattr(layers, "evaluate_layer", counted)
    return calls


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_second_call_takes_the_short_way(
    name: str, mode: Callable[[], AbstractContextManager[None]], long_ways: list[int]
) -> None:
    layer, x = made(name)
    with mode():
        first, route = layer(x), layer.route
        assert len(long_ways) == 1
        assert torch.equal(layer(x), first)
        other = layer(2 * x)
        assert len(long_ways) == 1
        assert layer.route == route
        with kw.force("plain"):
            torch.testing.assert_close(other, layer(2 * x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"attention": "softmax"}, {"norm": "layer"}], ids=["softmax", "norm"])
@torch.no_grad()
def test_branches_that_are_not_compiled_go_the_long_way(settings: dict[str, Any], long_ways: list[int]) -> None:
    layer, x = made("3x3", **settings)
    assert torch.equal(layer(x), layer(x))
    assert len(long_ways) == 2


def _new_cells(layer: WarehouseLayer) -> None:
    layer.warehouse.cells = nn.Parameter(layer.warehouse.cells.detach() * 2)


def _computed_cells(layer: WarehouseLayer) -> None:
    class Twice(nn.Module):
        def forward(self, cells: Tensor) -> Tensor:
            return 2 * cells

    parametrize.register_parametrization(layer.warehouse, "cells", Twice())


def _other_fc1(layer: WarehouseLayer) -> None:
    fc1 = layer.attention.fc1
    layer.attention.fc1 = nn.Sequential(nn.Linear(fc1.in_features, fc1.out_features, bias=False))  # type: ignore[assignment]


def _prepared(layer: WarehouseLayer) -> None:
    layer.prepared = Prepared.of(layer.attention, layer.warehouse.cells, layer.geometry)


def _prepared_and_changed(layer: WarehouseLayer) -> None:
    _prepared(layer)
    for _ in range(2):
        layer(torch.ones(2, 16, 6, 5))
    layer.warehouse.cells.mul_(3)


CHANGES: dict[str, Callable[[Any], object]] = {
    "cells in place": lambda layer: layer.warehouse.cells.mul_(2),
    "data of cells": lambda layer: setattr(layer.warehouse.cells, "data", layer.warehouse.cells.data * 2),
    "new cells": _new_cells,
    "computed cells": _computed_cells,
    "logits in place": lambda layer: layer.attention.fc2.bias.mul_(-2),
    "new logits": lambda layer: setattr(layer.attention.fc2, "weight", nn.Parameter(-layer.attention.fc2.weight)),
    "running mean": lambda layer: layer.attention.norm.running_mean.add_(1),
    "statistics of the batch": lambda layer: layer.attention.norm.train(),
    "another norm": lambda layer: setattr(layer.attention, "norm", nn.LayerNorm(16)),
    "another first layer": _other_fc1,
    "temperature": lambda layer: kw.set_temperature(layer, 0.5),
    "stride": lambda layer: setattr(layer, "stride", 2),
    "padding": lambda layer: setattr(layer, "padding", (2, 0)),
    "bias": lambda layer: layer.bias.add_(1),
    "prepared": _prepared,
    "prepared and changed": _prepared_and_changed,
    "cast there and back": lambda layer: layer.double().float(),
}


@pytest.fixture
def by_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A basis is used wherever there is one."""
    monkeypatch.setenv(route_table.VARIABLE, route_table.BY_RULE)
    with route_table.keeping({}):  # what was measured before is not asked for
        yield


@pytest.mark.usefixtures("by_rule")
@pytest.mark.parametrize("name", ["one position", "3x3"])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_of_the_layer_are_seen(name: str, change: str) -> None:
    layer, x = made(name)
    before = layer(x)
    layer(x)
    CHANGES[change](layer)
    after = layer(x)
    fresh = copy.deepcopy(layer)  # which remembers nothing
    assert fresh.__dict__["_repetition"] is None
    torch.testing.assert_close(after, fresh(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x), after, rtol=1e-4, atol=1e-5)
    alike = after.shape == before.shape and torch.allclose(after, before, rtol=1e-4, atol=1e-5)
    assert alike == (change in ("prepared", "cast there and back"))


@pytest.mark.parametrize("part", ["attention", "attention.fc1", "attention.norm", "attention.fc2"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@torch.no_grad()
def test_hooks_are_called(part: str, kind: str) -> None:
    layer, x = made("3x3")
    layer(x)
    layer(x)
    seen: list[int] = []
    handle = getattr(layer.get_submodule(part), kind)(lambda *_: seen.append(1))
    layer(x)
    handle.remove()
    layer(x)
    assert seen == [1]


@pytest.mark.parametrize(
    "around",
    [
        torch.enable_grad,
        partial(kw.force, "plain"),
        partial(kw.force, "grouped"),
        partial(torch.autocast, "cpu", torch.float16),
        partial(route_table.keeping, {}),
        partial(padded_batch, [(6, 5), (3, 4)], (6, 5)),
    ],
    ids=["gradients", "definition", "forced", "autocast", "run", "padded"],
)
@torch.no_grad()
def test_surroundings_are_seen(around: Callable[[], AbstractContextManager[Any]], long_ways: list[int]) -> None:
    layer, x = made("3x3")
    before = layer(x)
    layer(x)
    taken = len(long_ways)
    with around():
        inside = layer(x)
        wanted = copy.deepcopy(layer)(x)
    padded = around.func is padded_batch if isinstance(around, partial) else False
    assert len(long_ways) == taken + (1 if padded else 2)  # sizes of images change what is seen, not how
    torch.testing.assert_close(inside, wanted)
    if around is torch.enable_grad:
        assert inside.requires_grad
    if padded:
        assert not torch.allclose(inside, before, atol=1e-3)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:1],
        lambda x: x[..., :-1],
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: nn.Parameter(x),
        lambda x: x[:0],
        lambda x: x[0],
    ],
    ids=["batch", "size", "channels last", "order", "kind of tensor", "empty", "one sample"],
)
@torch.no_grad()
def test_other_inputs_are_seen(other: Callable[[Tensor], Tensor], long_ways: list[int]) -> None:
    layer, x = made("3x3")
    with nullcontext() if other(x).numel() else kw.force("plain"):
        wanted = copy.deepcopy(layer)(other(x))
    layer(x)
    layer(x)
    taken = len(long_ways)
    torch.testing.assert_close(layer(other(x)), wanted, rtol=1e-4, atol=1e-5)
    assert len(long_ways) == taken + 1
    torch.testing.assert_close(layer(other(x)), wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_other_types_are_seen() -> None:
    layer, x = made("3x3")
    layer(x)
    layer(x)
    layer.double()
    torch.testing.assert_close(layer(x.double()), copy.deepcopy(layer)(x.double()))


@torch.no_grad()
def test_threads_are_seen(long_ways: list[int]) -> None:
    layer, x = made("3x3")
    layer(x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        layer(x)
    finally:
        torch.set_num_threads(threads)
    assert len(long_ways) == 2


@pytest.mark.usefixtures("by_rule")
@torch.no_grad()
def test_bases_are_used_and_given_back(long_ways: list[int]) -> None:
    """What a layer remembers keeps no memory alive that it would otherwise give back."""
    layer, x = made("3x3")
    _prepared(layer)
    assert torch.equal(layer(x), layer(x))
    assert len(long_ways) == 1
    assert layer.prepared is not None
    assert layer.route is not None
    assert layer.route.forward == BASIS
    kept = weakref.ref(layer.prepared)
    layer.train()
    assert kept() is None


@pytest.mark.usefixtures("by_rule")
@torch.no_grad()
def test_bases_are_taken_as_soon_as_they_can_be() -> None:
    layer, x = made("3x3")
    for _ in range(2):
        layer(x)
    _prepared(layer)
    routes = []
    for hook in (False, True, False):
        handle = layer.attention.fc2.register_forward_hook(lambda *_: None) if hook else None
        for _ in range(2):
            layer(x)
            assert layer.route is not None
            routes.append(layer.route.forward == BASIS)
        if handle is not None:
            handle.remove()
    assert routes == [True, True, False, False, True, True]


@torch.no_grad()
def test_run_that_begins_during_a_call_is_seen(monkeypatch: pytest.MonkeyPatch, long_ways: list[int]) -> None:
    layer, x = made("3x3")
    counted = layers.evaluate_layer

    def interrupted(*arguments: Any) -> Any:
        result = counted(*arguments)
        with route_table.keeping({}):
            return result

    monkeypatch.setattr(layers, "evaluate_layer", interrupted)
    layer(x)
    layer(x)
    assert len(long_ways) == 2


@torch.no_grad()
def test_copies_remember_nothing() -> None:
    layer, x = made("3x3")
    layer(x)
    assert layer.__dict__["_repetition"] is not None
    assert copy.deepcopy(layer).__dict__["_repetition"] is None
