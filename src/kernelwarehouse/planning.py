"""`kernelwarehouse.plan`: a model and a configuration -> a plan. Nothing is touched."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from kernelwarehouse.config import Override, WarehouseConfig
from kernelwarehouse.discover import Discovery, discover
from kernelwarehouse.errors import PlanError
from kernelwarehouse.grouping import Group, plan_warehouse
from kernelwarehouse.patterns import Patterns, matches, no_match
from kernelwarehouse.plan import Plan
from kernelwarehouse.spec import LayerSpec, StaticLayer
from kernelwarehouse.stages import (
    find_stages,
    is_stem,
    share_by_stage,
    share_same_shape,
    share_within_layers,
)


def plan(model: nn.Module, config: WarehouseConfig | None = None, *, example: Any = None) -> Plan:
    """Plan the conversion of a model: which layers share which warehouse, cells, counts, and what stays static.

    Layers are taken in the order of the forward pass, found by symbolic tracing. For a model that cannot be traced,
    give an `example` input (a tensor, or a tuple of arguments): a copy of the model is run on it to see the order.
    Without one, the order of registration has to do.
    """
    config = WarehouseConfig() if config is None else config
    if not isinstance(config, WarehouseConfig):
        raise PlanError(f"config is {config!r}; a kernelwarehouse.WarehouseConfig is wanted")
    discovery = discover(model, example)
    if not discovery.layers:
        why = "; ".join(f"{layer.name!r}: {layer.reason}" for layer in discovery.static[:3])
        raise PlanError(f"{type(model).__name__} has no layer that can be converted" + (f" ({why})" if why else ""))
    static = _chosen_static(discovery, config)
    kept = [layer for layer in discovery.layers if layer.label not in static]
    if not kept:
        raise PlanError(f"all {len(static)} layers that could be converted are excluded; nothing is left to plan")
    groups = _groups(model, discovery, kept, config, static)
    overrides = _check_overrides(config.overrides, [layer.label for layer in kept], groups)
    warehouses = tuple(plan_warehouse(group, config, overrides) for group in groups)
    left = [
        StaticLayer(layer.label, layer.kind, layer.parameters, static[layer.label])
        for layer in discovery.layers
        if layer.label in static
    ]
    return Plan(warehouses, tuple(left) + discovery.static, discovery.parameters, config)


def _chosen_static(discovery: Discovery, config: WarehouseConfig) -> dict[str, str]:
    """Layers that could be converted but are left static, label -> reason."""
    labels = [layer.label for layer in discovery.layers]
    every_name = labels + [layer.name for layer in discovery.static]
    excluded = Patterns(config.exclude, every_name).matches
    static = {label: "excluded" for label in labels if label in excluded}
    if config.groups:
        grouped = Patterns([pattern for group in config.groups.values() for pattern in group], labels).matches
        return {label: "in no group" for label in labels if label not in grouped} | static
    first, last = discovery.layers[0], discovery.layers[-1]
    automatic = {}
    if config.static_stem and is_stem(first):
        automatic[first.label] = "the stem (static_stem)"
    if config.static_classifier and last.kind == "linear":
        automatic[last.label] = "the classifier (static_classifier)"
    for layer in discovery.layers:
        if layer.kind != "linear" and discovery.trace is not None and layer.name in discovery.trace.pooled:
            automatic[layer.label] = "sees globally pooled features only"
    # A network of nothing else has no stem or classifier worth the name.
    if set(automatic) | set(static) >= set(labels):
        return static
    return automatic | static


def _groups(
    model: nn.Module,
    discovery: Discovery,
    kept: Sequence[LayerSpec],
    config: WarehouseConfig,
    static: dict[str, str],
) -> list[Group]:
    if config.groups:
        return _explicit_groups(kept, config, [layer.label for layer in discovery.layers], static)
    labels = {layer.label for layer in kept}
    stages = find_stages(model, discovery)
    match config.sharing:
        case "stage":
            groups = share_by_stage(stages, labels, config.max_layers)
        case "same_shape":
            groups = share_same_shape(stages, labels, config.max_layers)
        case "layer" | "none":
            groups = share_within_layers(stages, labels, config.max_layers, config.sharing == "layer")
    place = {layer.label: index for index, layer in enumerate(kept)}
    ordered = [_in_order(group, place) for group in groups]
    return sorted(ordered, key=lambda group: place[group.layers[0].label])


def _in_order(group: Group, place: dict[str, int]) -> Group:
    layers = tuple(sorted(group.layers, key=lambda layer: place[layer.label]))
    return dataclasses.replace(group, layers=layers)


def _explicit_groups(
    kept: Sequence[LayerSpec], config: WarehouseConfig, labels: list[str], static: dict[str, str]
) -> list[Group]:
    owners: dict[str, str] = {}
    groups = []
    for name, patterns in config.groups.items():
        chosen = Patterns(patterns, labels).matches - set(static)
        for label in sorted(chosen):
            if label in owners:
                raise PlanError(f"layer {label!r} is in groups {owners[label]!r} and {name!r}")
            owners[label] = name
        layers = tuple(layer for layer in kept if layer.label in chosen)
        if not layers:
            raise PlanError(f"group {name!r} is left without layers: all it matches are excluded")
        groups.append(Group(name, layers, layers))
    # In the order of first use, as the paper lists them.
    place = {layer.label: index for index, layer in enumerate(kept)}
    return sorted(groups, key=lambda group: place[group.layers[0].label])


def _check_overrides(overrides: Sequence[Override], labels: list[str], groups: list[Group]) -> Sequence[Override]:
    names = labels + [group.name for group in groups]
    for override in overrides:
        if not any(matches(override.pattern, name) for name in names):
            raise PlanError(no_match(override.pattern, names))
    return overrides
