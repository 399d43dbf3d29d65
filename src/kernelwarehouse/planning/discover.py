"""model -> the layers that could be converted, in forward order, and those that could not, with the reason."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kernelwarehouse.errors import PlanError
from kernelwarehouse.planning.spec import LayerSpec, StaticLayer
from kernelwarehouse.planning.static import kind_of, tied_weights, why_not_convertible
from kernelwarehouse.planning.tracing import Trace, trace, trace_by_running
from kernelwarehouse.warehouse import Warehouse

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")


@dataclass(frozen=True)
class Discovery:
    """Layers in forward order (registration order where the model cannot be traced, then `trace` is `None`)."""

    layers: tuple[LayerSpec, ...]
    static: tuple[StaticLayer, ...]
    parameters: int
    trace: Trace | None = field(repr=False)

    @property
    def pooled(self) -> frozenset[str]:
        """Layers known to see globally pooled features."""
        return frozenset() if self.trace is None else self.trace.pooled


def discover(model: nn.Module, example: Any = None) -> Discovery:
    """Look at a model without touching it. `example` is an input to run a copy with where tracing fails."""
    check_model(model)
    modules = dict(model.named_modules())  # a module used in several places appears once, under its first name
    reasons = {name: why_not_convertible(name, module, modules) for name, module in modules.items() if kind_of(module)}
    tied = tied_weights(model)
    for name in reasons:
        reasons[name] = reasons[name] or tied.get(name)
    traced = trace(model, frozenset(reasons))
    if traced is None and example is not None:
        traced = trace_by_running(model, frozenset(reasons), example)
    order = list(reasons)
    if traced is not None:
        for name in order:
            if name not in traced.order:
                reasons[name] = reasons[name] or "its forward is never called; its weights are used directly"
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
    return Discovery(tuple(layers), tuple(static), sum(p.numel() for p in model.parameters()), traced)


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
    if isinstance(module, nn.Linear) and name.split(".")[-1] == "qkv" and shape[0] == 3 * shape[1]:
        reason = "query and key stay static; the value part is a layer of its own"
        static.append(StaticLayer(f"{name}:query_key", "linear", 2 * weight.numel() // 3, reason))
        return [LayerSpec(name, "linear", (shape[1], shape[1]), shape[1], part="value")]
    groups = getattr(module, "groups", 1)
    return [LayerSpec(name, kind or "linear", shape, shape[1] * groups, groups)]


def _static(name: str, module: nn.Module, reason: str) -> StaticLayer:
    parameters = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return StaticLayer(name, type(module).__name__, parameters, reason)


def _other_weights(modules: dict[str, nn.Module], seen: set[str]) -> list[StaticLayer]:
    """Layers with kernels of kinds that have no converted twin, so that the plan can say so."""
    return [
        _static(name, module, "only Conv1d, Conv2d, Conv3d and Linear can be converted")
        for name, module in modules.items()
        if name not in seen and isinstance(module, (nn.modules.conv._ConvTransposeNd, nn.Bilinear))
    ]
