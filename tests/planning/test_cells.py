"""The cells of a warehouse: their shape, their number, and settings that layers must agree on."""

import pytest

import kernelwarehouse as kw
from kernelwarehouse.planning.cells import divisors, plan_warehouse
from kernelwarehouse.planning.plan import PlannedWarehouse
from kernelwarehouse.planning.spec import Group, Kind, LayerSpec


def layer(name: str, *shape: int, kind: Kind = "conv2d") -> LayerSpec:
    return LayerSpec(name, kind, shape, shape[1])


def warehouse(*layers: LayerSpec, **settings: object) -> PlannedWarehouse:
    config = kw.WarehouseConfig(**settings)
    return plan_warehouse(Group("shared", layers, layers), config, config.overrides)


A, B = layer("a", 64, 32, 3, 3), layer("b", 96, 64, 1, 1)


def test_divisors_are_common_to_all_layers() -> None:
    assert divisors([A]) == (64, 32)
    assert divisors([A, B]) == (32, 32)


def test_cells_are_as_wide_as_the_common_divisors() -> None:
    planned = warehouse(A, B)
    assert planned.cell_shape == (32, 32, 1, 1)
    assert planned.mixtures == 2 * 9 + 3 * 2
    assert planned.cells == planned.mixtures


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"budget": 0.5}, (16, 16, 1, 1)),
        ({"budget": 0.5, "in_ratio": 1, "out_ratio": 1}, (32, 32, 1, 1)),
        ({"budget": 2}, (32, 32, 1, 1)),
        ({"in_ratio": 0.25}, (32, 8, 1, 1)),
        ({"out_ratio": "1/2"}, (16, 32, 1, 1)),
    ],
)
def test_budgets_and_ratios_decide_the_width(settings: dict, expected: tuple[int, ...]) -> None:
    assert warehouse(A, B, **settings).cell_shape == expected


def test_odd_divisors_are_not_halved() -> None:
    assert warehouse(layer("odd", 9, 8, 3, 3), budget=0.5).cell_shape == (9, 4, 1, 1)


def test_without_spatial_partition_cells_are_as_large_as_the_kernels() -> None:
    assert warehouse(A, spatial_partition=False).cell_shape == (64, 32, 3, 3)
    with pytest.raises(kw.PlanError, match=r"'a' .* and 'b' .*differ in size"):
        warehouse(A, B, spatial_partition=False)


def test_linear_layers_have_no_positions() -> None:
    assert warehouse(layer("fc", 12, 8, kind="linear")).cell_shape == (12, 8)
    with pytest.raises(kw.PlanError, match="different axes"):
        warehouse(A, layer("fc", 32, 32, kind="linear"))


def test_the_budget_counts_cells() -> None:
    assert [warehouse(A, budget=b, in_ratio=1, out_ratio=1).cells for b in (0.01, "1/3", 1, 4)] == [1, 3, 9, 36]


def test_overrides_reach_layers_and_warehouses() -> None:
    planned = warehouse(A, B, overrides=[kw.Override("b", reduction=1), kw.Override("shared", budget=2)])
    assert planned.budget == 2
    assert [item.hidden for item in planned.layers] == [16, 64]
    with pytest.raises(kw.PlanError, match=r"'a' and 'b' share warehouse 'shared' but have budget 1\.0 and 2\.0"):
        warehouse(A, B, overrides=[kw.Override("b", budget=2)])


def test_only_sharing_none_keeps_mixtures_to_their_own_cells() -> None:
    assert warehouse(A, sharing="none").own_cells_only
    assert not warehouse(A, sharing="layer").own_cells_only
