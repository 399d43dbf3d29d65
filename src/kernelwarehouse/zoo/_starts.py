"""How new networks of the paper start: as in the released code, where that is not how timm starts them.

    last norm of a residual block          1                                             timm: 0
    classifier of MobileNetV2              normal of std 0.01, biases 0                  timm: uniform
    classifier of the static ResNets       the same; with warehouses torch's own         timm: torch's own
    depth-wise kernels of MobileNetV2      variance 2 / (channels * positions)           timm: 2 / positions
    cells that a layer claims              variance 2 / (claimed cells * outputs of a cell * positions of a cell)

The last is kaiming-normal with the fan-out of all cells that the layer claims, stacked along their outputs: with b
cells a mixture and I groups of inputs, narrower by sqrt(b * I) than the layer's static kernel would be.
"""

import math
from typing import Any

import timm
import torch
from torch import nn

from kernelwarehouse.conversion import plan_of
from kernelwarehouse.warehouse import Warehouse

_RESNETS = ("resnet18", "resnet50")
_MOBILENETS = ("mobilenetv2_100", "mobilenetv2_050")
_CLASSIFIER_STD = 0.01


def build_backbone(name: str, arguments: dict[str, Any], *, stays_static: bool = False) -> nn.Module:
    """timm's network. One of the paper's starts as in the released code, unless weights or a start are asked for."""
    network, _, _ = name.partition(".")  # what follows is the tag of weights
    norms = {"zero_init_last": False} if network in _RESNETS else {}
    model = timm.create_model(name, **(norms | arguments))
    if not has_weights(arguments):
        if network in _MOBILENETS or (network in _RESNETS and stays_static):
            _start_classifier(model)
        if network in _MOBILENETS:
            _start_depthwise(model)
    return model


def has_weights(arguments: dict[str, Any]) -> bool:
    """Whether timm reads or fetches trained weights for these arguments."""
    return bool(arguments.get("pretrained") or arguments.get("checkpoint_path"))


@torch.no_grad()
def draw_cells_as_released(model: nn.Module) -> None:
    """Draw the cells of a converted model anew, or of a part of one."""
    plan = plan_of(model)
    found = {module.name: module.cells for module in model.modules() if isinstance(module, Warehouse)}
    for planned in plan.warehouses if plan is not None else ():
        outputs, _, *kernel = planned.cell_shape
        for claim in planned.claims if planned.name in found else ():
            if claim:
                fan_out = len(claim) * outputs * math.prod(kernel)
                found[planned.name][claim.start : claim.stop].normal_(0, math.sqrt(2 / fan_out))


def _start_classifier(model: nn.Module) -> None:
    get_classifier: Any = getattr(model, "get_classifier", lambda: None)
    classifier = get_classifier()
    if isinstance(classifier, nn.Linear):  # there is none in a network for features
        nn.init.normal_(classifier.weight, 0, _CLASSIFIER_STD)
        nn.init.zeros_(classifier.bias)


def _start_depthwise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
