"""A group of layers and its settings -> the warehouse they share: cell shape, budget, attentions."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kernelwarehouse.attention import hidden_width
from kernelwarehouse.config import Override, WarehouseConfig, exact
from kernelwarehouse.errors import PlanError
from kernelwarehouse.planning.patterns import matches
from kernelwarehouse.planning.plan import PlannedLayer, PlannedWarehouse
from kernelwarehouse.planning.spec import Group, LayerSpec


def divisors(layers: Sequence[LayerSpec]) -> tuple[int, int]:
    """Greatest common divisors of the layers' output and input widths."""
    return math.gcd(*(layer.kernel_shape[0] for layer in layers)), math.gcd(
        *(layer.kernel_shape[1] for layer in layers)
    )


def plan_warehouse(group: Group, config: WarehouseConfig, overrides: Sequence[Override] = ()) -> PlannedWarehouse:
    """The warehouse of one group: its settings after overrides, its cells, its layers' attentions."""
    settings = {layer.label: _settings(layer, group, config, overrides) for layer in group.layers}
    shared = settings[group.layers[0].label]
    for name in ("budget", "in_ratio", "out_ratio", "spatial_partition", "start", "begin"):
        for layer in group.layers:
            if settings[layer.label][name] != shared[name]:
                raise PlanError(
                    f"layers {group.layers[0].label!r} and {layer.label!r} share warehouse {group.name!r} but have "
                    f"{name} {shared[name]!r} and {settings[layer.label][name]!r}; give them one value or own groups"
                )
    layers = tuple(
        PlannedLayer(
            layer,
            hidden_width(layer.in_channels, settings[layer.label]["reduction"]),
            settings[layer.label]["norm"],
            settings[layer.label]["attention"],
            settings[layer.label]["low_rank"],
        )
        for layer in group.layers
    )
    cell = _cell_shape(group, shared)
    own_cells_only = config.sharing == "none"
    return PlannedWarehouse(
        group.name, layers, cell, shared["budget"], shared["start"], own_cells_only, shared["begin"]
    )


def _settings(layer: LayerSpec, group: Group, config: WarehouseConfig, overrides: Sequence[Override]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(Override) if field.name != "pattern"]
    settings = {name: getattr(config, name) for name in names}
    for override in overrides:
        if matches(override.pattern, layer.label) or matches(override.pattern, group.name):
            settings |= override.changes()
    return settings


def _cell_shape(group: Group, settings: dict[str, Any]) -> tuple[int, ...]:
    kinds = {layer.kind: layer for layer in group.shape_from}
    if len(kinds) > 1:
        some = " and ".join(f"{layer.label!r} ({kind})" for kind, layer in list(kinds.items())[:2])
        raise PlanError(f"layers {some} cannot share warehouse {group.name!r}: their kernels have different axes")
    out, into = divisors(group.shape_from)
    widths = [
        _cell_width(out, settings["out_ratio"], settings["budget"]),
        _cell_width(into, settings["in_ratio"], settings["budget"]),
    ]
    first = group.shape_from[0]
    if settings["spatial_partition"]:
        return (*widths, *(1 for _ in first.kernel_size))
    for layer in group.shape_from:
        if layer.kernel_size != first.kernel_size:
            raise PlanError(
                f"layers {first.label!r} ({first}) and {layer.label!r} ({layer}) cannot share warehouse {group.name!r} "
                "without spatial partition: their kernels differ in size"
            )
    return (*widths, *first.kernel_size)


def _cell_width(divisor: int, ratio: float | None, budget: float) -> int:
    if ratio is None:
        return divisor // 2 if budget < 1 and divisor % 2 == 0 else divisor
    return max(int(exact(ratio) * divisor), 1)
