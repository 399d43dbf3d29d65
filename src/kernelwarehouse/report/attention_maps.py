"""How each layer of a network mixes its cells: mean attentions over some images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kernelwarehouse.layers import WarehouseLayer


@dataclass(frozen=True)
class AttentionMap:
    """Mean attention of one layer, `[mixtures, cells]`, and how far a value typically strays from it over images."""

    layer: str
    warehouse: str
    mean: NDArray[np.float64]
    spread: float


@torch.no_grad()
def attention_maps(network: nn.Module, images: Tensor) -> list[AttentionMap]:
    """One map per layer with a warehouse, in the order of the network; none for a static network."""
    attentions: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def hook(attention: nn.Module, inputs: tuple[Any, ...], weights: Tensor) -> None:
            attentions[name] = weights

        return hook

    layers = {name: module for name, module in network.named_modules() if isinstance(module, WarehouseLayer)}
    hooks = [layer.attention.register_forward_hook(keep(name)) for name, layer in layers.items()]
    was_training = network.training
    try:
        network.eval()(images)
    finally:
        network.train(was_training)
        for hook in hooks:
            hook.remove()
    return [
        AttentionMap(
            name,
            layers[name].warehouse.name,
            weights.mean(0).double().cpu().numpy(),
            float(weights.double().std(0, correction=0).mean()),
        )
        for name, weights in attentions.items()
    ]
