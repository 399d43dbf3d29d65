"""Convolutions and linear layers whose kernels come from a warehouse: drop-in replacements for torch's."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelwarehouse._bfloat16 import require_computable
from kernelwarehouse.assemble import Geometry, Route, evaluate_layer, route_table
from kernelwarehouse.assemble.basis import Prepared
from kernelwarehouse.assemble.repetition import Repetition
from kernelwarehouse.assignment import beta
from kernelwarehouse.attention import Attention
from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import KernelWarehouseError
from kernelwarehouse.padding import image_mean
from kernelwarehouse.partition import Partition
from kernelwarehouse.planning.cells import plan_warehouse
from kernelwarehouse.planning.plan import PlannedWarehouse
from kernelwarehouse.planning.spec import Group, Kind, LayerSpec
from kernelwarehouse.warehouse import Warehouse, draw_cells, kaiming_normal, scale_for_logits

Size = int | tuple[int, ...]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


@dataclass(frozen=True)
class Source:
    """Where a layer gets its kernels from."""

    warehouse: Warehouse
    attention: Attention


def make_sources(
    planned: PlannedWarehouse, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> list[Source]:
    """A warehouse with empty cells, and for each of its layers a new attention."""
    warehouse = Warehouse(planned.name, planned.cells, planned.cell_shape, device, dtype)
    sources = []
    for index, ranges in enumerate(planned.starts()):
        starts = None if planned.start == "none" else beta(ranges, planned.cells)
        sources.append(Source(warehouse, Attention(planned.attention_shape(index), starts, device, dtype)))
    return sources


def own_source(
    spec: LayerSpec, config: WarehouseConfig, device: torch.device | str | None, dtype: torch.dtype | None
) -> Source:
    """A warehouse for one layer alone, with cells as new."""
    planned = plan_warehouse(Group(spec.name, (spec,), (spec,)), config)
    [source] = make_sources(planned, device, dtype)
    draw_cells(source.warehouse.cells, planned.partitions[0], planned.claims[0], kaiming_normal)
    if planned.begin == "logits":
        scale_for_logits(source.warehouse.cells, planned.starts())
    return source


class WarehouseLayer(nn.Module):
    """A layer whose kernel is mixed, for every sample, from the cells of a warehouse.

    `attention` gives the weights of the mixtures, `geometry` says how the kernel is cut and applied. There is no
    `weight`: every sample has its own.
    """

    bias: nn.Parameter | None
    fixed: ClassVar[frozenset[str]] = frozenset()  # attributes that the cells and the attention were made for

    def __init__(self, source: Source, geometry: Geometry, bias: bool) -> None:
        super().__init__()
        cells, partition, shape = source.warehouse.cells, geometry.partition, source.attention.shape
        if (shape.mixtures, shape.cells) != (partition.mixtures, len(cells)):
            raise KernelWarehouseError(
                f"attention over {shape.mixtures} mixtures and {shape.cells} cells given to a layer of "
                f"{partition.mixtures} mixtures with a warehouse of {len(cells)} cells"
            )
        self.geometry = geometry
        self.prepared: Prepared | None = None  # by prepare_inference
        self.route: Route | None = None  # that the last call took
        self.warehouse = source.warehouse
        self.attention = source.attention
        out = geometry.out_channels
        self.bias = nn.Parameter(torch.zeros(out, device=cells.device, dtype=cells.dtype)) if bias else None

    def _evaluate(self, x: Tensor, seen: Tensor) -> Tensor:
        """`x` as `Geometry` wants it; `seen` is what the attention looks at."""
        # A module's own ways to look up its parts and to set an attribute take longer than a small product.
        attention, warehouse = cast(Attention, self._modules["attention"]), cast(Warehouse, self._modules["warehouse"])
        kept, geometry, prepared = self.__dict__, self.geometry, self.prepared
        if torch.compiler.is_compiling():
            return evaluate_layer(x, seen, attention, warehouse, geometry, prepared)[0]
        repetition: Repetition | None = kept.get("_repetition")
        if repetition is not None:
            out = repetition.evaluate(x, seen, attention, warehouse, geometry, prepared)
            if out is not None:
                kept["route"] = repetition.route
                return out
        require_computable(x.device, x.dtype)
        asked_at = route_table.changes()
        out, route = evaluate_layer(x, seen, attention, warehouse, geometry, prepared)
        kept["_repetition"] = Repetition.of(route, asked_at, x, attention, warehouse, geometry, prepared)
        kept["route"] = route
        return out

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.prepared = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and files carry no memory that can be made again, and no history.
        return {**super().__getstate__(), "prepared": None, "route": None, "_repetition": None}

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} mixes a kernel for every sample and has no 'weight'; where a model reads the "
                "weight of a layer instead of calling it, exclude that layer from the plan"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} mixes a kernel for every sample and has no 'weight' to set; change the model "
                "before it is converted, or set warehouse.cells"
            )
        if name in self.fixed and self.__dict__.get(name, value) != value:
            raise AttributeError(
                f"{name} of this {type(self).__name__} is {self.__dict__[name]!r} and cannot become {value!r}: its "
                "cells and attention were made for that; change the model before it is converted"
            )
        super().__setattr__(name, value)

    def _mixing_repr(self) -> str:
        mixtures, cells = self.geometry.partition.mixtures, len(self.warehouse.cells)
        return f"warehouse={self.warehouse.name!r}, mixtures={mixtures}, cells={cells}"


class _Conv(WarehouseLayer):
    """What the three convolutions share. Arguments and attributes are those of `torch.nn.Conv{1,2,3}d`.

    Without a `source`, the layer gets a warehouse of its own, made to `config`. How the kernel slides (`stride`,
    `padding`, `dilation`, `padding_mode`) may be set later; what the kernel is may not.
    """

    axes: ClassVar[int]
    fixed = frozenset({"in_channels", "out_channels", "kernel_size", "groups", "transposed", "output_padding"})

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | Literal["same", "valid"] = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        source: Source | None = None,
        config: WarehouseConfig | None = None,
    ) -> None:
        template = _template(
            self.axes, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        )
        kernel_shape = tuple(template.weight.shape)
        if source is None:
            kind = cast(Kind, f"conv{self.axes}d")
            spec = LayerSpec(kind, kind, kernel_shape, in_channels, groups)
            source = own_source(spec, config or WarehouseConfig(), device, dtype)
        partition = Partition(kernel_shape, tuple(source.warehouse.cells.shape[1:]))
        geometry, around = _geometry(partition, template)
        super().__init__(source, geometry, bias)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = template.kernel_size, template.stride, template.dilation
        self.padding, self.padding_mode = template.padding, padding_mode
        self.transposed, self.output_padding = False, template.output_padding
        self._pad_around = around

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SLIDING or "_pad_around" not in self.__dict__:  # the last thing that is made
            super().__setattr__(name, value)
            return
        sliding = {known: self.__dict__[known] for known in _SLIDING} | {name: value}
        shape = {"in_channels": self.in_channels, "out_channels": self.out_channels, "kernel_size": self.kernel_size}
        template = _template(self.axes, **shape, groups=self.groups, **sliding)
        self.geometry, self._pad_around = _geometry(self.geometry.partition, template)
        super().__setattr__(name, getattr(template, name))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        if len(shape) not in (self.axes + 1, self.axes + 2) or shape[-self.axes - 1] != self.in_channels:
            raise KernelWarehouseError(
                f"input of shape {tuple(x.shape)} given to a layer of {self.in_channels} input channels and "
                f"{self.axes} spatial axes; [batch, channels, *space] or [channels, *space] is wanted"
            )
        if len(shape) == self.axes + 1:
            return self.forward(x[None])[0]
        of_image = image_mean(x)
        seen = x if of_image is None else of_image
        if self._pad_around is not None:
            x = F.pad(x, self._pad_around, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
        for size, least in zip(x.shape[2:], self.geometry.smallest_input, strict=True):
            if size < least:
                raise KernelWarehouseError(
                    f"input of shape {tuple(x.shape)} is smaller than the kernel {self.kernel_size}"
                )
        out = self._evaluate(x, seen)
        return out if self.bias is None else out + self.bias.to(out.dtype).view(-1, *[1] * self.axes)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        if self.padding != (0,) * self.axes:
            text += f", padding={self.padding}"
        if self.dilation != (1,) * self.axes:
            text += f", dilation={self.dilation}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        if self.bias is None:
            text += ", bias=False"
        if self.padding_mode != "zeros":
            text += f", padding_mode={self.padding_mode}"
        return f"{text}, {self._mixing_repr()}"


class Conv1d(_Conv):
    axes = 1


class Conv2d(_Conv):
    axes = 2


class Conv3d(_Conv):
    axes = 3


_SLIDING = ("stride", "padding", "dilation", "padding_mode")
_TORCH: dict[int, Callable[..., nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def _template(axes: int, *arguments: Any, **named: Any) -> nn.Conv1d | nn.Conv2d | nn.Conv3d:
    """torch's own layer, without memory: it checks the arguments and spells them out."""
    try:
        template = _TORCH[axes](*arguments, **named, device="meta")
    except (ValueError, TypeError, RuntimeError) as error:
        raise KernelWarehouseError(f"no convolution over {axes} axes can be made like this: {error}") from error
    # What torch finds out only when such a layer is called.
    for name, least in (("kernel_size", 1), ("stride", 1), ("dilation", 1), ("padding", 0)):
        sizes = getattr(template, name)
        if isinstance(sizes, str):
            continue
        if len(sizes) != axes or not all(isinstance(size, numbers.Integral) and int(size) >= least for size in sizes):
            raise KernelWarehouseError(
                f"{name} is {sizes!r}; {axes} whole numbers of at least {least}, or one for all axes, are wanted"
            )
    return template


