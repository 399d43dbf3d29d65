"""The compared networks of the paper, by name."""

from functools import partial

import timm
import torch
from torch import nn

from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.conversion import apply_plan, convert
from kernelwarehouse.peers import cbam, cgc, condconv, dcd, dyconv, eca, kwod, odconv, se, weightnet
from kernelwarehouse.planning.api import plan
from kernelwarehouse.zoo._preset import PeerPreset
from kernelwarehouse.zoo._registry import register
from kernelwarehouse.zoo.mobilenetv2 import four_x_groups


def _kwod(backbone: nn.Module) -> nn.Module:
    config = WarehouseConfig(budget=4, groups=four_x_groups())
    if hasattr(backbone, "conv_head"):
        return kwod.convert(convert(backbone, plan(backbone, config)))
    # A network for features lacks the last layers; its warehouses are those of the whole network.
    with torch.device("meta"):
        planned = plan(timm.create_model("mobilenetv2_100"), config)
    here = {name for name, _ in backbone.named_modules()}
    names = {layer.spec.name: layer.spec.name for layer in planned.layers if layer.spec.name in here}
    return kwod.convert(apply_plan(backbone, planned, names))


_STATIC_IN_RESNETS = ("conv1", "*.downsample")
_on_resnet18 = partial(PeerPreset, backbone="resnet18")

PRESETS = (
    _on_resnet18("se_resnet18", method=se.convert, parameters=11_776_552, paper="11.78M"),
    _on_resnet18("cbam_resnet18", method=cbam.convert, parameters=11_779_392, paper="11.78M"),
    _on_resnet18("eca_resnet18", method=eca.convert, parameters=11_689_556, paper="11.69M"),
    _on_resnet18(
        "cgc_resnet18",
        method=cgc.convert,
        parameters=11_717_784,
        paper="11.69M",
        note="the printed count was not reproduced",
    ),
    _on_resnet18("weightnet_resnet18", method=weightnet.convert, parameters=11_925_264, paper="11.93M"),
    _on_resnet18("dcd_resnet18", method=dcd.convert, parameters=14_703_332, paper="14.70M"),
    _on_resnet18("condconv8x_resnet18", method=condconv.convert, parameters=81_353_120, paper="81.35M"),
    *(
        PeerPreset(f"dy4x_{backbone}", backbone, dyconv.convert, parameters, paper)
        for backbone, parameters, paper in (
            ("resnet18", 45_472_052, "45.47M"),
            ("resnet50", 100_878_072, "100.88M"),
            ("mobilenetv2_100", 12_404_540, "12.40M"),
            ("mobilenetv2_050", 4_567_364, "4.57M"),
        )
    ),
    *(
        PeerPreset(f"od4x_{backbone}", backbone, partial(odconv.convert, exclude=static), parameters, paper)
        for backbone, static, parameters, paper in (
            ("resnet18", _STATIC_IN_RESNETS, 44_901_640, "44.90M"),
            ("resnet50", _STATIC_IN_RESNETS, 90_670_888, "90.67M"),
            ("mobilenetv2_100", (), 11_515_637, "11.52M"),
            ("mobilenetv2_050", (), 4_437_421, "4.44M"),
        )
    ),
    PeerPreset(
        "kwod4x_mobilenetv2_100",
        "mobilenetv2_100",
        _kwod,
        12_506_955,
        "12.51M",
        "KW* of the paper",
        released_cells=True,
    ),
)

CAF_PRESETS = (
    _on_resnet18(
        "dy4x_resnet18_caf",
        method=partial(dyconv.convert, attention="caf"),
        parameters=45_472_052,
        paper="45.47M",
    ),
    _on_resnet18(
        "od4x_resnet18_caf",
        method=partial(odconv.convert, attention="caf", exclude=_STATIC_IN_RESNETS),
        parameters=44_901_640,
        paper="44.90M",
    ),
)
"""An ablation of the paper: its attention function inside other methods."""

register(*PRESETS)
