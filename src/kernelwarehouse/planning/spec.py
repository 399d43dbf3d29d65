"""What planning needs to know of a layer, without the layer."""

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["conv1d", "conv2d", "conv3d", "linear"]
Order = Literal["traced", "run", "registration"]
"""Where the order of layers comes from: symbolic tracing, a run with an example, or only the order of registration."""


@dataclass(frozen=True)
class LayerSpec:
    """A layer that can be converted. `part` is `"value"` for the value third of a fused query-key-value layer."""

    name: str
    kind: Kind
    kernel_shape: tuple[int, ...]
    in_channels: int
    groups: int = 1
    part: Literal["value"] | None = None

    @property
    def label(self) -> str:
        """The name that patterns match and plans print."""
        return f"{self.name}:{self.part}" if self.part else self.name or "(model)"

    @property
    def out_channels(self) -> int:
        return self.kernel_shape[0]

    @property
    def kernel_size(self) -> tuple[int, ...]:
        return self.kernel_shape[2:]

    @property
    def parameters(self) -> int:
        """Parameters of the static kernel, without bias."""
        return math.prod(self.kernel_shape)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.kernel_shape[1] == 1

    @property
    def pointwise(self) -> bool:
        return all(size == 1 for size in self.kernel_size)

    def __str__(self) -> str:
        size = "x".join(map(str, self.kernel_size))
        text = f"{self.kind} {self.in_channels}->{self.out_channels}"
        return text + (f" {size}" if size else "") + (f" groups={self.groups}" if self.groups > 1 else "")


@dataclass(frozen=True)
class StaticLayer:
    """A layer that is left as it is, and why."""

    name: str
    kind: str
    parameters: int
    reason: str


@dataclass(frozen=True)
class Group:
    """Layers that will share a warehouse. `shape_from` are the layers whose divisors decide its cells."""

    name: str
    layers: tuple[LayerSpec, ...]
    shape_from: tuple[LayerSpec, ...]
