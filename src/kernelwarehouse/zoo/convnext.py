"""ConvNeXt-Tiny: every convolution; per stage one warehouse for depth-wise and one for point-wise layers.

The stem and each downsampling layer have warehouses of their own, and the nine blocks of the third stage count as
three stages of three. The published code keeps that stage whole and reduces less: a network of its own.
"""

from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.zoo._preset import Preset, half
from kernelwarehouse.zoo._registry import register

_BLOCKS = (3, 3, 9, 3)


def groups(third_stage_parts: int) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {"stem": ("stem.0",)}
    number = 0
    for stage, count in enumerate(_BLOCKS):
        if stage:
            found[f"downsample{stage}"] = (f"stages.{stage}.downsample.1",)
        parts = third_stage_parts if stage == 2 else 1
        for part in range(parts):
            number += 1
            numbers = range(part * count // parts, (part + 1) * count // parts)
            blocks = [f"stages.{stage}.blocks.{block}" for block in numbers]
            found[f"stage{number}.depthwise"] = tuple(f"{block}.conv_dw" for block in blocks)
            found[f"stage{number}.pointwise"] = tuple(f"{block}.mlp" for block in blocks)
    return found


def _preset(name: str, config: WarehouseConfig, parameters: int, paper: str | None, note: str = "") -> Preset:
    return Preset(name, "convnext_tiny", config, parameters, paper, note, released_cells=True)


PRESETS = (
    _preset(
        "kw3d4x_convnext_tiny",
        WarehouseConfig(
            norm="layer",
            reduction=1 / 32,
            groups=groups(3),
            overrides=(half("stage5.pointwise"), half("stage6.pointwise")),
        ),
        24_531_380,
        "24.53M",
    ),
    _preset(
        "kw1x_convnext_tiny", WarehouseConfig(norm="layer", reduction=1 / 32, groups=groups(3)), 32_992_964, "32.99M"
    ),
    _preset(
        "kw1x_convnext_tiny_published",
        WarehouseConfig(norm="layer", groups=groups(1)),
        39_370_674,
        None,
        "what the published code builds for 1x",
    ),
)

register(*PRESETS)
