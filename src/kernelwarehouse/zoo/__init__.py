"""The networks of the paper, on timm's own backbones, registered with timm under their published names.

Every file here whose name begins with a letter is a family of networks and registers its presets: a new family is one
new file.
"""

from importlib import import_module
from pkgutil import iter_modules

from kernelwarehouse.zoo._networks import build_by_name, check_name
from kernelwarehouse.zoo._preset import PeerPreset, Preset
from kernelwarehouse.zoo._registry import (
    ABLATIONS,
    EVERY_PRESET,
    PEERS,
    PRESETS,
    common_name,
    create_model,
    find_preset,
    preset_plan,
    register,
)

__all__ = [
    "ABLATIONS",
    "EVERY_PRESET",
    "PEERS",
    "PRESETS",
    "PeerPreset",
    "Preset",
    "build_by_name",
    "check_name",
    "common_name",
    "create_model",
    "find_preset",
    "preset_plan",
    "register",
]

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        import_module(f"{__name__}.{_module.name}")
