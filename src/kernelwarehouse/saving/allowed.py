"""What a description on disk may ask for: a registered network, and plain values for the arguments of its class.

A description can come from anywhere. timm's and torchvision's builders also read files and fetch addresses, by their
arguments (`checkpoint_path`, `pretrained_cfg_overlay`, `weights`) and by names (`hf-hub:`, `local-dir:`): none of that
gets through here.
"""

import re
import sys
from functools import cache
from inspect import signature
from types import ModuleType
from typing import Any

import timm
import torchvision
from torch import nn

from kernelwarehouse.builder import LIBRARIES_HERE, WEIGHT_ARGUMENTS, makers
from kernelwarehouse.errors import CheckpointError

_NAME = re.compile(r"\w+(\.\w+)?", re.ASCII)  # timm's names may end in the tag of their weights, which are not read
_WORD = re.compile(r"[\w.+-]*", re.ASCII)  # `silu`, `avg`; no path and no address
_OF_ALL_NETWORKS = frozenset({"features_only", "out_indices", "feature_cls", "scriptable", "exportable", "no_jit"})
_NEVER = WEIGHT_ARGUMENTS | {"self", "args", "kwargs", "device", "dtype", "weights", "weights_backbone"}


def check_builder(library: Any, name: Any, arguments: Any) -> None:
    """Refuse everything but a network that timm or torchvision registers, with arguments of its class."""
    if isinstance(library, str) and library in LIBRARIES_HERE:
        _check_made_here(library, name, arguments)
        return
    if library not in ("timm", "torchvision"):
        known_libraries = ", ".join(("timm", "torchvision", *sorted(LIBRARIES_HERE)))
        raise CheckpointError(f"models of library {library!r} cannot be built here; there are {known_libraries}")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not _is_registered(library, name):
        raise CheckpointError(f"{library} has no model {name!r}; the plain name of a registered one is wanted")
    if not isinstance(arguments, dict):
        raise CheckpointError(f"the arguments of {name!r} are {arguments!r}; names and values are wanted")
    known = _timm_arguments(name) if library == "timm" else {"num_classes"}
    for key, value in arguments.items():
        if key not in known:
            raise CheckpointError(f"{library}'s {name!r} is not built with an argument {key!r} (= {value!r})")
        if not _is_plain(value):
            raise CheckpointError(
                f"argument {key!r} of {library}'s {name!r} is {value!r}; numbers, words and lists of them are wanted"
            )


def _check_made_here(library: str, name: Any, arguments: Any) -> None:
    """A model around a network: the network as any other, the rest plain values for the function that makes it."""
    known_names = makers(library)
    if not isinstance(name, str) or name not in known_names:
        raise CheckpointError(f"{library} has no model {name!r}; there is {', '.join(known_names)}")
    known = signature(known_names[name].make).parameters.keys()
    if not isinstance(arguments, dict) or not {"backbone", "arguments"} <= arguments.keys() <= known:
        wanted = ", ".join(known)
        raise CheckpointError(f"the arguments of {name!r} are {arguments!r}; some of {wanted} are wanted")
    check_builder("timm", arguments["backbone"], arguments["arguments"])
    for key, value in arguments.items():
        inner = value.values() if isinstance(value, dict) else [value]
        if not all(map(_is_plain, inner)):
            raise CheckpointError(
                f"argument {key!r} of {name!r} is {value!r}; numbers, words and lists of them are wanted"
            )


def _is_registered(library: str, name: str) -> bool:
    return timm.is_model(name) if library == "timm" else name in torchvision.models.list_models()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    return value is None or isinstance(value, (bool, int, float))


def _timm_arguments(name: str) -> frozenset[str]:
    """What the classes of timm's networks take, and those beside the function that makes this one (which may be
    a user's, registered with timm)."""
    maker = timm.models.model_entrypoint(name)
    own = _arguments_in(maker.__module__) | (signature(maker).parameters.keys() - _NEVER)
    return own | _arguments_of_timm() | _OF_ALL_NETWORKS


@cache
def _arguments_of_timm() -> frozenset[str]:
    modules = [name for name in sys.modules if name.startswith("timm.models.")]
    return frozenset().union(*map(_arguments_in, modules))


@cache
def _arguments_in(module: str) -> frozenset[str]:
    found: set[str] = set()
    for item in vars(sys.modules.get(module, ModuleType(module))).values():
        if isinstance(item, type) and issubclass(item, nn.Module):
            found |= signature(item.__init__).parameters.keys()
    return frozenset(found - _NEVER)
