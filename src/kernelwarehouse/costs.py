"""How a model's layers are evaluated, why, and what that costs."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from kernelwarehouse._terminal import console
from kernelwarehouse.assemble import winograd
from kernelwarehouse.assemble.registry import BASES, WINOGRAD_BASIS
from kernelwarehouse.errors import KernelWarehouseError
from kernelwarehouse.layers import Linear, WarehouseLayer


@dataclass(frozen=True)
class LayerCost:
    """One layer on one input: its strategy, and the multiply-adds of forward for the whole batch.

    `backward` is the strategy of backward, where training was asked for.
    """

    layer: str
    strategy: str
    reason: str
    mixing: int
    product: int
    backward: str | None = None


def explain(model: nn.Module, example: Tensor, training: bool = False) -> tuple[LayerCost, ...]:
    """Print, and return, how each layer of the model is evaluated on an input like `example`.

    The model runs once, without gradients and in eval mode; its modes and statistics are left as they were. Training
    may take other ways: with `training`, gradients are recorded (still in eval mode, and none is computed), and the
    ways of backward have a column.

    Arguments:
        model: a model with converted layers.
        example: an input, of the size and batch that you are interested in.
        training: show the ways of training. Its activations need memory meanwhile.

    Raises:
        KernelWarehouseError: for a model without converted layers.
    """
    costs = layer_costs(model, example, training)
    console().print(_table(costs, training))
    return costs


def layer_costs(model: nn.Module, example: Tensor, training: bool = False) -> tuple[LayerCost, ...]:
    """What `explain` prints."""
    layers = {layer: name for name, layer in model.named_modules() if isinstance(layer, WarehouseLayer)}
    if not layers:
        raise KernelWarehouseError(f"{type(model).__name__} has no layer with a warehouse; there is nothing to explain")
    found: list[LayerCost] = []

    def record(layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if isinstance(layer, WarehouseLayer):
            found.append(_cost(layers[layer], layer, arguments[0], output))

    with ExitStack() as undo, torch.set_grad_enabled(training), _evaluating(model):
        for layer in layers:
            undo.callback(layer.register_forward_hook(record).remove)
        model(example)
    return tuple(found)


def _cost(name: str, layer: WarehouseLayer, x: Tensor, output: Tensor) -> LayerCost:
    geometry, attention = layer.geometry, layer.attention
    batched = x.dim() > (1 if isinstance(layer, Linear) else geometry.spatial_axes + 1)
    batch = len(x) if batched else 1
    kernel = math.prod(geometry.partition.kernel_shape)
    way, cells, units = layer.route, attention.shape.cells, attention.shape.units
    if way is None:
        raise KernelWarehouseError(
            f"{name} was called through a compiler, which does not tell how; explain the model itself"
        )
    by_unit = {**dict.fromkeys(BASES, batch * units), "hidden": (batch + cells) * units}
    if way.forward in (winograd.STRATEGY.name, WINOGRAD_BASIS):
        product = batch * winograd.multiply_adds(geometry, tuple(output.shape[-2:]))
    else:
        product = output.numel() // geometry.out_channels * kernel
    mixing = by_unit.get(way.forward, batch * cells) * kernel
    return LayerCost(name, way.forward, way.reason, mixing, product, way.backward)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without calling `train`, which undoes what was prepared."""
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _table(costs: tuple[LayerCost, ...], training: bool) -> Table:
    ways = ("strategy", "in backward") if training else ("strategy",)
    title = "how layers are evaluated in training" if training else "how layers are evaluated"
    table = Table("layer", *ways, "why", title=title, title_justify="left")
    table.add_column("mixing (MMAC)", justify="right")
    table.add_column("product (MMAC)", justify="right")
    for cost in costs:
        taken = (cost.strategy, cost.backward or "by autograd") if training else (cost.strategy,)
        table.add_row(cost.layer, *taken, cost.reason, f"{cost.mixing / 1e6:,.1f}", f"{cost.product / 1e6:,.1f}")
    table.add_section()
    mixing, product = sum(cost.mixing for cost in costs), sum(cost.product for cost in costs)
    table.add_row("all", *("" for _ in ways), "", f"{mixing / 1e6:,.1f}", f"{product / 1e6:,.1f}")
    return table
