"""Where the compared methods go in a backbone, and how they get there: on a copy, by the mechanism of `convert`."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from timm.models import resnet as timm_resnet
from torch import nn
from torchvision.models import resnet as torchvision_resnet

from kernelwarehouse.conversion import replace_modules
from kernelwarehouse.errors import ConvertError
from kernelwarehouse.planning.discover import discover
from kernelwarehouse.planning.patterns import Patterns
from kernelwarehouse.planning.spec import LayerSpec

_RESIDUAL_BLOCKS = (
    timm_resnet.BasicBlock,
    timm_resnet.Bottleneck,
    torchvision_resnet.BasicBlock,
    torchvision_resnet.Bottleneck,
)


@dataclass(frozen=True)
class ResidualBlock:
    """A residual block of a ResNet by the names of its parts; the shortcut's convolution is not among them."""

    name: str
    convolutions: tuple[str, ...]
    last_norm: str
    in_channels: int
    out_channels: int


def residual_blocks(model: nn.Module) -> list[ResidualBlock]:
    found = []
    for name, module in model.named_modules():
        if isinstance(module, _RESIDUAL_BLOCKS):
            parts = [part for part in ("conv1", "conv2", "conv3") if hasattr(module, part)]
            first, last = module.get_submodule(parts[0]), module.get_submodule(parts[-1])
            if not isinstance(first, nn.Conv2d) or not isinstance(last, nn.Conv2d):
                raise ConvertError(f"block {name!r} has been converted already; start from the static model")
            convolutions = tuple(f"{name}.{part}" for part in parts)
            found.append(
                ResidualBlock(name, convolutions, f"{name}.bn{len(parts)}", first.in_channels, last.out_channels)
            )
    if not found:
        raise ConvertError(
            f"{type(model).__name__} has no residual block of timm's or torchvision's ResNets; "
            "this method is defined by them"
        )
    return found


def convolutions(model: nn.Module, exclude: Iterable[str] = ()) -> list[LayerSpec]:
    """The two-dimensional convolutions in forward order, without those that the patterns fit."""
    found = [layer for layer in discover(model).layers if layer.kind == "conv2d"]
    excluded = Patterns(exclude, [layer.name for layer in found]).matches
    return [layer for layer in found if layer.name not in excluded]


def classifier(model: nn.Module) -> list[str]:
    """The name of the last linear layer, if there is one (a backbone for features has none)."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1:]


def replaced(model: nn.Module, new_modules: dict[str, Callable[[Any], nn.Module]]) -> nn.Module:
    """A copy of the model in which every named module has given way to what its function makes of it."""
    if not new_modules:
        raise ConvertError(f"{type(model).__name__} has no layer that this method would replace")
    converted = copy.deepcopy(model)
    new = {}
    for name, make in new_modules.items():
        old = converted.get_submodule(name)
        new[name] = make(old).train(old.training)
    return replace_modules(converted, new)


def gated(model: nn.Module, make_gate: Callable[[int, int], nn.Module]) -> nn.Module:
    """A copy of the model with a gate after the last norm of every residual block, before the addition.

    `make_gate` is given the number of channels and the stage, counted from 0.
    """
    new: dict[str, Callable[[Any], nn.Module]] = {}
    widths: list[int] = []
    for block in residual_blocks(model):
        if block.out_channels not in widths:
            widths.append(block.out_channels)
        gate = make_gate(block.out_channels, widths.index(block.out_channels))
        new[block.last_norm] = partial(_followed_by, gate=gate)
    return replaced(model, new)


def _followed_by(norm: nn.Module, gate: nn.Module) -> nn.Module:
    return nn.Sequential(norm, gate.to(norm.get_parameter("weight")))
