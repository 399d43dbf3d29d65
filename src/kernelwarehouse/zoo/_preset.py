"""What a preset is."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from kernelwarehouse.config import Override, WarehouseConfig


@dataclass(frozen=True)
class Preset:
    """A network of the paper: a timm backbone, its warehouses and what both count.

    `parameters` is the exact count with 1000 classes, `paper` the printed one (`None` where the paper has no such
    network), `note` says where the two differ and why. With `released_cells`, new cells are drawn as in the released
    code; otherwise they are the pieces of the backbone's new kernels.
    """

    name: str
    backbone: str
    config: WarehouseConfig
    parameters: int
    paper: str | None
    note: str = ""
    released_cells: bool = False


Method = Callable[[nn.Module], nn.Module]
"""Makes a compared network of a backbone."""


@dataclass(frozen=True)
class PeerPreset:
    """A network that the paper compares with: a timm backbone and the method applied to it.

    `parameters`, `paper`, `note` and `released_cells` are as in `Preset`.
    """

    name: str
    backbone: str
    method: Method
    parameters: int
    paper: str | None
    note: str = ""
    released_cells: bool = False


def half(pattern: str) -> Override:
    """Half the cells, of half the width: how the paper shrinks a part of a network."""
    return Override(pattern, budget=0.5, in_ratio=0.5, out_ratio=0.5)
