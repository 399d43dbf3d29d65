import pytest
import timm
import torch
from torch import nn

from kernelwarehouse.compare.measure import (
    Setting,
    backbone_of,
    build,
    count_macs,
    training_memory,
)
from kernelwarehouse.errors import ConfigError, MeasurementError, UnknownPresetError
from kernelwarehouse.layers import Conv2d
from kernelwarehouse.peers.dyconv import DYConv2d
from kernelwarehouse.temperature import get_temperature

TINY = Setting(image_size=32, batch_size=2, rounds=1, classes=3)


def macs_by_hooks(model, size):
    """Positions times weights of every layer, and for dynamic convolutions all their experts once."""
    total = 0
    counted_with_their_layer = {
        part for module in model.modules() if isinstance(module, Conv2d) for part in module.attention.modules()
    }

    def add(module, inputs, output):
        nonlocal total
        if isinstance(module, nn.Linear) and module not in counted_with_their_layer:
            total += module.weight.numel() * inputs[0].shape[0]
        elif isinstance(module, nn.Conv2d):
            total += module.weight.numel() * output[0, 0].numel()
        elif isinstance(module, DYConv2d):
            total += module.weight[0].numel() * output[0, 0].numel() + module.weight.numel()
        elif isinstance(module, Conv2d):
            partition, shape = module.geometry.partition, module.attention.shape
            total += partition.mixtures * partition.cell_size * (output[0, 0].numel() + shape.cells)
            # Its attention may run as one compiled step, which calls no linear layer.
            total += shape.hidden * (shape.in_channels + shape.mixtures * (shape.cells + 1))

    hooks = [module.register_forward_hook(add) for module in model.modules()]
    model.eval()(torch.zeros(1, 3, size, size))
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("name", ["resnet18", "dy4x_resnet18", "kw2x_resnet18"])
def test_macs_are_positions_times_weights_and_the_mixing(name):
    model = timm.create_model(name, num_classes=3)
    assert count_macs(model, TINY) == macs_by_hooks(model, 32)


def test_networks_are_measured_as_after_training():
    assert get_temperature(build("kw1d2x_mobilenetv2_050", TINY)) == 0


def test_transformers_are_built_for_the_size_of_the_images():
    static, warehouse = (count_macs(build(name, TINY), TINY) for name in ("deit_tiny_patch16_224", "kw1x_deit_tiny"))
    assert 0 < static < warehouse


def test_backbones():
    assert backbone_of("kw1x_deit_tiny") == "deit_tiny_patch16_224"
    assert backbone_of("kw1x_resnet18_softmax") == "resnet18"
    assert backbone_of("resnet34") == "resnet34"


def test_bad_input_is_named():
    with pytest.raises(UnknownPresetError, match=r"'kw1x_resnet19'.*kw1x_resnet18"):
        backbone_of("kw1x_resnet19")
    with pytest.raises(ConfigError, match="rounds is 0"):
        Setting(rounds=0)


def test_a_child_that_fails_is_reported():
    # ResNets reduce by 32: an image of one pixel leaves nothing to normalise in training.
    with pytest.raises(MeasurementError, match=r"memory of resnet18 failed: ValueError: Expected more than 1 value"):
        training_memory("resnet18", Setting(image_size=1, batch_size=1, rounds=1, classes=3))
