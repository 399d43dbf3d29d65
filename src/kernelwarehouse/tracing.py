"""The order in which a model calls its layers, and which layers feed which, by symbolic tracing."""

import copy
from dataclasses import dataclass

import torch
from torch import fx, nn


@dataclass(frozen=True)
class Trace:
    """`order`: layer names as they are called. `feeds[name]`: the layers whose outputs reach `name` directly."""

    order: tuple[str, ...]
    feeds: dict[str, frozenset[str]]


class _Tracer(fx.Tracer):
    def __init__(self, layers: frozenset[str]) -> None:
        super().__init__()
        self.layers = layers

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.layers or super().is_leaf_module(module, module_qualified_name)


def trace(model: nn.Module, layers: frozenset[str]) -> Trace | None:
    """Follow the model's forward symbolically, on a copy without memory; `None` where that is not possible."""
    if "" in layers:  # the model is a single layer
        return Trace(("",), {"": frozenset()})
    try:
        with torch.no_grad():
            graph = _Tracer(layers).trace(skeleton(model))
    except Exception:  # a forward can fail in any way under symbolic inputs; the caller falls back
        return None
    # A layer used in several places is called under any of its names; the first one is its name.
    first_names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first_names.setdefault(id(module), name)
    aliases = {name: first_names[id(m)] for name, m in model.named_modules(remove_duplicate=False)}
    order: dict[str, None] = {}
    feeds: dict[str, set[str]] = {}
    reaching: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        sources = frozenset[str]().union(*(reaching[previous] for previous in node.all_input_nodes))
        name = aliases.get(str(node.target)) if node.op == "call_module" else None
        if name in layers and name is not None:
            order.setdefault(name)
            feeds.setdefault(name, set()).update(sources)
            sources = frozenset({name})
        reaching[node] = sources
    return Trace(tuple(order), {name: frozenset(sources) for name, sources in feeds.items()})


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model whose tensors take no memory."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
