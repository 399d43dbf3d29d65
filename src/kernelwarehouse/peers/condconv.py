"""CondConv (Yang et al., NeurIPS 2019): experts mixed by sigmoid routing weights, one routing a residual block.

    kernel = sum_k r_k W_k,   r = sigmoid(Linear(in, experts)(mean of the block's input))

The classifier has a routing of its own and mixes the experts' biases as well.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble import evaluate
from kernelwarehouse.conversion import replace_modules
from kernelwarehouse.errors import ConvertError
from kernelwarehouse.peers._conv import expert_kernels, geometry_of, pooled, with_bias
from kernelwarehouse.peers._surgery import classifier, replaced, residual_blocks


class CondConv2d(nn.Module):
    """Takes the place of a `Conv2d` inside a `RoutedBlock`, which hands it the routing weights."""

    def __init__(self, conv: nn.Conv2d, experts: int = 8) -> None:
        super().__init__()
        self.geometry = geometry_of(conv)
        self.weight = expert_kernels(conv.weight, experts)
        self.bias = conv.bias
        self.routing: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.routing is None:
            raise ConvertError("CondConv2d was called outside the RoutedBlock that computes its routing weights")
        out = evaluate(x, self.routing[:, None], self.weight, self.geometry)
        return with_bias(out, self.bias)


class RoutedBlock(nn.Module):
    """A residual block whose convolutions share one routing, computed from the block's input."""

    def __init__(self, block: nn.Module, in_channels: int, experts: int = 8) -> None:
        super().__init__()
        self.route = nn.Linear(in_channels, experts).to(next(block.parameters()))
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        routing = self.route(pooled(x)).sigmoid()
        convolutions = [module for module in self.block.modules() if isinstance(module, CondConv2d)]
        try:
            for conv in convolutions:
                conv.routing = routing
            return self.block(x)
        finally:
            for conv in convolutions:
                conv.routing = None  # neither the graph nor the activations may outlive the call


class CondLinear(nn.Module):
    """A classifier of experts; takes the place of a `Linear`."""

    def __init__(self, linear: nn.Linear, experts: int = 8) -> None:
        super().__init__()
        self.geometry = geometry_of(linear)
        self.route = nn.Linear(linear.in_features, experts)
        shape = (linear.in_features, linear.out_features)
        heads = [nn.Linear(*shape) for _ in range(experts)]
        self.weight = nn.Parameter(torch.stack([expert.weight.detach() for expert in heads]))
        self.bias = nn.Parameter(torch.stack([expert.bias.detach() for expert in heads]))
        self.to(linear.weight)  # the new parts go where the old ones are

    def forward(self, x: Tensor) -> Tensor:
        routing = self.route(x).sigmoid()
        out = evaluate(x[:, None], routing[:, None], self.weight, self.geometry)[:, 0]
        return out + routing @ self.bias


def convert(model: nn.Module, experts: int = 8, blocks: int = 3) -> nn.Module:
    """A copy of a ResNet with experts in its last residual blocks (shortcuts stay static) and in the classifier."""
    found = residual_blocks(model)
    if not 1 <= blocks <= len(found):
        raise ConvertError(f"blocks is {blocks}; {type(model).__name__} has {len(found)}: 1 to {len(found)} are wanted")
    chosen = found[-blocks:]
    layers = [name for block in chosen for name in block.convolutions]
    new: dict[str, Callable[[Any], nn.Module]] = dict.fromkeys(layers, partial(CondConv2d, experts=experts))
    new |= dict.fromkeys(classifier(model), partial(CondLinear, experts=experts))
    converted = replaced(model, new)
    routed: dict[str, nn.Module] = {}
    for part in chosen:
        block = converted.get_submodule(part.name)
        routed[part.name] = RoutedBlock(block, part.in_channels, experts).train(block.training)
    return replace_modules(converted, routed)
