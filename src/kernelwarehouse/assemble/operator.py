"""A layer as an operator of its own, which is what `torch.compile` sees of it.

A compiler that sees the plain definition keeps the kernels of all samples for backward. Of an operator it knows the
shapes, and that backward needs its three inputs; how both are computed is chosen when they run, as without a compiler.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernelwarehouse.assemble.geometry import Geometry, sliding_size
from kernelwarehouse.assemble.layout import channels_last, laid_out, new_images
from kernelwarehouse.assemble.registry import STRATEGIES
from kernelwarehouse.assemble.routing import route
from kernelwarehouse.assemble.strategy import refuse_second_derivative
from kernelwarehouse.errors import StrategyError
from kernelwarehouse.partition import Partition


def wanted() -> bool:
    """Whether the caller is being compiled, to be run in this process and as it is."""
    return torch.compiler.is_compiling() and not _definition_wanted()


# Asked while tracing, of torch itself: Dynamo has an answer of its own to the first question that was always yes once.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _definition_wanted() -> bool:
    """Whether somebody needs the steps: an exported program runs where this library is not, and function transforms
    (vmap, grad) know what to do with each step."""
    return torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active()


def evaluate_as_operator(x: Tensor, attention: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The output of a layer without its bias."""
    partition = geometry.partition
    return _forward(
        x,
        attention,
        cells,
        list(partition.kernel_shape),
        list(partition.cell_shape),
        list(geometry.stride),
        list(geometry.padding),
        list(geometry.dilation),
        geometry.groups,
    )


@lru_cache(maxsize=1024)
def _geometry(
    kernel: tuple[int, ...],
    cell: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Geometry:
    return Geometry(Partition(kernel, cell), stride, padding, dilation, groups)


def _from_lists(
    kernel: list[int], cell: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Geometry:
    return _geometry(tuple(kernel), tuple(cell), tuple(stride), tuple(padding), tuple(dilation), groups)


def _channels_last(x: Tensor, geometry: Geometry) -> bool:
    """The layout that is promised for results; strategies differ in theirs."""
    return geometry.spatial_axes > 0 and channels_last(x)


@torch.library.custom_op("kernelwarehouse::evaluate", mutates_args=())
def _forward(
    x: Tensor,
    attention: Tensor,
    cells: Tensor,
    kernel: list[int],
    cell: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    geometry = _from_lists(kernel, cell, stride, padding, dilation, groups)
    with torch.autocast(x.device.type, enabled=False):
        # Whether it will be differentiated is not known here.
        way = route(x, cells, geometry, training=False)
        out = STRATEGIES[way.forward].forward(x, attention, cells, geometry)
    return laid_out(out, _channels_last(x, geometry))


@_forward.register_fake
def _(x: Tensor, attention: Tensor, cells: Tensor, *numbers: Any) -> Tensor:
    geometry = _from_lists(*numbers)
    if geometry.spatial_axes == 0:
        return x.new_empty(x.shape[0], x.shape[1], geometry.out_channels)
    space = sliding_size(geometry, tuple(x.shape[2:]))
    return new_images(x, geometry.out_channels, space, _channels_last(x, geometry))


@torch.library.custom_op("kernelwarehouse::evaluate_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    attention: Tensor,
    cells: Tensor,
    kernel: list[int],
    cell: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    wants_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    geometry = _from_lists(kernel, cell, stride, padding, dilation, groups)
    with torch.autocast(x.device.type, enabled=False):
        # What is given here requires no gradient, whatever was asked for.
        way = route(x, cells, geometry, training=True, wants_input=wants_input)
        strategy = STRATEGIES[way.backward or "grouped"]
        backward = strategy.backward or STRATEGIES["grouped"].backward  # of the definition, as a convolution
        if backward is None:
            raise StrategyError(f"strategy {strategy.name!r} has no backward, and none stands in for it")
        grad_x, grad_attention, grad_cells = backward(grad, x, attention, cells, geometry, wants_input)
    # An operator gives tensors, never None; nobody reads the empty one.
    grad_x = x.new_empty(0) if grad_x is None else laid_out(grad_x, _channels_last(x, geometry))
    return grad_x, grad_attention.contiguous(), grad_cells.contiguous()  # type: ignore[union-attr]


@_backward.register_fake
def _(grad: Tensor, x: Tensor, attention: Tensor, cells: Tensor, *numbers: Any) -> tuple[Tensor, Tensor, Tensor]:
    *lists, wants_input = numbers
    last = _channels_last(x, _from_lists(*lists))
    grad_x = new_images(x, x.shape[1], tuple(x.shape[2:]), last) if wants_input else x.new_empty(0)
    return grad_x, attention.new_empty(attention.shape), cells.new_empty(cells.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, attention, cells, *ctx.numbers = inputs
    ctx.save_for_backward(x, attention, cells)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative()
    wants_input = ctx.needs_input_grad[0]
    grad_x, grad_attention, grad_cells = _backward(grad, *ctx.saved_tensors, *ctx.numbers, wants_input)
    return grad_x if wants_input else None, grad_attention, grad_cells, *[None] * len(ctx.numbers)


_forward.register_autograd(_differentiate, setup_context=_save)
