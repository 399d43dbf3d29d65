"""What a way to evaluate a layer is, and how one becomes a differentiable step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.shared_gradient import place_of

Mixing = Literal["weights", "factors", "basis"]


def _no_obstacle(x: Tensor, geometry: Geometry) -> None:
    return None


@dataclass(frozen=True)
class Strategy:
    """A way to evaluate a layer.

    `forward(x, *mixing, cells, geometry)` gives the output of a layer without its bias, `backward(grad, x, *mixing,
    cells, geometry, wants_input)` the gradients of the input (where wanted), of the mixing and of the cells. All are
    computed from the inputs of `forward`; nothing else is kept. Mixing is either the attentions (`"weights"`, one
    tensor `[batch, m, n]`) or, for `"factors"`, the two that they are products of, or, for `"basis"`, the units of the
    hidden vector and the scale of every mixture. `obstacle` says why a layer cannot be evaluated in this way on an
    input, or nothing. Where it `adds`, `backward` takes one argument more: the gradient of the cells that others have
    made, to which it adds its own.
    """

    name: str
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor | None, ...]] | None  # None: there is none, or autograd sees every step
    obstacle: Callable[[Tensor, Geometry], str | None] = field(default=_no_obstacle)
    mixing: Mixing = "weights"
    adds: bool = False


def refuse_second_derivative() -> None:
    """Raise in a backward that is being recorded."""
    if torch.is_grad_enabled():
        raise StrategyError(
            "backward with create_graph=True reached a layer evaluated by a strategy that cannot be differentiated "
            'twice; run the forward pass inside `with kernelwarehouse.force("plain"):`'
        )


class Recomputed(Function):
    """Forward by one strategy and backward by another, as one step that saves its inputs and nothing else.

    What is in `values`, if anything is, stands in for the cells, which are the last of the tensors and get the
    gradient: their values in the type that is computed in, or the parameter that they are shared from.
    """

    @staticmethod
    def forward(
        ctx: Any,
        forward: Strategy,
        backward: Strategy,
        geometry: Geometry,
        values: tuple[Tensor, ...],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.strategy, ctx.geometry = backward, geometry
        ctx.cells = tensors[-1]  # which would be gone before the next layer asks for them, where others are saved
        used = (*tensors[:-1], *values) if values else tensors
        ctx.save_for_backward(*used)
        return forward.forward(*used, geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        shared = place_of(ctx.cells)
        if shared is not None and not shared.claimed(ctx.cells.grad_fn):
            shared = None
        saved = ctx.saved_tensors  # asked for once: what is checkpointed is computed again when it is
        total = shared.total_for(saved[-1]) if shared is not None and ctx.strategy.adds else None
        with torch.autocast(grad.device.type, enabled=False):
            grads = ctx.strategy.backward(
                grad, *saved, ctx.geometry, ctx.needs_input_grad[4], *([] if total is None else [total])
            )
        *others, cells = grads
        # The cells' would be copied into their order at the end of backward; before that, it would be added to a copy.
        cells = _owner(cells if cells is None else cells.contiguous())
        if shared is not None and cells is not None:
            if total is None:
                shared.add(cells)
            cells = None
        return None, None, None, None, *map(_owner, others), cells


def _owner(grad: Tensor | None) -> Tensor | None:
    """The same numbers without a memory of what they are a view of: autograd adds further gradients in their place,
    and does not make a third tensor as large as all cells, where nobody else knows of the memory."""
    if grad is None or grad._base is None or not grad.is_contiguous():
        return grad
    return torch.ops.aten._unsafe_view(grad, grad.shape)
