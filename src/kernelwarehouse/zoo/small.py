"""A network for images of about 32x32, and its KernelWarehouse twin, registered with timm.

The networks of the paper are for 224x224: on small images most of their layers see a few positions only, and mixing a
kernel for every sample is then nearly all of the work.
"""

from typing import Any

from timm.models import register_model
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from torch import nn

from kernelwarehouse.builder import WEIGHT_ARGUMENTS, remember_builder
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import ConfigError
from kernelwarehouse.zoo._preset import Preset
from kernelwarehouse.zoo._registry import register

STAGES = ((32, 1), (64, 2), (128, 2))


@register_model
def small_resnet(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """A 3x3 stem of stride 2 and three basic blocks of widths 32, 64 and 128, the last two of stride 2."""
    own = _own_arguments(pretrained, arguments)
    blocks = tuple(ByoBlockCfg(type="basic", d=1, c=width, s=stride, gs=0, br=1.0) for width, stride in STAGES)
    model = ByobNet(ByoModelCfg(blocks=blocks, stem_chs=STAGES[0][0], stem_type="3x3", stem_pool=""), **own)
    # Where timm's own networks say which layer is the classifier.
    model.default_cfg = {"classifier": "head.fc"}  # type: ignore[assignment]
    remember_builder(model, "small_resnet", own)
    return model


def _own_arguments(pretrained: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Without what timm hands to every maker of a network, for weights to read or download."""
    if pretrained:
        raise ConfigError("small_resnet has no weights to download; train it, or build it without pretrained")
    return {key: value for key, value in arguments.items() if key not in WEIGHT_ARGUMENTS}


# Planned automatically.
PRESETS = (Preset("kw1x_small_resnet", "small_resnet", WarehouseConfig(budget=1), 485_298, paper=None),)
register(*PRESETS)
