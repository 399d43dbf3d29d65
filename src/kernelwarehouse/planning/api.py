"""`kernelwarehouse.plan`: a model and a configuration -> a plan. Nothing is touched."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from kernelwarehouse.config import Override, WarehouseConfig
from kernelwarehouse.errors import KernelWarehouseWarning, PlanError
from kernelwarehouse.planning.cells import plan_warehouse
from kernelwarehouse.planning.discover import Discovery, discover
from kernelwarehouse.planning.patterns import Patterns, matches, no_match
from kernelwarehouse.planning.plan import Plan
from kernelwarehouse.planning.sharing import frozen_apart, share_by_stage, share_same_shape, share_within_layers
from kernelwarehouse.planning.spec import Group, LayerSpec, StaticLayer
from kernelwarehouse.planning.stages import find_stages
from kernelwarehouse.planning.static import left_static


def plan(model: nn.Module, config: WarehouseConfig | None = None, *, example: Any = None) -> Plan:
    """Plan the conversion of a model: which layers share which warehouse, cells, counts, and what stays static.

    The model is not changed. Layers are taken in the order of the forward pass, found by symbolic tracing. For a model
    that cannot be traced, give an `example`: a copy of the model is run on it to see the order. Without one, the order
    of registration has to do; a `KernelWarehouseWarning` says so. `Plan.order` has the source.

    Layers whose weight is frozen (`requires_grad` is `False`) never share a warehouse with trained ones: those of a
    stage share one of their own, named like `stage2.frozen`. Where all layers are frozen, they share as usual.

    Arguments:
        model: any module made of `Conv1d`, `Conv2d`, `Conv3d` and `Linear`; on the meta device it costs no memory.
        config: what is asked for; the defaults of `WarehouseConfig` where it is left out.
        example: an input, a tensor or a tuple of arguments.

    Raises:
        PlanError: for a model that is wrapped, converted already or has nothing to convert, patterns that match
            nothing, and settings that do not fit the model.

    Example:
        >>> import timm, kernelwarehouse as kw
        >>> kw.plan(timm.create_model("resnet18"), kw.WarehouseConfig(budget="1/2"))
        Plan(4 warehouses, 19 layers, 11,689,512 -> 7,431,044 parameters)
    """
    config = WarehouseConfig() if config is None else config
    if not isinstance(config, WarehouseConfig):
        raise PlanError(f"config is {config!r}; a kernelwarehouse.WarehouseConfig is wanted")
    discovery = discover(model, example)
    if discovery.order == "registration":
        warnings.warn(
            f"{type(model).__name__} cannot be traced ({discovery.untraced}), so its layers are taken in the order of "
            "registration, and weights that it reads directly are not seen; give kernelwarehouse.plan an example input",
            KernelWarehouseWarning,
            stacklevel=2,
        )
    if not discovery.layers:
        why = "; ".join(f"{layer.name!r}: {layer.reason}" for layer in discovery.static[:3])
        raise PlanError(f"{type(model).__name__} has no layer that can be converted" + (f" ({why})" if why else ""))
    static = left_static(discovery.layers, [layer.name for layer in discovery.static], discovery.pooled, config)
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
    return Plan(warehouses, tuple(left) + discovery.static, discovery.parameters, config, discovery.order)


def _groups(
    model: nn.Module,
    discovery: Discovery,
    kept: Sequence[LayerSpec],
    config: WarehouseConfig,
    static: dict[str, str],
) -> list[Group]:
    if config.groups:
        groups = _explicit_groups(kept, config, [layer.label for layer in discovery.layers], static)
        for group in groups:
            _check_alike(group, discovery.frozen)
        return groups
    labels = {layer.label for layer in kept}
    stages = find_stages(model, discovery)
    if not labels <= discovery.frozen:
        stages = frozen_apart(stages, discovery.frozen)
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


def _check_alike(group: Group, frozen: frozenset[str]) -> None:
    """A shared warehouse moves the kernels of all its layers, or of none."""
    held = next((layer.label for layer in group.layers if layer.label in frozen), None)
    trained = next((layer.label for layer in group.layers if layer.label not in frozen), None)
    if held is not None and trained is not None:
        raise PlanError(
            f"group {group.name!r} has {held!r}, which is frozen (requires_grad is False), and {trained!r}, which is "
            "trained; what they share would move both: give them groups of their own"
        )


def _check_overrides(overrides: Sequence[Override], labels: list[str], groups: list[Group]) -> Sequence[Override]:
    names = labels + [group.name for group in groups]
    for override in overrides:
        if not any(matches(override.pattern, name) for name in names):
            raise PlanError(no_match(override.pattern, names))
    return overrides
