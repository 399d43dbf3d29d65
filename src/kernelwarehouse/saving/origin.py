"""Which function built a model, so that a saved model can be rebuilt without its source or a pickle."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal

import timm
import torch
import torchvision
from timm.layers import DropPath
from torch import nn

from kernelwarehouse.conversion import apply_plan, plan_of
from kernelwarehouse.errors import CheckpointError
from kernelwarehouse.zoo import ARCHITECTURE, create_model

Library = Literal["kernelwarehouse", "timm", "torchvision"]


@dataclass(frozen=True)
class Architecture:
    """A builder's name and arguments. A model from the zoo comes converted; the others are converted by their plan."""

    library: Library
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        try:
            match self.library:
                case "kernelwarehouse":
                    return create_model(self.name, **self.arguments)
                case "timm":
                    return timm.create_model(self.name, **self.arguments)
                case "torchvision":
                    builder = torchvision.models.get_model_builder(self.name)
                    # Segmentation and detection models would otherwise download weights for their backbones.
                    inner = {"weights_backbone": None} if "weights_backbone" in signature(builder).parameters else {}
                    return builder(weights=None, **inner, **self.arguments)
                case _:
                    raise CheckpointError(f"models of library {self.library!r} cannot be built here")
        except CheckpointError:
            raise
        except Exception as error:  # a builder can refuse arguments in any way
            raise CheckpointError(
                f"{self.library} cannot build {self.name!r} with {self.arguments}: {error}"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def identify(model: nn.Module) -> Architecture | None:
    """The builder that gives a model of exactly these modules and shapes, or `None` where none is found."""
    known = getattr(model, ARCHITECTURE, None)
    if known is not None:
        return Architecture(**known)
    for guess in _guesses(model):
        if _rebuilds(guess, model):
            setattr(model, ARCHITECTURE, guess.to_dict())
            return guess
    return None


def _guesses(model: nn.Module) -> Iterator[Architecture]:
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and config.get("architecture"):
        yield Architecture("timm", config["architecture"], _timm_arguments(model))
    if type(model).__module__.startswith("torchvision.models"):
        layers = [module for name, module in model.named_modules() if ".attention." not in name]
        widths = [getattr(module, "out_features", getattr(module, "out_channels", None)) for module in layers]
        known = [width for width in widths if isinstance(width, int)]
        arguments = {"num_classes": known[-1]} if known else {}
        for name in torchvision.models.list_models():
            builder = torchvision.models.get_model_builder(name)
            if builder.__module__ == type(model).__module__:
                yield Architecture("torchvision", name, arguments)


def _timm_arguments(model: nn.Module) -> dict[str, Any]:
    """The arguments that people commonly give, read off the model; those at their defaults are left out."""
    arguments: dict[str, Any] = {}
    config: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    classes = getattr(model, "num_classes", None)
    if classes is not None and classes != config.get("num_classes"):
        arguments["num_classes"] = classes
    stem = next((module for module in model.modules() if isinstance(getattr(module, "in_channels", None), int)), None)
    if stem is not None and stem.in_channels != 3:
        arguments["in_chans"] = stem.in_channels
    rate = getattr(model, "drop_rate", 0.0)
    if isinstance(rate, float) and rate:
        arguments["drop_rate"] = rate
    paths = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    if paths:
        arguments["drop_path_rate"] = max(paths)
    patches = getattr(model, "patch_embed", None)
    size = getattr(patches, "img_size", None)
    if size is not None and tuple(size) != tuple(config.get("input_size", (3, *size))[1:]):
        arguments["img_size"] = tuple(size)
    return arguments


def _rebuilds(guess: Architecture, model: nn.Module) -> bool:
    """Whether the guess, converted by the model's plan, has the model's modules, settings and shapes."""
    plan = plan_of(model)
    try:
        with torch.device("meta"):
            twin = guess.build()
            if plan is not None:
                twin = apply_plan(twin, plan, {layer.spec.name: layer.spec.name for layer in plan.layers})
    except Exception:  # a wrong guess can fail in any way
        return False
    return repr(twin) == repr(model) and _shapes(twin) == _shapes(model)


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
