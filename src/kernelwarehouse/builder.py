"""Which of timm's names and arguments made a network, remembered on the network: saving asks, the zoo tells."""

from collections.abc import Mapping
from typing import Any

from torch import nn

WEIGHT_ARGUMENTS = frozenset({"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"})
"""What timm takes, and hands to every maker of a network, for weights to read or download."""

_BUILDER = "_kernelwarehouse_builder"


def remember_builder(model: nn.Module, name: str, arguments: Mapping[str, Any]) -> None:
    """Note that `timm.create_model(name, **arguments)` makes a network like this one, or like it before conversion."""
    own = {key: value for key, value in arguments.items() if key not in WEIGHT_ARGUMENTS and value is not None}
    setattr(model, _BUILDER, (name, own))


def builder_of(model: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """What `remember_builder` noted on this very module."""
    return vars(model).get(_BUILDER)
