"""Blocks and stages, from the structure of a network and its widths."""

import pytest
import timm
import torch
import torchvision
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.planning.discover import discover
from kernelwarehouse.planning.stages import find_stages

RESNET18_M = [56, 47, 47, 27]


def groups(plan: kw.Plan) -> dict[str, list[str]]:
    return {warehouse.name: [layer.spec.label for layer in warehouse.layers] for warehouse in plan.warehouses}


def stages(model: nn.Module) -> dict[str, list[str]]:
    return {stage.name: [layer.name for layer in stage.layers] for stage in find_stages(model, discover(model))}


class Residual(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(into, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()) + self.shortcut(x)


def test_plain_convolutions_are_cut_by_width() -> None:
    model = nn.Sequential(*(nn.Conv2d(*pair, 3) for pair in ((3, 8), (8, 8), (8, 8), (8, 16), (16, 16))))
    assert stages(model) == {"stem": ["0"], "stage1": ["1", "2", "3"], "stage2": ["4"]}


def test_blocks_are_cut_by_width_and_entries_belong_to_the_stage_before() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8, 8), Residual(8, 16), Residual(16, 16))
    assert stages(model) == {
        "stem": ["0"],
        "stage1": ["1.a", "1.b", "1.shortcut", "2.a", "2.shortcut"],
        "stage2": ["2.b", "3.a", "3.b", "3.shortcut"],
    }


def test_rows_of_blocks_are_stages_of_the_networks_own_making() -> None:
    rows = (nn.Sequential(Residual(8, 8), Residual(8, 8)) for _ in range(2))
    found = stages(nn.Sequential(nn.Conv2d(3, 8, 3), *rows))
    assert list(found) == ["stem", "stage1", "stage2"]


def test_every_layer_is_in_one_stage() -> None:
    with torch.device("meta"):
        model = timm.create_model("mobilenetv2_050")
    names = [name for stage in stages(model).values() for name in stage]
    assert sorted(names) == sorted(layer.name for layer in discover(model).layers)


def test_entry_layers_belong_to_the_stage_before() -> None:
    with torch.device("meta"):
        plan = kw.plan(timm.create_model("resnet18"))
    assert "layer2.0.conv1" in groups(plan)["stage1"]
    assert "layer2.0.downsample.0" in groups(plan)["stage1"]
    assert "layer2.0.conv2" in groups(plan)["stage2"]
    assert groups(plan)["stage1"][0] == "layer1.0.conv1"


def test_stages_without_tracing_follow_names_and_widths() -> None:
    model = timm.create_model("resnet18")

    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.layer2, self.layer3, self.layer4 = (getattr(model, f"layer{i}") for i in (1, 2, 3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x.sum()) > 0:
                x = self.layer1(x)
            return self.layer4(self.layer3(self.layer2(x)))

    with pytest.warns(kw.KernelWarehouseWarning, match="Untraceable"):
        plan = kw.plan(Untraceable())
    assert [warehouse.mixtures for warehouse in plan.warehouses] == RESNET18_M


def test_wide_bottlenecks_do_not_confuse_inner_layers_with_entries() -> None:
    # Its inner width equals the previous stage's output width: only what feeds a layer tells them apart.
    with torch.device("meta"):
        plan = kw.plan(torchvision.models.wide_resnet50_2())
    stage2 = next(names for names in groups(plan).values() if "layer2.1.conv2" in names)
    assert "layer2.0.conv2" in stage2
    assert "layer2.0.conv3" in stage2
    assert "layer2.0.conv1" not in stage2
