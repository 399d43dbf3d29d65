"""The rule that chooses, and how to overrule it."""

from dataclasses import replace

import pytest
import torch

from compiled_kernels import pretend
from kernelwarehouse.assemble import Geometry, force, native
from kernelwarehouse.assemble.choose import choose
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.partition import Partition


def _geometry(out: int, inside: int, kernel: int, cell: tuple[int, int], groups: int = 1) -> Geometry:
    partition = Partition((out, inside, kernel, kernel), (*cell, 1, 1))
    return Geometry(partition, (1, 1), (kernel // 2,) * 2, (1, 1), groups)


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize(
    ("geometry", "shape", "compiled", "pure"),
    [
        (_geometry(32, 16, 3, (16, 16)), (2, 16, 8, 8), "native", "matmul"),
        (_geometry(32, 16, 3, (16, 16)), (2, 16, 40, 40), "native", "grouped"),
        (_geometry(32, 16, 1, (16, 16)), (2, 16, 20, 20), "native", "pointwise"),
        (_geometry(32, 16, 1, (16, 16)), (8, 16, 40, 40), "pointwise", "pointwise"),
        (_geometry(32, 16, 1, (8, 16)), (2, 16, 8, 8), "pointwise", "pointwise"),
        (_geometry(6, 3, 3, (3, 3)), (2, 3, 8, 8), "matmul", "matmul"),
        (_geometry(6, 3, 3, (3, 3)), (2, 3, 40, 40), "grouped", "grouped"),
        (_geometry(16, 1, 3, (8, 1), groups=16), (2, 16, 8, 8), "depthwise", "plain"),
        (replace(_geometry(16, 1, 3, (8, 1), groups=16), stride=(2, 2)), (2, 16, 8, 8), "depthwise", "plain"),
        (replace(_geometry(16, 1, 3, (8, 1), groups=16), stride=(3, 3)), (2, 16, 8, 8), "plain", "plain"),
        (_geometry(16, 1, 5, (8, 1), groups=16), (2, 16, 8, 8), "plain", "plain"),
        (Geometry(Partition((6, 4), (3, 2))), (2, 5, 4), "matmul", "matmul"),
        (_geometry(32, 16, 3, (16, 16)), (0, 16, 8, 8), "plain", "plain"),
    ],
)
def test_choices(
    geometry: Geometry,
    shape: tuple[int, ...],
    compiled: str,
    pure: str,
    available: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With compiled kernels and without, whatever this machine has."""
    pretend(monkeypatch, available)
    choice = choose(torch.zeros(shape), geometry)
    assert choice.strategy == (compiled if available else pure)
    assert choice.reason


def test_other_types_do_without_the_compiled_kernels() -> None:
    geometry = _geometry(32, 16, 3, (16, 16))
    assert choose(torch.zeros(2, 16, 8, 8, dtype=torch.float64), geometry).strategy == "matmul"
    assert choose(torch.zeros(2, 16, 8, 8, dtype=torch.bfloat16), geometry).strategy == "grouped"
    assert choose(torch.zeros(2, 16, 8, 8, device="meta"), geometry).strategy == "plain"


def test_force_nests_and_ends() -> None:
    geometry, x = _geometry(32, 16, 3, (16, 16)), torch.zeros(2, 16, 8, 8)
    usual = choose(x, geometry).strategy
    assert usual not in ("plain", "grouped")
    with force("plain"):
        with force("grouped"):
            assert choose(x, geometry).strategy == "grouped"
        assert choose(x, geometry).strategy == "plain"
    assert choose(x, geometry).strategy == usual


def test_unknown_strategy_is_refused() -> None:
    with (
        pytest.raises(
            StrategyError,
            match=r"no strategy 'fast'; there are plain, depthwise, grouped, hidden, matmul, native, pointwise",
        ),
        force("fast"),
    ):
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
        choose(x, geometry)
    assert why in (native.obstacle(x, geometry) or "")


@pytest.mark.parametrize(
    ("way", "geometry"),
    [("native", _geometry(32, 16, 3, (16, 16))), ("depthwise", _geometry(16, 1, 3, (8, 1), groups=16))],
)
def test_compiled_where_there_are_no_kernels_is_refused(
    way: str, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, False)
    with pytest.raises(StrategyError, match="the kernels could not be built, or are turned off"), force(way):
        choose(torch.zeros(2, 16, 8, 8), geometry)
