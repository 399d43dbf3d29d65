"""The order in which a model calls its layers, and which layers feed which, by symbolic tracing."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from kernelwarehouse.errors import PlanError


@dataclass(frozen=True)
class Trace:
    """`order`: layer names as they are called. `feeds[name]`: the layers whose outputs reach `name` directly.
    `pooled`: layers that see globally pooled features. These two are known only from symbolic tracing. `reads`: layers
    and the names of their parameters that the model reads, other than by calling the layer."""

    order: tuple[str, ...]
    feeds: dict[str, frozenset[str]] | None = None
    pooled: frozenset[str] = frozenset()
    reads: frozenset[tuple[str, str]] = frozenset()


class UntraceableError(Exception):
    """A model whose forward cannot be followed symbolically, and why."""


class _Tracer(fx.Tracer):
    def __init__(self, layers: frozenset[str]) -> None:
        super().__init__()
        self.layers = layers

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.layers or super().is_leaf_module(module, module_qualified_name)


def trace(model: nn.Module, layers: frozenset[str]) -> Trace:
    """Follow the model's forward symbolically, on a copy without memory."""
    if "" in layers:  # the model is a single layer
        return Trace(("",), {"": frozenset()})
    try:
        with torch.no_grad():
            graph = _Tracer(layers).trace(skeleton(model))
    except Exception as error:  # a forward can fail in any way under symbolic inputs
        lines = str(error).strip().splitlines() or [""]
        raise UntraceableError(f"{type(error).__name__}: {lines[0]}") from error
    # A layer used in several places is called under any of its names; the first one is its name.
    first_names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first_names.setdefault(id(module), name)
    modules = dict(model.named_modules(remove_duplicate=False))
    feeds: dict[str, set[str]] = {}
    pooled_layers: dict[str, bool] = {}
    reaching: dict[fx.Node, frozenset[str]] = {}
    pooled: dict[fx.Node, bool] = {}
    reads: set[tuple[str, str]] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            owner, _, parameter = str(node.target).rpartition(".")
            if owner in modules and first_names[id(modules[owner])] in layers:
                reads.add((first_names[id(modules[owner])], parameter))
        inputs = node.all_input_nodes
        sources = frozenset[str]().union(*(reaching[previous] for previous in inputs))
        pooled[node] = _pools(node, modules) or (bool(inputs) and all(pooled[previous] for previous in inputs))
        name = first_names[id(modules[str(node.target)])] if node.op == "call_module" else None
        if name is not None and name in layers:
            feeds.setdefault(name, set()).update(sources)
            pooled_layers[name] = pooled_layers.get(name, True) and pooled[node]
            sources = frozenset({name})
        reaching[node] = sources
    pooled_names = frozenset(name for name, value in pooled_layers.items() if value)
    direct = {name: frozenset(sources) for name, sources in feeds.items()}
    return Trace(tuple(feeds), direct, pooled_names, frozenset(reads))


def _pools(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node averages over all positions: what squeeze-and-excitation and classifiers begin with."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        kinds = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
        return isinstance(module, kinds) and set(_as_tuple(module.output_size)) == {1}
    if node.op == "call_method":
        return node.target == "mean"
    name = getattr(node.target, "__name__", "")
    pools_to_one = name.startswith("adaptive_avg_pool") and len(node.args) > 1 and set(_as_tuple(node.args[1])) == {1}
    return name == "mean" or pools_to_one


def _as_tuple(size: object) -> tuple[object, ...]:
    return tuple(size) if isinstance(size, (tuple, list)) else (size,)


def trace_by_running(model: nn.Module, layers: frozenset[str], example: Any) -> Trace:
    """The order in which a copy of the model calls its layers for a real input (a tensor, or a tuple of arguments)."""
    twin = copy.deepcopy(model).eval()
    order: dict[str, None] = {}
    reads: set[tuple[str, str]] = set()
    for name, module in twin.named_modules():
        if name in layers:
            module.register_forward_pre_hook(lambda module, inputs, name=name: order.setdefault(name))
            _record_reads(module, name, reads)
    try:
        with torch.no_grad():
            twin(*(example if isinstance(example, tuple) else (example,)))
    except Exception as error:
        raise PlanError(f"{type(model).__name__} does not run on the example: {error}") from error
    return Trace(tuple(order), reads=frozenset(reads))


def _record_reads(layer: nn.Module, name: str, reads: set[tuple[str, str]]) -> None:
    """Have a layer note who looks at its parameters while it is not itself at work."""
    at_work: list[bool] = []

    class Watched(type(layer)):  # type: ignore[misc]
        def __getattr__(self, attribute: str) -> Any:
            if not at_work and attribute in self._parameters:
                reads.add((name, attribute))
            return super().__getattr__(attribute)

    # Last before the forward and first after it: what other hooks read is the model's reading.
    layer.register_forward_pre_hook(lambda module, inputs: at_work.append(True))
    layer.register_forward_hook(lambda module, inputs, output: at_work.clear(), prepend=True)
    layer.__class__ = Watched


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model whose tensors take no memory."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
