from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwarehouse.assignment import beta, claimed_cells, start_cells

layers = st.lists(st.integers(1, 40), min_size=1, max_size=8)
budgets = st.fractions(min_value=Fraction(1, 20), max_value=5)


def count(mixtures: list[int], budget: Fraction) -> int:
    return max(int(budget * sum(mixtures)), 1)


@given(layers, budgets)
def test_one_to_one_claims_each_cell_once_and_leaves_none(mixtures: list[int], budget: Fraction) -> None:
    cells = count(mixtures, budget)
    starts = start_cells("one_to_one", mixtures, cells)
    claimed = [cell for layer in starts for run in layer for cell in run]
    assert len(claimed) == len(set(claimed))
    assert all(0 <= cell < cells for cell in claimed)
    on_zero = sum(len(run) == 0 for layer in starts for run in layer)
    assert on_zero == max(sum(mixtures) - cells, 0)
    assert all(len(run) <= 1 for layer in starts for run in layer)


@given(layers, budgets)
def test_claims_are_spread_evenly_over_the_layers(mixtures: list[int], budget: Fraction) -> None:
    cells = count(mixtures, budget)
    claims = claimed_cells(mixtures, cells)
    assert [cell for claim in claims for cell in claim] == list(range(cells))
    for claim, own in zip(claims, mixtures, strict=True):
        assert abs(len(claim) - own * cells / sum(mixtures)) < 1
    starts = start_cells("one_to_one", mixtures, cells)
    for claim, layer in zip(claims, starts, strict=True):
        # A layer's mixtures start from cells of its own, give or take one that rounding puts beside them.
        assert all(claim.start - 1 <= cell <= claim.stop for run in layer for cell in run)


@given(layers, st.integers(1, 5))
def test_whole_budgets_step_through_the_cells(mixtures: list[int], budget: int) -> None:
    starts = start_cells("one_to_one", mixtures, budget * sum(mixtures))
    flat = [run for layer in starts for run in layer]
    assert flat == [range(index * budget, index * budget + 1) for index in range(sum(mixtures))]


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(2, 5))
def test_unit_fractions_follow_the_diagonal_rule(groups: list[int], ratio: int) -> None:
    mixtures = [group * ratio for group in groups]
    starts = start_cells("one_to_one", mixtures, sum(groups))
    cell = 0
    for layer in starts:
        for index, run in enumerate(layer):
            if index % ratio == (index // ratio) % ratio:
                assert run == range(cell, cell + 1)
                cell += 1
            else:
                assert not run


@given(layers, st.integers(1, 4))
def test_many_to_one_shares_all_cells_out(mixtures: list[int], budget: int) -> None:
    starts = start_cells("many_to_one", mixtures, budget * sum(mixtures))
    flat = [cell for layer in starts for run in layer for cell in run]
    assert flat == list(range(budget * sum(mixtures)))


@given(layers, st.fractions(min_value=Fraction(1, 20), max_value=1))
def test_one_to_many_uses_every_cell_and_no_zero(mixtures: list[int], budget: Fraction) -> None:
    cells = count(mixtures, budget)
    starts = start_cells("one_to_many", mixtures, cells)
    flat = [run for layer in starts for run in layer]
    assert all(len(run) == 1 for run in flat)
    assert {cell for run in flat for cell in run} == set(range(cells))


def test_all_to_one_and_none() -> None:
    assert start_cells("all_to_one", [2, 1], 5) == [[range(5), range(5)], [range(5)]]
    assert start_cells("none", [2, 1], 5) == [[range(0), range(0)], [range(0)]]


def test_beta_is_the_matrix_of_the_ranges() -> None:
    assert beta([range(1, 3), range(0)], 4).tolist() == [[False, True, True, False], [False] * 4]


@pytest.mark.parametrize("start", ["one_to_one", "many_to_one", "one_to_many"])
def test_budget_one_is_the_same_for_all_strategies(start: str) -> None:
    assert start_cells(start, [3, 2], 5) == [[range(1), range(1, 2), range(2, 3)], [range(3, 4), range(4, 5)]]
