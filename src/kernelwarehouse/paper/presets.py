"""Which rows of the paper speak of which preset."""

from collections.abc import Mapping
from dataclasses import dataclass

from kernelwarehouse.paper.tables import Result, results

_BACKBONES = {
    "ResNet18": "resnet18",
    "ResNet50": "resnet50",
    "MobileNetV2 (1.0x)": "mobilenetv2_100",
    "MobileNetV2 (0.5x)": "mobilenetv2_050",
    "ConvNeXt-Tiny": "convnext_tiny",
    "DeiT-Small": "deit_small",
    "DeiT-Tiny": "deit_tiny",
}
_STATIC = {"DeiT-Small": "deit_small_patch16_224", "DeiT-Tiny": "deit_tiny_patch16_224"}
"""Static networks whose name in timm is longer than in our presets."""
_METHODS = {"KW": "kw", "KW*": "kwod", "DY-Conv": "dy", "ODConv": "od"}
ACCURACY_TABLES = {
    "table:classification_resnet_100epoch": "100 epochs",
    "table:classification_mobilenetv2": "150 epochs",
    "table:odconv_kernelwarehouse": "150 epochs",
    "table:classification_cnn_300epoch": "300 epochs",
    "table:transformer": "300 epochs",
}
"""The tables of ImageNet accuracies of whole networks, and how long they were trained."""
RECIPES = {
    "table:classification_resnet_100epoch": "traditional",
    "table:classification_mobilenetv2": "mobilenetv2_published",
    "table:odconv_kernelwarehouse": "mobilenetv2_published",
    "table:classification_cnn_300epoch": "advanced_published",
}
"""By which recipe of `training` the networks of a table were trained; how DeiT was is not published.

The `..._published` ones are those of the released code, which has configurations of static networks and of most
with warehouses, none of ConvNeXt-Tiny at 3/4, KW* and compared methods. The paper says that all were trained alike.
"""


def preset_name(row: Result) -> str:
    """The name of the preset, here or in timm, that a row without a setting speaks of."""
    if row.method is None:
        return _STATIC.get(row.backbone, _BACKBONES[row.backbone])
    budget = "" if row.budget is None else f"{row.budget}x".replace("/", "d")
    return f"{_METHODS.get(row.method, row.method.lower())}{budget}_{_BACKBONES[row.backbone]}"


@dataclass(frozen=True)
class Published:
    """What the paper prints of one network. `top1` is by length of training; `None` where a table leaves it out."""

    params_millions: float | None
    top1: Mapping[str, float]
    fps: float | None
    training_memory_mb: float | None


def published(preset: str) -> Published | None:
    """The paper's figures for a preset or static network, or `None` if it has none."""
    rows = [row for row in results() if row.setting is None and row.detector is None and preset_name(row) == preset]
    if not rows:
        return None

    def first(metric: str) -> float | None:
        return next((row.metrics[metric] for row in rows if metric in row.metrics), None)

    top1 = {ACCURACY_TABLES[row.table]: row.metrics["top1"] for row in rows if row.table in ACCURACY_TABLES}
    return Published(first("params_millions"), top1, first("fps"), first("training_memory_mb"))


def recipes(preset: str) -> list[str]:
    """The recipes of the tables that have the paper's accuracies of a preset or static network. A network that the
    released code builds in the place of the paper's (`..._published`) was trained as that one."""
    name = preset.removesuffix("_published")
    tables = [
        row.table for row in results() if row.setting is None and row.detector is None and preset_name(row) == name
    ]
    return [recipe for recipe in dict.fromkeys(RECIPES.values()) if any(RECIPES.get(t) == recipe for t in tables)]