def _geometry(partition: Partition, conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[Geometry, tuple[int, ...] | None]:
    """How the kernel slides, and what `F.pad` has to add before it, last axis first: what is not plain zeros."""
    around = tuple(conv._reversed_padding_repeated_twice)
    before, after = around[-2::-2], around[::-2]
    if conv.padding_mode == "zeros" and before == after:
        return Geometry(partition, conv.stride, before, conv.dilation, conv.groups), None
    return Geometry(partition, conv.stride, (0,) * len(before), conv.dilation, conv.groups), around


class Linear(WarehouseLayer):
    """`torch.nn.Linear` with a kernel of its own for every sample: the first axis of the input is the batch."""

    fixed = frozenset({"in_features", "out_features"})

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        source: Source | None = None,
        config: WarehouseConfig | None = None,
    ) -> None:
        kernel_shape = (out_features, in_features)
        if source is None:
            spec = LayerSpec("linear", "linear", kernel_shape, in_features)
            source = own_source(spec, config or WarehouseConfig(), device, dtype)
        partition = Partition(kernel_shape, tuple(source.warehouse.cells.shape[1:]))
        super().__init__(source, Geometry(partition), bias)
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise KernelWarehouseError(
                f"input of shape {tuple(x.shape)} given to a linear layer of {self.in_features} input features; "
                "[batch, ..., features] is wanted"
            )
        lead = x.shape[:-1]
        batch = lead[0] if lead else 1
        tokens = x.reshape(batch, lead[1:].numel(), self.in_features)
        pooled = image_mean(x, channels_last=True)
        if pooled is None:
            pooled = tokens.mean(1) if tokens.shape[1] else tokens.sum(1)  # the mean of nothing is no number
        out = self._evaluate(tokens, pooled).reshape(*lead, self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self._mixing_repr()}"


class FusedQueryKeyValue(nn.Module):
    """A fused query-key-value layer with static queries and keys and values from a warehouse."""

    def __init__(self, query_key: nn.Linear, value: Linear) -> None:
        super().__init__()
        self.query_key = query_key
        self.value = value

    @property
    def in_features(self) -> int:
        return self.value.in_features

    @property
    def out_features(self) -> int:
        return self.query_key.out_features + self.value.out_features

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.query_key(x), self.value(x)], dim=-1)
