"""Every preset by name. Families register theirs when they are imported, and timm learns them too."""

import dataclasses
import difflib
from typing import Any

import torch
from timm.models import register_model
from torch import nn

from kernelwarehouse.builder import WEIGHT_ARGUMENTS, remember_builder
from kernelwarehouse.config import Begin, WarehouseConfig
from kernelwarehouse.conversion import apply_plan, convert
from kernelwarehouse.errors import ConfigError, UnknownPresetError
from kernelwarehouse.planning.api import plan
from kernelwarehouse.planning.plan import Plan
from kernelwarehouse.zoo._preset import PeerPreset, Preset
from kernelwarehouse.zoo._starts import build_backbone, draw_cells_as_released, has_weights

PRESETS: dict[str, Preset] = {}
"""The paper's networks with warehouses, and others of their kind."""
PEERS: dict[str, PeerPreset] = {}
"""The networks that the paper compares with."""
ABLATIONS: dict[str, Preset | PeerPreset] = {}
EVERY_PRESET: dict[str, Preset | PeerPreset] = {}
_FEATURE_ARGUMENTS = ("features_only", "out_indices", "feature_cls")


def register(*presets: Preset | PeerPreset, ablations: bool = False) -> None:
    """Make presets known to `create_model`, `timm.create_model` and the command line."""
    for preset in presets:
        if preset.name in EVERY_PRESET:
            raise ConfigError(f"two presets are named {preset.name!r}; the second is on {preset.backbone}")
        EVERY_PRESET[preset.name] = preset
        if ablations:
            ABLATIONS[preset.name] = preset
        elif isinstance(preset, PeerPreset):
            PEERS[preset.name] = preset
        else:
            PRESETS[preset.name] = preset
        _tell_timm(preset)


def find_preset(name: str) -> Preset | PeerPreset:
    if not isinstance(name, str):
        raise UnknownPresetError(f"a preset is named {name!r}; text is wanted")
    if name in EVERY_PRESET:
        return EVERY_PRESET[name]
    near = difflib.get_close_matches(name, EVERY_PRESET, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(PRESETS)}"
    raise UnknownPresetError(f"there is no preset {name!r}; {hint}")


def create_model(name: str, *, begin: Begin | None = None, **kwargs: Any) -> nn.Module:
    """A network of the paper, new, at temperature 1; `timm.create_model` builds the same.

    Arguments:
        name: a preset, as `kernelwarehouse zoo` lists them.
        begin: instead of the preset's, for one with warehouses: `"logits"` starts it at temperature 0, as in
            `WarehouseConfig`.
        kwargs: go to timm's backbone: `num_classes`, `in_chans`, `drop_path_rate`, `features_only`, ...

    Raises:
        UnknownPresetError: for a name that is no preset; it suggests the nearest.
        ConfigError: for arguments that the backbone does not take, for `pretrained=True`, and for a `begin` that does
            not go with the preset.

    Example:
        >>> import torch, kernelwarehouse as kw
        >>> model = kw.create_model("kw1x_mobilenetv2_050", num_classes=10)
        >>> model(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """
    preset = find_preset(name)
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    if kwargs.pop("pretrained", False):
        raise ConfigError(f"{name} has no weights to download; use load_published with a checkpoint of the authors")
    features = {key: kwargs[key] for key in _FEATURE_ARGUMENTS if key in kwargs}
    whole = {key: value for key, value in kwargs.items() if key not in features}
    if isinstance(preset, PeerPreset):
        if begin is not None:
            raise ConfigError(f"{name} is given begin {begin!r}, but has no settings of warehouses to change")
        model = preset.method(build_backbone(preset.backbone, kwargs))
    elif features.get("features_only"):
        model = _feature_model(preset, begin, whole, features)
    else:
        backbone = _backbone(preset, whole)
        model = convert(backbone, plan(backbone, _config(preset, begin, whole)))
    # What begins at its logits is the static network, and keeps its kernels.
    if preset.released_cells and begin != "logits" and not has_weights(kwargs):
        draw_cells_as_released(model)
    # A network with warehouses is its backbone and its plan; what the other methods make has no plan of its own.
    remember_builder(model, name if isinstance(preset, PeerPreset) else preset.backbone, kwargs)
    return model


def preset_plan(preset: Preset, begin: Begin | None = None, **kwargs: Any) -> Plan:
    """The plan of a preset, made on a backbone without memory."""
    with torch.device("meta"):
        return plan(_backbone(preset, kwargs), _config(preset, begin, kwargs))


def _backbone(preset: Preset, arguments: dict[str, Any]) -> nn.Module:
    try:
        return build_backbone(preset.backbone, arguments)
    except TypeError as error:
        raise ConfigError(f"{preset.name}: timm's {preset.backbone} does not take {arguments}: {error}") from error


def _config(preset: Preset, begin: Begin | None, arguments: dict[str, Any]) -> WarehouseConfig:
    """The preset's settings, without the classifier's warehouse where there is no classifier."""
    config = preset.config if begin is None else dataclasses.replace(preset.config, begin=begin)
    if arguments.get("num_classes") != 0 or "classifier" not in config.groups:
        return config
    groups = {name: patterns for name, patterns in config.groups.items() if name != "classifier"}
    overrides = tuple(override for override in config.overrides if override.pattern != "classifier")
    return dataclasses.replace(config, groups=groups, overrides=overrides)


def _feature_model(preset: Preset, begin: Begin | None, whole: dict[str, Any], features: dict[str, Any]) -> nn.Module:
    """timm takes a backbone apart for features and renames its modules; the plan is made on the whole one, so that
    the warehouses keep their size and a classifier's weights fit."""
    model = build_backbone(preset.backbone, whole | features)
    here = {common_name(name): name for name, _ in model.named_modules()}
    planned = preset_plan(preset, begin, **whole)
    names = {layer.spec.name: here.get(common_name(layer.spec.name)) for layer in planned.layers}
    return apply_plan(model, planned, {name: found for name, found in names.items() if found is not None})


def common_name(name: str) -> str:
    """Feature lists rename `stages.0.blocks.1` to `stages_0.blocks.1`, feature getters to `model.stages.0.blocks.1`."""
    return name.removeprefix("model.").replace("_", ".")


def _tell_timm(preset: Preset | PeerPreset) -> None:
    def entry(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        own = {key: value for key, value in kwargs.items() if key not in WEIGHT_ARGUMENTS}
        return create_model(preset.name, pretrained=pretrained, **own)

    entry.__name__ = preset.name
    entry.__module__ = __name__
    entry.__doc__ = f"{preset.backbone} of {preset.parameters:,} parameters."
    register_model(entry)
