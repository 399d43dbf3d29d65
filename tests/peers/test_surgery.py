import copy

import pytest
import timm
import torch
import torchvision
from torch import nn

from kernelwarehouse.errors import ConfigError, ConvertError, PlanError
from kernelwarehouse.peers import cgc, condconv, dcd, dyconv, odconv, se, weightnet
from kernelwarehouse.peers.condconv import CondConv2d, CondLinear, RoutedBlock
from kernelwarehouse.peers.dyconv import DYConv2d


def on_meta(name, **kwargs):
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


def names_of(model, kind):
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def test_the_model_given_is_untouched():
    model = timm.create_model("resnet18", num_classes=3)
    before = copy.deepcopy(model.state_dict())
    converted = condconv.convert(model)
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.add_(1)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_gates_stand_before_the_addition():
    # A gate that lets nothing through leaves the shortcut alone: the residual branch, and only it, is gated.
    model = timm.create_model("resnet18", num_classes=3).eval()
    block = se.convert(model).layer1[0].eval()
    with torch.no_grad():
        block.bn2[1].gate = nn.Threshold(float("inf"), 0.0)
    x = torch.rand(2, 64, 8, 8)
    torch.testing.assert_close(block(x), x)


@pytest.mark.parametrize("make", [se.convert, cgc.convert, weightnet.convert, dcd.convert, condconv.convert])
def test_torchvision_resnets_are_converted_alike(make):
    with torch.device("meta"):
        theirs = torchvision.models.resnet18()
    counts = [sum(p.numel() for p in make(model).parameters()) for model in (theirs, on_meta("resnet18"))]
    assert counts[0] == counts[1]


def test_condconv_routes_the_last_three_blocks_and_leaves_the_shortcut():
    converted = condconv.convert(on_meta("resnet18"))
    assert names_of(converted, RoutedBlock) == ["layer3.1", "layer4.0", "layer4.1"]
    assert len(names_of(converted, CondConv2d)) == 6
    assert names_of(converted, CondLinear) == ["fc"]
    assert isinstance(converted.layer4[0].block.downsample[0], nn.Conv2d)


def test_the_stem_stays_static_whatever_it_takes_in():
    for channels in (1, 3, 8):
        converted = dyconv.convert(on_meta("resnet18", in_chans=channels))
        assert isinstance(converted.conv1, nn.Conv2d)
        assert len(names_of(converted, DYConv2d)) == 19


def test_excluded_layers_stay_static():
    converted = odconv.convert(on_meta("resnet18"), exclude=("conv1", "*.downsample", "layer4"))
    left = [name for name, m in converted.named_modules() if isinstance(m, nn.Conv2d)]
    assert len([name for name in left if name.startswith("layer4")]) == 5


@pytest.mark.parametrize("make", [se.convert, dcd.convert, condconv.convert, dyconv.convert])
def test_mode_is_kept(make):
    model = on_meta("resnet18", num_classes=3)
    assert all(module.training for module in make(model).modules())
    assert not any(module.training for module in make(model.eval()).modules())


def test_what_cannot_be_converted_is_named():
    with pytest.raises(ConvertError, match="EfficientNet has no residual block"):
        se.convert(on_meta("mobilenetv2_100"))
    with pytest.raises(ConvertError, match="Linear has no layer"):
        odconv.convert(nn.Linear(3, 3))
    with pytest.raises(ConvertError, match=r"'layer1.0' has been converted already"):
        dcd.convert(dcd.convert(on_meta("resnet18")))
    with pytest.raises(ConvertError, match="blocks is 9; ResNet has 8"):
        condconv.convert(on_meta("resnet18"), blocks=9)
    with pytest.raises(ConfigError, match="experts is 0"):
        dyconv.convert(on_meta("resnet18"), experts=0)
    with pytest.raises(PlanError, match="layer9"):
        odconv.convert(on_meta("resnet18"), exclude=("layer9",))
    with pytest.raises(ConvertError, match="pads by 'same'"):
        dyconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding="same")))
