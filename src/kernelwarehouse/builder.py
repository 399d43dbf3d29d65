"""Which names and arguments made a model, remembered on the model: saving asks, those who build tell."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

WEIGHT_ARGUMENTS = frozenset({"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"})
"""What timm takes, and hands to every maker of a network, for weights to read or download."""

_BUILDER = "_kernelwarehouse_builder"


class Builder(NamedTuple):
    """What `remember_builder` noted."""

    name: str
    arguments: dict[str, Any]
    library: str = "timm"


def remember_builder(model: nn.Module, name: str, arguments: Mapping[str, Any], library: str = "timm") -> None:
    """Note that `timm.create_model(name, **arguments)` makes a network like this one, or like it before conversion.

    With another library, that it is `makers(library)[name]` that does.
    """
    own = {key: value for key, value in arguments.items() if key not in WEIGHT_ARGUMENTS and value is not None}
    setattr(model, _BUILDER, Builder(name, own, library))


def builder_of(model: nn.Module) -> Builder | None:
    """What `remember_builder` noted on this very module."""
    return vars(model).get(_BUILDER)


@dataclass(frozen=True)
class Maker:
    """Makes a model around a network of timm's. Its arguments are plain values and mappings of them; `backbone` and
    `arguments` are the network's, which the model holds as `network`: the part of it that a plan converts."""

    make: Callable[..., nn.Module]
    network: str


# Rooms that build models of their own. They stand above saving, which imports them when a file asks for such a model.
_ROOMS = {"detection": "kernelwarehouse.detection.detector"}
LIBRARIES_HERE = frozenset(_ROOMS)


def makers(library: str) -> Mapping[str, Maker]:
    """The models that a room of this library builds, by name."""
    found: Mapping[str, Maker] = import_module(_ROOMS[library]).MAKERS
    return found
