"""A network for images of about 32x32, its KernelWarehouse twins and its compared methods, registered with timm.

The networks of the paper are for 224x224: on small images most of their layers see a few positions only, and mixing a
kernel for every sample is then nearly all of the work.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.models import FeatureListNet, register_model
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from torch import nn

from kernelwarehouse.builder import WEIGHT_ARGUMENTS, remember_builder
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import ConfigError
from kernelwarehouse.peers import dyconv, odconv
from kernelwarehouse.zoo._preset import PeerPreset, Preset
from kernelwarehouse.zoo._registry import register

WIDTHS = (32, 64, 128)
STRIDES = (1, 2, 2)
STEP = 8
"""timm rounds widths to multiples of this, and says nothing."""


@register_model
def small_resnet(
    pretrained: bool = False,
    widths: Sequence[int] = WIDTHS,
    features_only: bool = False,
    out_indices: Sequence[int] = (0, 1, 2),
    **arguments: Any,
) -> nn.Module:
    """A 3x3 stem of stride 2 and three basic blocks of the given widths, the last two of stride 2.

    With `features_only`, the outputs of the blocks that `out_indices` asks for.
    """
    own = _own_arguments(pretrained, arguments)
    _check_widths(widths)
    blocks = tuple(
        ByoBlockCfg(type="basic", d=1, c=width, s=stride, gs=0, br=1.0)
        for width, stride in zip(widths, STRIDES, strict=True)
    )
    model: nn.Module = ByobNet(ByoModelCfg(blocks=blocks, stem_chs=widths[0], stem_type="3x3", stem_pool=""), **own)
    # Where timm's own networks say which layer is the classifier.
    model.default_cfg = {"classifier": "head.fc"}  # type: ignore[assignment]
    remembered = own if tuple(widths) == WIDTHS else own | {"widths": list(widths)}
    if features_only:
        model = FeatureListNet(model, out_indices=tuple(out_indices), flatten_sequential=True)
        remembered |= {"features_only": True, "out_indices": list(out_indices)}
    remember_builder(model, "small_resnet", remembered)
    return model


def _own_arguments(pretrained: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Without what timm hands to every maker of a network, for weights to read or download."""
    if pretrained:
        raise ConfigError("small_resnet has no weights to download; train it, or build it without pretrained")
    return {key: value for key, value in arguments.items() if key not in WEIGHT_ARGUMENTS}


def _check_widths(widths: Any) -> None:
    given = list(widths) if isinstance(widths, (list, tuple)) else []
    if len(given) != len(STRIDES) or not all(type(width) is int and width > 0 and width % STEP == 0 for width in given):
        raise ConfigError(f"widths (={widths!r}) must be {len(STRIDES)} multiples of {STEP}, such as {list(WIDTHS)}")


# Planned automatically.
PRESETS = (
    # The paper halves the widths of the cells below 1x as well. Here that would cost more in attentions than it saves
    # in cells: 618,152 parameters.
    Preset("kw1d2x_small_resnet", "small_resnet", WarehouseConfig(budget=0.5, in_ratio=1, out_ratio=1), 302_048, None),
    Preset("kw1x_small_resnet", "small_resnet", WarehouseConfig(budget=1), 485_298, paper=None),
    Preset("kw4x_small_resnet", "small_resnet", WarehouseConfig(budget=4), 1_521_420, paper=None),
)

# As the paper's ablations of ResNet18, in `zoo.ablations`.
ABLATIONS = tuple(
    Preset(f"kw1x_small_resnet_{name}", "small_resnet", WarehouseConfig(budget=1, **changes), parameters, paper=None)
    for name, parameters, changes in (
        ("softmax", 485_298, {"attention": "softmax"}),
        ("sigmoid", 485_298, {"attention": "sigmoid"}),
        ("relu", 485_298, {"attention": "relu"}),
        ("share_in_layer", 453_032, {"sharing": "layer"}),
        ("no_sharing", 446_368, {"sharing": "none"}),
        ("no_partition", 444_056, {"sharing": "layer", "spatial_partition": False}),
    )
)

# The layers that stay static are those of the paper's ResNets.
PEERS = (
    PeerPreset("dy4x_small_resnet", "small_resnet", dyconv.convert, 1_360_600, paper=None),
    PeerPreset(
        "od4x_small_resnet",
        "small_resnet",
        partial(odconv.convert, exclude=("stem.conv", "*.shortcut")),
        1_341_846,
        paper=None,
    ),
)

register(*PRESETS, *PEERS)
register(*ABLATIONS, ablations=True)
