"""Evaluation that keeps no assembled kernel: backward assembles them again, in blocks."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.errors import StrategyError


class Strategy(Protocol):
    """A way to evaluate a layer: a module with these two functions."""

    def forward(self, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
        """The output of a layer without its bias."""

    def backward(
        self, grad: Tensor, x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry, wants_input: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Gradients of input (where wanted), attentions and cells."""


def refuse_second_derivative() -> None:
    """Raise in a backward that is being recorded."""
    if torch.is_grad_enabled():
        raise StrategyError(
            "backward with create_graph=True reached a layer evaluated by a strategy that cannot be differentiated "
            'twice; run the forward pass inside `with kernelwarehouse.force("plain"):`'
        )


class Recomputed(Function):
    """A strategy as one differentiable step that saves its three inputs and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, strategy: Strategy, geometry: Geometry, x: Tensor, attention: Tensor, cells: Tensor
    ) -> Tensor:
        ctx.strategy, ctx.geometry = strategy, geometry
        ctx.save_for_backward(x, attention, cells)
        return strategy.forward(x, attention, cells, geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None, Tensor, Tensor]:
        refuse_second_derivative()
        x, attention, cells = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grads = ctx.strategy.backward(grad, x, attention, cells, ctx.geometry, ctx.needs_input_grad[2])
        return None, None, *grads
