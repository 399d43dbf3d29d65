"""How the convolutions of a model slide: settings that weights do not show, and that can be changed at any time."""

from typing import Any

from torch import nn

from kernelwarehouse.layers import Conv1d, Conv2d, Conv3d

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1d, Conv2d, Conv3d)


def sliding(model: nn.Module) -> dict[str, dict[str, Any]]:
    """For every convolution by name, as JSON will give it back."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, _CONVOLUTIONS):
            sizes = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
            found[name] = {key: _plain(value) for key, value in sizes.items()} | {"padding_mode": module.padding_mode}
    return found


def slides_otherwise(stored: Any, model: nn.Module) -> str | None:
    """The first convolution that does not slide as it did when it was saved, in words. Files of former versions do not
    tell."""
    if not isinstance(stored, dict):
        return None
    for name, here in sliding(model).items():
        there = stored.get(name)
        if not isinstance(there, dict):
            continue
        for key, value in here.items():
            if there.get(key) != value:
                return (
                    f"{key} of layer {name!r} was {there.get(key)!r} when it was saved and is {value!r} in this model"
                )
    return None


def _plain(value: Any) -> Any:
    return [int(size) for size in value] if isinstance(value, (tuple, list)) else value
