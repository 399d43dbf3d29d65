"""What `print(plan)` shows."""

import io

import pytest
from rich.console import Console
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.planning.table import plan_table, shorten


def printed(plan: kw.Plan, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(plan_table(plan))
    return out.getvalue()


@pytest.fixture
def plan() -> kw.Plan:
    model = nn.Sequential(*(nn.Conv2d(3 if number == 0 else 8, 8, 3) for number in range(7)))
    return kw.plan(model, kw.WarehouseConfig(exclude=["5", "6"]))


def test_a_row_for_every_warehouse_and_for_every_reason(plan: kw.Plan) -> None:
    text = printed(plan, 200)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("│")] == ["stage1", "static", "static"]
    assert "1, 2, 3, 4" in text
    assert "0: the stem (static_stem)" in text
    assert "5, 6: excluded" in text
    assert f"{2 * (8 * 8 * 9):,}" in text  # the kernels that stay
    assert f"{plan.parameters_before:,} -> {plan.parameters_after:,}" in text


def test_a_narrow_terminal_cuts_nothing_off(plan: kw.Plan) -> None:
    words = "".join(printed(plan, 70).replace("│", " ").split())
    assert "…" not in words
    assert f"{plan.warehouses[0].attention_parameters:,}" in words


def test_what_begins_at_its_logits_is_told(plan: kw.Plan) -> None:
    told = "attentions begin at their logits, temperature 0"
    assert told not in printed(plan, 200)
    assert told in printed(plan.with_warehouse("stage1", begin="logits"), 200)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    config = kw.WarehouseConfig(sharing="layer", overrides=[kw.Override("1", begin="logits")])
    assert f"{told} in 1" in printed(kw.plan(model, config), 200)


def test_long_lists_are_shortened_to_their_ends() -> None:
    assert shorten(["a", "b", "c", "d"]) == "a, b, c, d"
    assert shorten([str(number) for number in range(10)]) == "0, 1, ..., 9 (10)"
    assert shorten([]) == ""
