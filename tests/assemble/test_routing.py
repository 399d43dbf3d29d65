"""How a layer is evaluated: by rule, as measured, or as forced."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelwarehouse as kw
from compiled_kernels import COMPILED, pretend
from kernelwarehouse.assemble import (
    STRATEGIES,
    Geometry,
    evaluate,
    force,
    grouped,
    measure,
    native,
    planes,
    route,
    route_table,
    routing,
    rows,
)
from kernelwarehouse.assemble.basis import Prepared
from kernelwarehouse.assemble.measure import Times, choose
from kernelwarehouse.assemble.operator import evaluate_as_operator
from kernelwarehouse.assemble.route_table import Choice
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.layers import Conv2d
from kernelwarehouse.partition import Partition


def _geometry(out: int, inside: int, kernel: int, cell: tuple[int, int], groups: int = 1) -> Geometry:
    partition = Partition((out, inside, kernel, kernel), (*cell, 1, 1))
    return Geometry(partition, (1, 1), (kernel // 2,) * 2, (1, 1), groups)


def _cells(geometry: Geometry, count: int = 5) -> Tensor:
    return torch.zeros(count, *geometry.partition.cell_shape)


def _way(shape: tuple[int, ...], geometry: Geometry, **kind: object) -> str:
    return route(torch.zeros(shape, **kind), _cells(geometry), geometry).forward


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize(
    ("geometry", "shape", "compiled", "pure"),
    [
        (_geometry(32, 16, 3, (16, 16)), (2, 16, 8, 8), "native", "matmul"),
        (_geometry(32, 16, 3, (16, 16)), (2, 16, 40, 40), "native", "grouped"),
        (_geometry(32, 16, 1, (16, 16)), (2, 16, 20, 20), "native", "pointwise"),
        (_geometry(6, 3, 3, (3, 3)), (2, 3, 8, 8), "matmul", "matmul"),
        (_geometry(6, 3, 3, (3, 3)), (2, 3, 40, 40), "grouped", "grouped"),
        (_geometry(16, 1, 3, (8, 1), groups=16), (2, 16, 8, 8), "depthwise", "grouped"),
        (replace(_geometry(16, 1, 3, (8, 1), groups=16), stride=(2, 2)), (2, 16, 8, 8), "depthwise", "grouped"),
        (replace(_geometry(16, 1, 3, (8, 1), groups=16), stride=(3, 3)), (2, 16, 8, 8), "grouped", "grouped"),
        (_geometry(16, 1, 5, (8, 1), groups=16), (2, 16, 8, 8), "grouped", "grouped"),
        (Geometry(Partition((6, 4), (3, 2))), (2, 5, 4), "matmul", "matmul"),
        (_geometry(32, 16, 3, (16, 16)), (0, 16, 8, 8), "plain", "plain"),
    ],
)
def test_rule(
    geometry: Geometry,
    shape: tuple[int, ...],
    compiled: str,
    pure: str,
    available: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With compiled kernels and without, whatever this machine has."""
    pretend(monkeypatch, available)
    answer = route(torch.zeros(shape), _cells(geometry), geometry)
    assert answer.forward == (compiled if available else pure)
    assert answer.reason


def test_other_types_do_without_the_compiled_kernels() -> None:
    geometry = _geometry(32, 16, 3, (16, 16))
    assert _way((2, 16, 8, 8), geometry, dtype=torch.float64) == "matmul"
    assert _way((2, 16, 8, 8), geometry, dtype=torch.bfloat16) == "grouped"
    assert _way((2, 16, 8, 8), geometry, device="meta") == "plain"


def test_force_nests_and_ends() -> None:
    geometry, shape = _geometry(32, 16, 3, (16, 16)), (2, 16, 8, 8)
    usual = _way(shape, geometry)
    assert usual not in ("plain", "grouped")
    with force("plain"):
        with force("grouped"):
            assert _way(shape, geometry) == "grouped"
        assert _way(shape, geometry) == "plain"
    assert _way(shape, geometry) == usual


def test_unknown_strategy_is_refused() -> None:
    with pytest.raises(StrategyError, match=f"no strategy 'fast'; there are {', '.join(STRATEGIES)}"), force("fast"):
        pass


@pytest.mark.parametrize(
    ("geometry", "why"),
    [
        (_geometry(16, 1, 3, (8, 1), groups=16), "16 groups"),
        (_geometry(6, 3, 3, (3, 3)), "3x3 channels"),
        (Geometry(Partition((8, 8, 3, 3), (8, 8, 3, 3)), (1, 1), (0, 0), (1, 1)), "3x3 positions wide"),
    ],
)
def test_native_where_it_cannot_be_is_refused(geometry: Geometry, why: str) -> None:
    x = torch.zeros(2, geometry.in_channels, 8, 8)
    with pytest.raises(StrategyError, match=why), force("native"):
        route(x, _cells(geometry), geometry)
    assert why in (native.obstacle(x, geometry) or "")


