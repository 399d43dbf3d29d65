"""`kernelwarehouse.plan`: a model and a configuration -> a plan. Nothing is touched."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from kernelwarehouse.config import Override, WarehouseConfig
from kernelwarehouse.errors import KernelWarehouseWarning, PlanError
from kernelwarehouse.planning.cells import plan_warehouse
from kernelwarehouse.planning.discover import discover
from kernelwarehouse.planning.patterns import matches, no_match
from kernelwarehouse.planning.plan import Plan
from kernelwarehouse.planning.sharing import share
from kernelwarehouse.planning.spec import Group, StaticLayer
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
    groups = share(model, discovery, kept, config)
    overrides = _check_overrides(config.overrides, [layer.label for layer in kept], groups)
    warehouses = tuple(plan_warehouse(group, config, overrides) for group in groups)
    left = [
        StaticLayer(layer.label, layer.kind, layer.parameters, static[layer.label])
        for layer in discovery.layers
        if layer.label in static
    ]
    return Plan(warehouses, tuple(left) + discovery.static, discovery.parameters, config, discovery.order)


def _check_overrides(overrides: Sequence[Override], labels: list[str], groups: list[Group]) -> Sequence[Override]:
    names = labels + [group.name for group in groups]
    for override in overrides:
        if not any(matches(override.pattern, name) for name in names):
            raise PlanError(no_match(override.pattern, names))
    return overrides
