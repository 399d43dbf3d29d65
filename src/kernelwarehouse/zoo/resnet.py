"""ResNet18 and ResNet50: every convolution but the stem, shared by stage.

The first convolution and the shortcut of a stage draw on the previous stage's warehouse (paper, table of reassigned
stages), which is what planning does by itself. ResNet50 also keeps its first 1x1 and first shortcut static.
"""

from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.zoo._preset import Preset
from kernelwarehouse.zoo._registry import register

STATIC = {
    "resnet18": ("conv1",),
    "resnet50": ("conv1", "layer1.0.conv1", "layer1.0.downsample.0"),
}


def _preset(
    tag: str, backbone: str, budget: float, parameters: int, paper: str, low_rank: float | None = None, note: str = ""
) -> Preset:
    ratio = 0.5 if budget < 1 else 1.0
    config = WarehouseConfig(
        budget=budget, in_ratio=ratio, out_ratio=ratio, low_rank=low_rank, exclude=STATIC[backbone]
    )
    return Preset(f"kw{tag}_{backbone}", backbone, config, parameters, paper, note, released_cells=True)


PRESETS = (
    _preset("1d4x", "resnet18", 1 / 4, 4_031_768, "4.08M", note="no setting gives the printed count"),
    _preset("1d2x", "resnet18", 1 / 2, 7_431_044, "7.43M"),
    _preset("1x", "resnet18", 1, 11_932_148, "11.93M"),
    _preset("2x", "resnet18", 2, 23_242_127, "23.24M"),
    _preset("4x", "resnet18", 4, 45_862_085, "45.86M"),
    _preset("1d2x", "resnet50", 1 / 2, 17_638_264, "17.64M", low_rank=1 / 16),
    _preset("1x", "resnet50", 1, 28_052_310, "28.05M"),
    _preset("4x", "resnet50", 4, 102_015_144, "102.02M"),
)

register(*PRESETS)