@pytest.mark.skipif(not COMPILED, reason="there are no compiled kernels here")
@pytest.mark.parametrize("way", [rows, planes], ids=lambda way: way.STRATEGY.name)
def test_rows_and_planes_are_for_kernels_of_one_position_whose_channels_are_not_last(way: Any) -> None:
    x, one, three = torch.zeros(2, 16, 8, 8), _geometry(32, 16, 1, (16, 16)), _geometry(32, 16, 3, (16, 16))
    assert way.obstacle(x, one) is None
    assert "channels are last" in (way.obstacle(x.to(memory_format=torch.channels_last), one) or "")
    assert "its kernel is (3, 3)" in (way.obstacle(x, three) or "")


@pytest.mark.parametrize(
    ("way", "geometry"),
    [
        ("native", _geometry(32, 16, 3, (16, 16))),
        ("winograd", _geometry(32, 16, 3, (16, 16))),
        ("rows", _geometry(32, 16, 1, (16, 16))),
        ("planes", _geometry(32, 16, 1, (16, 16))),
        ("depthwise", _geometry(16, 1, 3, (8, 1), groups=16)),
    ],
)
def test_compiled_where_there_are_no_kernels_is_refused(
    way: str, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, False)
    with pytest.raises(StrategyError, match="the kernels could not be built, or are turned off"), force(way):
        _way((2, 16, 8, 8), geometry)


def test_layers_say_which_way_they_took() -> None:
    layer = Conv2d(8, 8, 3, config=WarehouseConfig(1))
    assert layer.route is None
    with force("grouped"):
        layer(torch.randn(2, 8, 5, 5))
    assert layer.route is not None
    assert (layer.route.forward, layer.route.backward, layer.route.reason) == ("grouped", "grouped", "forced")


# Choosing from times


def _times(forward: dict[str, float], backward: dict[str, float] | None = None) -> Times:
    return Times(forward, backward or {})


def test_the_fastest_is_chosen_and_forward_and_backward_by_themselves() -> None:
    usual = Choice("native", "native")
    times = _times({"native": 1.0, "pointwise": 2.0}, {"native": 3.0, "pointwise": 2.0})
    assert choose(times, usual, STRATEGIES) == Choice("native", "pointwise")
    assert choose(_times({"native": 1.0, "pointwise": 0.5}), Choice("native"), STRATEGIES) == Choice("pointwise")


def test_a_backward_that_two_have_in_common_is_named_after_the_first() -> None:
    times = _times({"native": 1.0, "rows": 0.5, "pointwise": 2.0}, {"native": 1.0, "pointwise": 2.0})
    assert choose(times, Choice("pointwise", "pointwise"), STRATEGIES) == Choice("rows", "native")


def test_a_forward_that_two_have_in_common_is_named_after_the_first() -> None:
    times = _times({"native": 1.0, "pointwise": 2.0}, {"native": 1.0, "planes": 0.5, "pointwise": 2.0})
    assert choose(times, Choice("pointwise", "pointwise"), STRATEGIES) == Choice("native", "planes")


def test_what_is_hardly_faster_does_not_take_the_place_of_the_usual() -> None:
    assert choose(_times({"native": 1.0, "grouped": 0.97}), Choice("native"), STRATEGIES) == Choice("native")


def test_factors_are_mixed_where_both_ways_together_win() -> None:
    usual = Choice("native", "native")
    slow_forward = _times({"native": 1.0, "hidden": 1.5}, {"native": 3.0, "hidden": 1.0})
    assert choose(slow_forward, usual, STRATEGIES) == Choice("hidden", "hidden")
    slow_backward = _times({"native": 1.0, "hidden": 0.5}, {"native": 1.0, "hidden": 2.0})
    assert choose(slow_backward, usual, STRATEGIES) == usual


