"""Which layers draw on one warehouse."""

import itertools

import pytest
import timm
import torch
from torch import nn

import kernelwarehouse as kw


def convolutions(*widths: int, kernel: int = 3) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(nn.Conv2d(into, out, kernel, padding=kernel // 2) for into, out in pairs))


def frozen(model: nn.Sequential, *indices: int) -> nn.Sequential:
    for index in indices:
        model[index].requires_grad_(False)
    return model


def groups(plan: kw.Plan) -> dict[str, list[str]]:
    return {warehouse.name: [layer.spec.label for layer in warehouse.layers] for warehouse in plan.warehouses}


def test_a_stage_shares() -> None:
    assert groups(kw.plan(convolutions(8, 8, 8, 16, 16))) == {"stage1": ["0", "1", "2"], "stage2": ["3"]}


def test_layers_by_themselves() -> None:
    config = kw.WarehouseConfig(sharing="layer")
    assert groups(kw.plan(convolutions(8, 8, 8), config)) == {"0": ["0"], "1": ["1"]}


def test_layers_that_would_cut_each_other_small_do_not_share() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 67, 1), nn.Conv2d(67, 64, 1))
    for warehouse in kw.plan(model).warehouses:
        widths = {layer.spec.kernel_shape[:2] for layer in warehouse.layers}
        assert all(
            width % cell == 0 for shape in widths for width, cell in zip(shape, warehouse.cell_shape, strict=False)
        )
        assert warehouse.cell_shape[:2] != (1, 1)


def test_frozen_layers_share_only_with_each_other() -> None:
    model = frozen(convolutions(8, 8, 8, 8, 8, 16, 16), 1, 3)
    plan = kw.plan(model)
    assert groups(plan) == {"stage1": ["0", "2", "4"], "stage1.frozen": ["1", "3"], "stage2": ["5"]}
    assert "stage1.frozen" in str(plan)
    assert kw.Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("sharing", ["stage", "same_shape", "layer", "none"])
def test_no_way_of_sharing_mixes_frozen_and_trained(sharing: str) -> None:
    model = frozen(convolutions(8, 8, 8, 8), 1)
    for warehouse in kw.plan(model, kw.WarehouseConfig(sharing=sharing)).warehouses:
        names = {layer.spec.label for layer in warehouse.layers}
        assert names == {"1"} or "1" not in names


def test_a_model_that_is_frozen_altogether_shares_as_usual() -> None:
    model = convolutions(8, 8, 8, 16)
    assert groups(kw.plan(frozen(model, 0, 1, 2))) == {"stage1": ["0", "1", "2"]}
    # What stays static does not count.
    stem = nn.Sequential(nn.Conv2d(3, 8, 3), *frozen(convolutions(8, 8, 8), 0, 1))
    assert groups(kw.plan(stem)) == {"stage1": ["1", "2"]}


def test_groups_that_mix_frozen_and_trained_are_refused() -> None:
    model = frozen(convolutions(8, 8, 8, 8), 1)
    with pytest.raises(kw.PlanError, match=r"group 'all' has '1', which is frozen .* and '0', which is trained"):
        kw.plan(model, kw.WarehouseConfig(groups={"all": ["*"]}))
    apart = kw.plan(model, kw.WarehouseConfig(groups={"held": ["1"], "free": ["0", "2"]}))
    assert groups(apart) == {"free": ["0", "2"], "held": ["1"]}


def test_depthwise_and_pointwise_layers_do_not_share() -> None:
    with torch.device("meta"):
        plan = kw.plan(timm.create_model("mobilenetv2_100"))
    for warehouse in plan.warehouses:
        assert len({layer.spec.depthwise for layer in warehouse.layers}) == 1
        assert len({layer.spec.pointwise for layer in warehouse.layers}) == 1


def test_very_deep_networks_share_in_parts() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(1000)))
    plan = kw.plan(model)
    assert max(len(warehouse.layers) for warehouse in plan.warehouses) <= 32
    assert len(plan.layers) == 1000
    whole = kw.plan(model, kw.WarehouseConfig(max_layers=None))
    assert [warehouse.mixtures for warehouse in whole.warehouses] == [9000]


def test_sharing_by_layer_and_not_at_all() -> None:
    model = timm.create_model("resnet18")
    by_layer = kw.plan(model, kw.WarehouseConfig(sharing="layer"))
    assert by_layer.parameters_after == 11_805_134
    none = kw.plan(model, kw.WarehouseConfig(sharing="none"))
    assert none.parameters_after == 11_783_114
    unpartitioned = kw.plan(model, kw.WarehouseConfig(sharing="layer", spatial_partition=False))
    assert unpartitioned.parameters_after == 11_776_974


def test_same_shapes_only() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet50")
    exclude = ("conv1", "fc", "layer1.0.conv1", "layer1.0.downsample.0")
    plan = kw.plan(model, kw.WarehouseConfig(sharing="same_shape", exclude=exclude))
    assert plan.parameters_after == 26_949_052
