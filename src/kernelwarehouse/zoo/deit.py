"""DeiT: value, output projection and both MLP matrices; queries and keys stay static.

The paper gives only counts; these settings reproduce them.
"""

from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.zoo._preset import Preset, half
from kernelwarehouse.zoo._registry import register

_BLOCKS = 12


def per_blocks(count: int, parts: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """For every `count` blocks, a warehouse for each named part."""
    found = {}
    for number, first in enumerate(range(0, _BLOCKS, count), 1):
        for part, layers in parts.items():
            name = f"blocks{number}.{part}" if part else f"blocks{number}"
            found[name] = tuple(f"blocks.{block}.{layer}" for block in range(first, first + count) for layer in layers)
    return found


_ATTENTION = ("attn.qkv:value", "attn.proj")
_MLP = ("mlp.fc1", "mlp.fc2")
_THREES = per_blocks(3, {"": _ATTENTION + _MLP})
_SMALL, _TINY = "deit_small_patch16_224", "deit_tiny_patch16_224"

PRESETS = (
    Preset(
        "kw3d4x_deit_small",
        _SMALL,
        WarehouseConfig(
            norm="layer",
            reduction=1 / 32,
            groups=_THREES,
            overrides=(half("blocks3"), half("blocks4")),
        ),
        19_228_060,
        "19.23M",
    ),
    Preset("kw1x_deit_small", _SMALL, WarehouseConfig(norm="layer", groups=_THREES), 24_358_096, "24.36M"),
    Preset(
        "kw1x_deit_tiny", _TINY, WarehouseConfig(norm="layer", groups=_THREES), 6_384_688, "6.39M", "6.38M when rounded"
    ),
    Preset(
        "kw4x_deit_tiny",
        _TINY,
        WarehouseConfig(
            budget=4, norm="layer", reduction=1 / 8, groups=per_blocks(2, {"attention": _ATTENTION, "mlp": _MLP})
        ),
        20_435_968,
        "20.44M",
    ),
)

register(*PRESETS)