# Measuring


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kernel", "everywhere", "compiled"),
    [
        (3, {"grouped", "matmul"}, {"native", "winograd"}),
        (1, {"grouped", "matmul", "pointwise"}, {"native", "planes", "rows"}),
    ],
)
def test_every_candidate_is_measured_once_and_the_choice_kept(
    measuring: Path,
    kernel: int,
    everywhere: set[str],
    compiled: set[str],
    training: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, measured = Conv2d(16, 32, kernel, config=WarehouseConfig(2)), []
    x = torch.randn(2, 16, 6, 6, requires_grad=training)
    monkeypatch.setattr(routing, "measure", lambda *asked: measured.append(asked[0]) or measure.measure(*asked))
    for _ in range(2):
        with torch.set_grad_enabled(training):
            layer(x)
    [candidates] = measured
    names = {strategy.name for strategy in candidates}
    assert names == everywhere | (compiled if COMPILED else set())
    assert layer.route is not None
    assert layer.route.reason.startswith("measured: forward ")
    assert ("; backward " in layer.route.reason) == training
    # What two have in common, once.
    forward, _, backward = (
        layer.route.reason.removeprefix("measured: forward ").removesuffix(" ms").partition("; backward ")
    )
    assert {each.split()[0] for each in forward.split(", ")} == names - {"planes"}
    if training:
        assert {each.split()[0] for each in backward.split(", ")} == names - {"rows"}
    [(key, choice)] = route_table.read(measuring).items()
    assert key.endswith("training" if training else "inference")
    assert (choice.forward, choice.backward) == (layer.route.forward, layer.route.backward)
    # Another process of the machine reads what this one has found.
    route_table._of_machine.cache_clear()
    routing._answers.clear()
    with torch.set_grad_enabled(training):
        layer(x)
    assert layer.route.reason == "as chosen before"
    assert len(measured) == 1


@pytest.mark.parametrize("way", [evaluate, evaluate_as_operator])
def test_backward_is_measured_for_the_gradients_that_are_asked_for(
    measuring: Path, way: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside an operator no input requires a gradient, whatever compiled code needs of it."""
    asked, keys = [], set()

    def backward(*arguments: Any) -> tuple[Tensor | None, ...]:
        asked.append(arguments[-1])
        return grouped.backward(*arguments)

    monkeypatch.setitem(STRATEGIES, "grouped", Strategy("grouped", grouped.forward, backward))
    geometry = _geometry(32, 16, 3, (16, 16))
    for wants_input in (True, False):
        asked.clear()
        x, cells = torch.randn(2, 16, 6, 6, requires_grad=wants_input), _cells(geometry).requires_grad_()
        way(x, torch.randn(2, 18, 5), cells, geometry).sum().backward()
        assert set(asked) == {wants_input}
        [key] = {key for key in route_table.read(measuring) if "training" in key} - keys
        assert key.endswith("training" if wants_input else "training, no gradient of the input")
        keys.add(key)


def test_measuring_changes_nothing(measuring: Path) -> None:
    """Neither random numbers nor statistics nor gradients; and what comes out is the definition."""
    layer, x = Conv2d(16, 32, 3, config=WarehouseConfig(2)), torch.randn(40, 16, 6, 6, requires_grad=True)
    twin = Conv2d(16, 32, 3, config=WarehouseConfig(2))
    twin.load_state_dict(layer.state_dict())
    state = torch.get_rng_state()
    out = layer(x)
    assert "measured" in (layer.route.reason if layer.route else "")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in layer.parameters())
    with force("plain"):
        expected = twin(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), buffer)


def test_sizes_that_are_nearly_alike_share_a_choice(measuring: Path) -> None:
    layer = Conv2d(16, 32, 3, config=WarehouseConfig(2))
    with torch.no_grad():
        for batch, side in ((13, 18), (16, 18), (14, 17), (2, 18)):
            layer(torch.randn(batch, 16, side, side))
    assert len(route_table.read(measuring)) == 2


@pytest.mark.parametrize("bits, panels", [(None, False), (24, False), (16, False), (None, True), (16, True)])
def test_a_basis_is_timed_beside_the_others_and_can_be_pinned(
    measuring: Path, bits: int | None, panels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = Conv2d(64, 64, 3, config=WarehouseConfig(16)).eval(), torch.randn(2, 64, 4, 4)
    kind = (bits, panels) if COMPILED else (None, False)
    layer.prepared = Prepared.of(layer.attention, layer.warehouse.cells, layer.geometry, *kind)
    with torch.no_grad():
        layer(x)
        assert layer.route is not None
        assert "basis " in layer.route.reason
        [(key, choice)] = route_table.read(measuring).items()
        named = {None: " basis", 24: " 24-bit basis", 16: " compact basis"}[kind[0]] + (" in panels" if kind[1] else "")
        assert f" cells 64x64x1x1{named} " in key
        assert choice.forward == layer.route.forward
        for way in ("basis", "grouped", *(["winograd basis"] if COMPILED else [])):
            with route_table.keeping({key: Choice(way)}):
                layer(x)
                assert layer.route.forward == way
        monkeypatch.setenv(route_table.VARIABLE, route_table.BY_RULE)
        routing._answers.clear()
        layer(x)
    assert layer.route.forward == "basis"
    assert layer.route.reason.startswith("prepared")


def test_mixing_through_the_hidden_vector_is_a_candidate_where_it_saves(
    measuring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend_hidden_is_fast(candidates: list, *asked: object) -> Times:
        return _times({strategy.name: 0.1 if strategy.name == "hidden" else 1.0 for strategy in candidates})

    monkeypatch.setattr(routing, "measure", pretend_hidden_is_fast)
    layer = Conv2d(64, 256, 1, config=WarehouseConfig(64, out_ratio=0.25)).eval()
    kw.set_temperature(layer, 0.0)
    with torch.no_grad():
        x = torch.randn(64, 64, 2, 2)
        out = layer(x)
        assert layer.route is not None
        assert layer.route.forward == "hidden"
        layer(x[:2])
        assert layer.route.forward != "hidden"
        with force("plain"):
            torch.testing.assert_close(out, layer(x), rtol=1e-4, atol=1e-5)
