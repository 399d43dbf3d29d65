import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.assignment import beta, start_cells
from kernelwarehouse.warehouse import seed_cells


def model_with_two_warehouses() -> nn.Module:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)),
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3)),
    )
    config = kw.WarehouseConfig(groups={"a": ["0.0", "0.1", "1.0"], "b": ["1.1"]})
    return kw.convert(model, kw.plan(model, config))


def cell_keys(module: nn.Module) -> list[str]:
    return [key for key in module.state_dict() if key.endswith("cells")]


def test_each_warehouse_is_in_the_state_dict_once() -> None:
    model = model_with_two_warehouses()
    assert cell_keys(model) == ["0.0.warehouse.cells", "1.1.warehouse.cells"]
    assert sum(p.numel() for p in model.parameters()) == kw.plan_of(model).parameters_after


def test_a_part_of_a_model_is_whole() -> None:
    part = model_with_two_warehouses()[1]
    assert cell_keys(part) == ["0.warehouse.cells", "1.warehouse.cells"]
    names = [name for name, _ in part.named_parameters() if name.endswith("cells")]
    assert names == cell_keys(part)


def test_state_dict_round_trip_and_missing_cells() -> None:
    model, other = model_with_two_warehouses(), model_with_two_warehouses()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[1][0].warehouse.cells, model[0][0].warehouse.cells)
    state = model.state_dict()
    del state["0.0.warehouse.cells"]
    with pytest.raises(RuntimeError, match=r"0\.0\.warehouse\.cells"):
        other.load_state_dict(state)
    assert other.load_state_dict(state, strict=False).missing_keys == [
        "0.0.warehouse.cells",
    ]
    assert not other.load_state_dict(model.state_dict(), assign=True).missing_keys
    assert other[0][0].warehouse.cells is other[1][0].warehouse.cells


def test_sharing_survives_copies_and_pickles() -> None:
    model = model_with_two_warehouses()
    model.load_state_dict(model.state_dict())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    x = torch.randn(2, 8, 6, 6)
    for twin in twins:
        assert twin[0][0].warehouse is twin[1][0].warehouse
        assert twin[0][0].warehouse is not model[0][0].warehouse
        torch.testing.assert_close(twin.eval()(x), model.eval()(x))


def test_moves_as_one() -> None:
    model = model_with_two_warehouses().to(torch.float64)
    assert model[0][0].warehouse.cells.dtype == torch.float64
    assert model[0][0].warehouse.cells is model[1][0].warehouse.cells
    assert model.to("meta")[1][0].warehouse.cells.device.type == "meta"


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from(
        [
            ("one_to_one", 1.0),
            ("one_to_one", 3.0),
            ("one_to_one", 0.4),
            ("many_to_one", 2.5),
            ("one_to_many", 0.5),
            ("all_to_one", 2.0),
        ]
    ),
)
def test_seeding_is_the_least_squares_solution(mixtures: list[int], case: tuple[str, float]) -> None:
    start, budget = case
    cells_count = max(int(budget * sum(mixtures)), 1)
    ranges = [run for layer in start_cells(start, mixtures, cells_count) for run in layer]
    pieces = torch.randn(sum(mixtures), 3, dtype=torch.float64)
    first = torch.randn(cells_count, 3, dtype=torch.float64)
    cells = first.clone()
    seed_cells(cells, pieces, ranges)
    matrix = beta(ranges, cells_count).double()
    nearest = first + torch.linalg.pinv(matrix) @ (pieces - matrix @ first)
    torch.testing.assert_close(cells, nearest)
