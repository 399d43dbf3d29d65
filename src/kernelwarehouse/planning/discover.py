"""model -> the layers that could be converted, in forward order, and those that could not, with the reason."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kernelwarehouse.errors import PlanError
from kernelwarehouse.planning.spec import LayerSpec, Order, StaticLayer
from kernelwarehouse.planning.static import (
    NEVER_CALLED,
    NO_TWIN,
    QUERY_AND_KEY,
    READ,
    is_fused,
    kind_of,
    tied_parameters,
    why_not_convertible,
)
from kernelwarehouse.planning.tracing import Trace, UntraceableError, trace, trace_by_running
from kernelwarehouse.warehouse import Warehouse

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")


@dataclass(frozen=True)
class Discovery:
    """Layers in forward order (registration order where the model cannot be traced, then `trace` is `None` and
    `untraced` says why). `frozen` are the labels of those whose kernel is not trained."""

    layers: tuple[LayerSpec, ...]
    static: tuple[StaticLayer, ...]
    parameters: int
    frozen: frozenset[str] = frozenset()
    trace: Trace | None = field(default=None, repr=False)
    untraced: str = ""

    @property
    def order(self) -> Order:
        """Where the order of the layers comes from."""
        return "registration" if self.trace is None else "run" if self.trace.feeds is None else "traced"

    @property
    def pooled(self) -> frozenset[str]:
        """Layers known to see globally pooled features."""
        return frozenset() if self.trace is None else self.trace.pooled


def discover(model: nn.Module, example: Any = None) -> Discovery:
    """Look at a model without touching it. `example` is an input to run a copy with where tracing fails."""
    check_model(model)
    modules = dict(model.named_modules())  # a module used in several places appears once, under its first name
    reasons = {name: why_not_convertible(name, module, modules) for name, module in modules.items() if kind_of(module)}
    tied = tied_parameters(model)
    for name in reasons:
        reasons[name] = reasons[name] or tied.get(name)
    traced, untraced = _follow(model, frozenset(reasons), example)
    order = list(reasons)
    if traced is not None:
        for name in order:
            if name not in traced.order:
                reasons[name] = reasons[name] or NEVER_CALLED
            elif _read(name, modules[name], traced.reads):
                reasons[name] = reasons[name] or READ
        order = [*traced.order, *(name for name in order if name not in traced.order)]
    layers: list[LayerSpec] = []
    static: list[StaticLayer] = []
    for name in order:
        reason = reasons[name]
        if reason is None:
            layers += _specs(name, modules[name], static)
        else:
            static.append(_static(name, modules[name], reason))
    static += _other_weights(modules, set(order))
    frozen = frozenset(layer.label for layer in layers if not modules[layer.name].get_parameter("weight").requires_grad)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Discovery(tuple(layers), tuple(static), parameters, frozen, traced, untraced)


def _follow(model: nn.Module, layers: frozenset[str], example: Any) -> tuple[Trace | None, str]:
    """The model's forward, symbolically or with the example; or nothing, and why."""
    try:
        return trace(model, layers), ""
    except UntraceableError as error:
        return (None, str(error)) if example is None else (trace_by_running(model, layers, example), "")


def _read(name: str, module: nn.Module, reads: Iterable[tuple[str, str]]) -> bool:
    """Whether the model reads what the converted layer will not have: the weight, and of a fused layer the bias too."""
    return (name, "weight") in reads or (is_fused(name, module) and (name, "bias") in reads)


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be planned or converted at all."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"model is {type(model).__name__}; a torch.nn.Module is wanted")
    wrapper = next((base.__name__ for base in type(model).__mro__ if base.__name__ in _WRAPPERS), None)
    if wrapper is not None:
        inner = "_orig_mod" if wrapper == "OptimizedModule" else "module"
        raise PlanError(
            f"the model is wrapped in {wrapper}; convert the model inside (model.{inner}) first, wrap after"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise PlanError(
            "the model is a TorchScript module, which cannot be changed; convert the model it was made from"
        )
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, Warehouse):
            layer = name.rpartition(".")[0]
            raise PlanError(f"layer {layer!r} draws on a warehouse already; plan and convert the unconverted model")
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise PlanError(f"layer {name!r} is a lazy {kind.__name__} without a shape yet; run the model once first")
        if {"quantized", "qat"} & set(kind.__module__.split(".")):
            raise PlanError(f"layer {name!r} is a quantised {kind.__name__}; convert the float model, quantise after")


def _specs(name: str, module: nn.Module, static: list[StaticLayer]) -> list[LayerSpec]:
    weight = module.get_parameter("weight")
    shape, kind = tuple(weight.shape), kind_of(module)
    if is_fused(name, module):
        static.append(StaticLayer(f"{name}:query_key", "linear", 2 * weight.numel() // 3, QUERY_AND_KEY))
        return [LayerSpec(name, "linear", (shape[1], shape[1]), shape[1], part="value")]
    groups = getattr(module, "groups", 1)
    return [LayerSpec(name, kind or "linear", shape, shape[1] * groups, groups)]


def _static(name: str, module: nn.Module, reason: str) -> StaticLayer:
    parameters = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return StaticLayer(name, type(module).__name__, parameters, reason)


def _other_weights(modules: dict[str, nn.Module], seen: set[str]) -> list[StaticLayer]:
    """Layers with kernels of kinds that have no converted twin, so that the plan can say so."""
    return [
        _static(name, module, NO_TWIN)
        for name, module in modules.items()
        if name not in seen and isinstance(module, (nn.modules.conv._ConvTransposeNd, nn.Bilinear))
    ]
