import json
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import kernelwarehouse as kw


@pytest.fixture
def plan() -> kw.Plan:
    with torch.device("meta"):
        return kw.plan(timm.create_model("resnet18"))


def test_prints_what_a_reader_wants(plan: kw.Plan) -> None:
    text = str(plan)
    for part in ("stage1", "64x64x1x1", "56", "11,689,512", "11,932,148", "conv1", "stem", "classifier"):
        assert part in text
    assert repr(plan) == "Plan(4 warehouses, 19 layers, 11,689,512 -> 11,932,148 parameters)"


def test_json_round_trip(plan: kw.Plan, tmp_path: Path) -> None:
    assert kw.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    plan.save(tmp_path / "plan.json")
    assert kw.Plan.load(tmp_path / "plan.json") == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_the_source_of_the_order_is_kept_and_shown(plan: kw.Plan) -> None:
    assert plan.order == "traced"
    assert "traced" in str(plan)
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["order"] == "traced"
    assert "registration" in str(kw.Plan.from_dict(data | {"order": "registration"}))
    assert kw.Plan.from_dict(data | {"order": "run"}).without("layer4").order == "run"
    with pytest.raises(kw.PlanError, match="'guessed'"):
        kw.Plan.from_dict(data | {"order": "guessed"})
    del data["order"]  # as plans were written before
    old = kw.Plan.from_dict(data)
    assert old.order is None
    assert old.warehouses == plan.warehouses
    assert "order" not in str(old)


def test_edits_are_new_plans(plan: kw.Plan) -> None:
    edited = plan.with_warehouse("stage1", budget=2)
    assert edited.warehouse("stage1").cells == 112
    assert plan.warehouse("stage1").cells == 56
    smaller = plan.without("layer4", "layer3.*.conv2")
    assert [warehouse.name for warehouse in smaller.warehouses] == ["stage1", "stage2", "stage3"]
    assert {"layer4.0.conv1", "layer3.0.conv2"} <= {layer.name for layer in smaller.static}
    model = timm.create_model("resnet18")
    converted = kw.convert(model, smaller)
    assert isinstance(converted.layer4[0].conv1, nn.Conv2d)
    assert sum(parameter.numel() for parameter in converted.parameters()) == smaller.parameters_after


def test_edit_by_hand_as_json(plan: kw.Plan) -> None:
    data = json.loads(json.dumps(plan.to_dict()))
    data["warehouses"][0]["budget"] = "1/2"
    with pytest.raises(kw.PlanError, match="n = 56"):
        kw.Plan.from_dict(data)
    del data["warehouses"][0]["n"], data["parameters_after"]
    assert kw.Plan.from_dict(data).warehouse("stage1").cells == 28


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "stage2"}, "two warehouses"),
        ({"cell_shape": (48, 64, 1, 1)}, "cannot be split"),
        ({"cell_shape": (64, 64)}, "axes"),
        ({"budget": float("nan")}, "budget"),
        ({"budget": -1}, "budget"),
        ({"start": "some"}, "start"),
        ({"layers": ()}, "no layers"),
        ({"cells": 3}, "no setting"),
    ],
)
def test_bad_edits_are_refused(plan: kw.Plan, change: dict, message: str) -> None:
    with pytest.raises(kw.KernelWarehouseError, match=message):
        plan.with_warehouse("stage1", **change)


def test_layer_in_two_warehouses_is_refused(plan: kw.Plan) -> None:
    layers = plan.warehouse("stage1").layers
    with pytest.raises(kw.PlanError, match=r"layer1\.0\.conv1"):
        plan.with_warehouse("stage2", layers=layers, cell_shape=(64, 64, 1, 1))


def test_unknown_names_are_refused(plan: kw.Plan) -> None:
    with pytest.raises(kw.PlanError, match=r"stage9.*stage1"):
        plan.with_warehouse("stage9", budget=2)
    with pytest.raises(kw.PlanError, match="layer9"):
        plan.without("layer9")


def test_newer_versions_are_refused_as_such(plan: kw.Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict() | {"version": 7, "unheard": 1}))
    with pytest.raises(kw.PlanError, match=r"version 7; this library reads 1: a newer version .* wrote"):
        kw.Plan.load(tmp_path / "plan.json")
    with pytest.raises(kw.PlanError, match=r"version 'one'; this library reads 1: it is damaged"):
        kw.Plan.from_dict(plan.to_dict() | {"version": "one"})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"version": 7}', '{"version": 1, "warehouses": 3}', '"plan"', 100_000 * "["],
    ids=lambda text: text[:30],
)
def test_foreign_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(kw.PlanError):
        kw.Plan.load(tmp_path / "plan.json")
    with pytest.raises(kw.PlanError, match="missing"):
        kw.Plan.load(tmp_path / "missing.json")
