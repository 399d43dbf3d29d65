"""The rule that chooses, and how to overrule it."""

from dataclasses import replace

import pytest
import torch

from kernelwarehouse.assemble import Geometry, choose, force, native
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.partition import Partition


def _geometry(out: int, inside: int, kernel: int, cell: tuple[int, int], groups: int = 1) -> Geometry:
    partition = Partition((out, inside, kernel, kernel), (*cell, 1, 1))
    return Geometry(partition, (1, 1), (kernel // 2,) * 2, (1, 1), groups)


@pytest.mark.parametrize(
    ("geometry", "shape", "strategy"),
    [
        (_geometry(32, 16, 3, (16, 16)), (2, 16, 8, 8), "native"),
        (_geometry(32, 16, 1, (16, 16)), (2, 16, 20, 20), "native"),
        (_geometry(32, 16, 1, (16, 16)), (8, 16, 40, 40), "pointwise"),
        (_geometry(32, 16, 1, (8, 16)), (2, 16, 8, 8), "pointwise"),
        (_geometry(6, 3, 3, (3, 3)), (2, 3, 8, 8), "matmul"),
        (_geometry(6, 3, 3, (3, 3)), (2, 3, 40, 40), "grouped"),
        (_geometry(16, 1, 3, (8, 1), groups=16), (2, 16, 8, 8), "depthwise"),
        (replace(_geometry(16, 1, 3, (8, 1), groups=16), stride=(2, 2)), (2, 16, 8, 8), "depthwise"),
        (replace(_geometry(16, 1, 3, (8, 1), groups=16), stride=(3, 3)), (2, 16, 8, 8), "plain"),
        (_geometry(16, 1, 5, (8, 1), groups=16), (2, 16, 8, 8), "plain"),
        (Geometry(Partition((6, 4), (3, 2))), (2, 5, 4), "matmul"),
        (_geometry(32, 16, 3, (16, 16)), (0, 16, 8, 8), "plain"),
    ],
)
def test_choices(geometry: Geometry, shape: tuple[int, ...], strategy: str) -> None:
    choice = choose(torch.zeros(shape), geometry)
    assert choice.strategy == strategy
    assert choice.reason


def test_other_types_do_without_the_compiled_kernels() -> None:
    geometry = _geometry(32, 16, 3, (16, 16))
    assert choose(torch.zeros(2, 16, 8, 8, dtype=torch.float64), geometry).strategy == "matmul"
    assert choose(torch.zeros(2, 16, 8, 8, dtype=torch.bfloat16), geometry).strategy == "grouped"
    assert choose(torch.zeros(2, 16, 8, 8, device="meta"), geometry).strategy == "plain"


def test_force_nests_and_ends() -> None:
    geometry, x = _geometry(32, 16, 3, (16, 16)), torch.zeros(2, 16, 8, 8)
    with force("plain"):
        with force("grouped"):
            assert choose(x, geometry).strategy == "grouped"
        assert choose(x, geometry).strategy == "plain"
    assert choose(x, geometry).strategy == "native"


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
