"""Any network by name, timm's or this library's, or an error that says what would be right."""

import difflib
from pathlib import Path
from typing import Any

import timm
from torch import nn

from kernelwarehouse.builder import WEIGHT_ARGUMENTS
from kernelwarehouse.errors import ConfigError, KernelWarehouseError, UnknownPresetError
from kernelwarehouse.zoo._starts import build_backbone


def check_name(name: str) -> None:
    """Refuse a name that timm does not know, or a tag of weights (as in `resnet18.a1_in1k`) that it does not know."""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = (
            f"did you mean {' or '.join(near)}?" if near else "'kernelwarehouse zoo' and timm.list_models() list them"
        )
        raise UnknownPresetError(f"there is no network {name!r}; {hint}")
    network, dot, tag = name.partition(".")
    if dot:
        tagged = timm.list_pretrained(f"{network}.*")
        if name not in tagged:
            hint = f"there are {', '.join(tagged)}" if tagged else f"it has none; write {network}"
            raise UnknownPresetError(f"{network} has no weights tagged {tag!r}; {hint}")


def build_by_name(name: str, /, **arguments: Any) -> nn.Module:
    """`timm.create_model`, which knows this library's networks as well. The paper's static networks start as those that
    are compared with them do."""
    check_name(name)
    weights = arguments.get("checkpoint_path")
    if weights is not None and not Path(str(weights)).is_file():
        raise ConfigError(f"checkpoint_path is {weights!r}, which is no file; the weights of {name} are wanted there")
    try:
        return build_backbone(name, arguments, stays_static=True)
    except KernelWarehouseError:
        raise
    except Exception as error:  # a maker can refuse arguments in any way, and weights can fail to come in any way
        problem = f"{type(error).__name__}: {error}".rstrip(": ")
        if any(arguments.get(argument) for argument in WEIGHT_ARGUMENTS):
            problem += "; without weights to load or fetch (such as pretrained) it starts from new ones"
        raise ConfigError(f"{name} cannot be built with {arguments}: {problem}") from error
