import copy
import itertools

import pytest
import timm
import torch
import torchvision
from torch import nn

import kernelwarehouse as kw

STATIC = {
    "resnet18": ("conv1", "fc"),
    "resnet50": ("conv1", "fc", "layer1.0.conv1", "layer1.0.downsample.0"),
}
PAPER_M = {"resnet18": [56, 47, 47, 27], "resnet50": [87, 104, 138, 47]}


def convolutions(*widths: int, kernel: int = 3) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(nn.Conv2d(into, out, kernel, padding=kernel // 2) for into, out in pairs))


def groups(plan: kw.Plan) -> dict[str, list[str]]:
    return {warehouse.name: [layer.spec.label for layer in warehouse.layers] for warehouse in plan.warehouses}


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("budget", [0.25, 0.5, 1, 2, 4])
def test_resnets_get_the_papers_m_and_n(library: str, name: str, budget: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name) if library == "timm" else torchvision.models.get_model(name)
    plan = kw.plan(model, kw.WarehouseConfig(budget=budget, exclude=STATIC[name]))
    quarter = 4 if budget < 1 else 1  # half cells below one
    assert [warehouse.mixtures for warehouse in plan.warehouses] == [quarter * m for m in PAPER_M[name]]
    assert [warehouse.cells for warehouse in plan.warehouses] == [int(budget * quarter * m) for m in PAPER_M[name]]


def test_planning_touches_nothing() -> None:
    model = timm.create_model("resnet18")
    before, text = copy.deepcopy(model.state_dict()), repr(model)
    kw.plan(model)
    assert repr(model) == text
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_overrides_by_layer_and_by_warehouse() -> None:
    model = timm.create_model("resnet18")
    config = kw.WarehouseConfig(
        overrides=(kw.Override("stage4", budget=2, start="many_to_one"), kw.Override("layer1.*.conv1", reduction=1 / 2))
    )
    plan = kw.plan(model, config)
    assert plan.warehouse("stage4").cells == 54
    assert plan.warehouse("stage4").start == "many_to_one"
    assert plan.warehouse("stage3").cells == 47
    assert [layer.hidden for layer in plan.warehouse("stage1").layers] == [32, 16, 32, 16, 16, 16]


def test_explicit_groups() -> None:
    model = convolutions(8, 8, 16, 16)
    plan = kw.plan(model, kw.WarehouseConfig(groups={"late": ["2"], "early": ["0", "1"]}))
    assert groups(plan) == {"early": ["0", "1"], "late": ["2"]}
    partial = kw.plan(model, kw.WarehouseConfig(groups={"early": ["0"]}))
    assert {layer.name: layer.reason for layer in partial.static} == {"1": "in no group", "2": "in no group"}


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (nn.ReLU(), {}, "no layer that can be converted"),
        (nn.Sequential(nn.ConvTranspose2d(3, 3, 3)), {}, "no layer that can be converted"),
        (convolutions(8, 8), {"exclude": ["0"]}, "excluded"),
        (convolutions(8, 8), {"exclude": ["nine"]}, "'nine' matches no layer"),
        (convolutions(8, 8), {"groups": {"a": ["nine"]}}, "'nine' matches no layer"),
        (convolutions(8, 8), {"groups": {"a": ["0"], "b": ["0"]}}, "'a' and 'b'"),
        (convolutions(8, 8), {"groups": {"a": ["0"]}, "exclude": ["0"]}, "excluded"),
        (convolutions(8, 8), {"overrides": [{"pattern": "nine", "budget": 1}]}, "'nine' matches no layer"),
        (convolutions(8, 8, 8), {"overrides": [{"pattern": "0", "budget": 2}]}, "'0' and '1'"),
        (convolutions(9, 9), {"in_ratio": 0.5}, "'0' cannot be split"),
        (convolutions(8, 8), {"sharing": "none", "budget": 0.5}, "sharing 'none'"),
        (convolutions(8, 8), {"start": "many_to_one", "budget": 0.5}, "many_to_one"),
        (convolutions(8, 8), {"start": "one_to_many", "budget": 2}, "one_to_many"),
        (
            nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)),
            {"spatial_partition": False, "groups": {"a": ["*"]}},
            "differ in size",
        ),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(4, 4)), {"groups": {"a": ["*"]}}, "different axes"),
    ],
)
def test_plans_that_cannot_be(model: nn.Module, config: dict, message: str) -> None:
    with pytest.raises(kw.PlanError) as error:
        kw.plan(model, kw.WarehouseConfig(**config))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "name", ["mobilenetv3_large_100", "efficientnet_b0", "regnety_002", "mixer_s16_224", "inception_v3", "resnetv2_50"]
)
def test_odd_widths_do_not_drag_the_others_down(name: str) -> None:
    with torch.device("meta"):
        plan = kw.plan(timm.create_model(name))
    assert plan.parameters_after < 4 * plan.parameters_before
    assert max(warehouse.mixtures for warehouse in plan.warehouses) <= 1024


def test_a_configuration_is_wanted() -> None:
    with pytest.raises(kw.PlanError, match="WarehouseConfig"):
        kw.plan(convolutions(8, 8), {"budget": 1})  # type: ignore[arg-type]
