"""What a preset is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kernelwarehouse.config import Override, WarehouseConfig


@dataclass(frozen=True)
class Preset:
    """A network of the paper: a timm backbone, its warehouses and what both count.

    `parameters` is the exact count with 1000 classes, `paper` the printed one (`None` where the paper has no such
    network), `note` says where the two differ and why.
    """

    name: str
    backbone: str
    config: WarehouseConfig
    parameters: int
    paper: str | None
    note: str = ""


Method = Callable[[nn.Module], nn.Module]
"""Makes a compared network of a backbone."""


@dataclass(frozen=True)
class PeerPreset:
    """A network that the paper compares with: a timm backbone and the method applied to it.

    `parameters`, `paper` and `note` are as in `Preset`; `arguments` go to timm.
    """

    name: str
    backbone: str
    method: Method
    parameters: int
    paper: str | None
    note: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


def half(pattern: str) -> Override:
    """Half the cells, of half the width: how the paper shrinks a part of a network."""
    return Override(pattern, budget=0.5, in_ratio=0.5, out_ratio=0.5)
