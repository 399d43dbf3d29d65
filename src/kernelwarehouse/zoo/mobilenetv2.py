"""MobileNetV2: warehouses by stage and by kind of convolution.

Stages are the rows of the block table, the last two rows one stage. The first block of a stage belongs to the stage
before; the last 1x1 belongs to the last stage, with its projections.
"""

from kernelwarehouse.config import Override, WarehouseConfig
from kernelwarehouse.zoo._preset import Preset, half
from kernelwarehouse.zoo._registry import register

# Blocks of each stage, by timm's names.
_BLOCKS: dict[int, tuple[str, ...]] = {
    1: ("0.0", "1.0"),
    2: ("1.1", "2.0"),
    3: ("2.1", "2.2", "3.0"),
    4: ("3.1", "3.2", "3.3", "4.0"),
    5: ("4.1", "4.2", "5.0"),
    6: ("5.1", "5.2", "6.0"),
}
_FIRST_BLOCK = "0.0"  # has no expansion; timm calls its projection conv_pw


def _depthwise(stage: int) -> tuple[str, ...]:
    return tuple(f"blocks.{block}.conv_dw" for block in _BLOCKS[stage])


def _expansions(stage: int) -> tuple[str, ...]:
    return tuple(f"blocks.{block}.conv_pw" for block in _BLOCKS[stage] if block != _FIRST_BLOCK)


def _projections(stage: int) -> tuple[str, ...]:
    names = [f"blocks.{block}.{'conv_pw' if block == _FIRST_BLOCK else 'conv_pwl'}" for block in _BLOCKS[stage]]
    return (*names, "conv_head") if stage == 6 else tuple(names)


def one_x_groups() -> dict[str, tuple[str, ...]]:
    """Per stage one warehouse for depth-wise and one for point-wise layers."""
    groups: dict[str, tuple[str, ...]] = {"stem": ("conv_stem",)}
    for stage in _BLOCKS:
        groups[f"stage{stage}.depthwise"] = _depthwise(stage)
        groups[f"stage{stage}.pointwise"] = _expansions(stage) + _projections(stage)
    return groups


def four_x_groups() -> dict[str, tuple[str, ...]]:
    """Per stage one warehouse for depth-wise layers, one for expansions and one for projections."""
    groups: dict[str, tuple[str, ...]] = {"stem": ("conv_stem",)}
    for stage in _BLOCKS:
        groups |= {
            f"stage{stage}.expansion": _expansions(stage),
            f"stage{stage}.depthwise": _depthwise(stage),
            f"stage{stage}.projection": _projections(stage),
        }
    return groups


def half_x_groups() -> dict[str, tuple[str, ...]]:
    """Stem and depth-wise layers, the last stage's point-wise layers and the classifier; the rest stays static."""
    groups: dict[str, tuple[str, ...]] = {"stem": ("conv_stem",)}
    for stage in range(1, 6):
        groups[f"stage{stage}.depthwise"] = _depthwise(stage)
    return groups | {
        "stage6.expansion": _expansions(6),
        "stage6.depthwise": _depthwise(6),
        "stage6.projection": _projections(6),
        "classifier": ("classifier",),
    }


def _half_x_config() -> WarehouseConfig:
    return WarehouseConfig(
        budget=1,
        reduction=1 / 32,
        groups=half_x_groups(),
        overrides=(
            half("stage6.expansion"),
            half("stage6.projection"),
            # Cells of 1000 x 32: the classifier's input is 1280 wide at both widths.
            Override("classifier", budget=0.5, in_ratio=32 / 1280, out_ratio=1),
        ),
    )


def _presets(width: str, counts: tuple[int, int, int], paper: tuple[str, str, str]) -> tuple[Preset, ...]:
    backbone = f"mobilenetv2_{width}"
    configs = (
        ("1d2x", _half_x_config()),
        ("1x", WarehouseConfig(budget=1, groups=one_x_groups())),
        ("4x", WarehouseConfig(budget=4, groups=four_x_groups())),
    )
    return tuple(
        Preset(f"kw{tag}_{backbone}", backbone, config, count, printed, released_cells=True)
        for (tag, config), count, printed in zip(configs, counts, paper, strict=True)
    )


PRESETS = _presets("050", (1_466_888, 2_854_522, 4_648_587), ("1.47M", "2.85M", "4.65M")) + _presets(
    "100", (2_654_396, 5_168_146, 11_379_382), ("2.65M", "5.17M", "11.38M")
)

register(*PRESETS)
