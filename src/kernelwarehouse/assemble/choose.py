"""The one rule that decides how a layer is evaluated."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble import depthwise, native, pointwise
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.attention import Attention, AttentionShape
from kernelwarehouse.errors import StrategyError

STRATEGIES = ("plain", "depthwise", "grouped", "hidden", "matmul", "native", "pointwise")

# Output positions up to which products of small matrices beat a grouped convolution (measured on a CPU with AVX2).
_FEW_POSITIONS = 400

# Below these the compiled point-wise product has too little to do in a tile, or enough to do for few samples.
_WIDE_CELL = 16
_SMALL_BATCH = 4
_LARGE_IMAGE = 1000
_LARGE_CELL = 128 * 128  # mixing dominates, and there the compiled kernels are ahead

# Mixing through the hidden vector: from how many samples on it is thought of, which part of a layer's multiply-adds (on
# a GPU, of those of mixing) may be left for it to pay against compiled kernels and pure PyTorch, and how many must go.
_MANY_SAMPLES = 24
_LEFT_OF_COMPILED = 0.55
_LEFT_OF_PURE = 0.75
_LEFT_OF_MIXING = 0.5
_FEWEST_SAVED = 5e8

# Strategies that cannot evaluate every layer.
_PARTICULAR = {"depthwise": depthwise, "native": native, "pointwise": pointwise}

# The rule looks at many things, which cost more than a small layer; it is asked once for every kind of input.
_REMEMBERED = 4096
_chosen: dict[tuple[object, ...], "Choice"] = {}

_forced: ContextVar[str | None] = ContextVar("kernelwarehouse_forced_strategy", default=None)


@dataclass(frozen=True)
class Choice:
    """The strategy for one call, and why."""

    strategy: str
    reason: str


@contextmanager
def force(strategy: str) -> Iterator[None]:
    """Evaluate every layer by this strategy inside the `with` block (backward follows its forward).

    For comparisons and second derivatives; without it, each layer takes the way that suits it. What `torch.compile` has
    made looks at it when it runs, in forward and in backward; there is no second derivative, and no `"hidden"`.

    Arguments:
        strategy: `"plain"` is the definition; `kernelwarehouse.assemble.STRATEGIES` lists all.

    Raises:
        StrategyError: for an unknown strategy and, when a layer is called, for one that cannot evaluate it.

    Example:
        >>> import torch, kernelwarehouse as kw
        >>> from kernelwarehouse.layers import Conv2d
        >>> layer, x = Conv2d(8, 8, 3), torch.randn(2, 8, 5, 5)
        >>> with kw.force("plain"):
        ...     expected = layer(x)
        >>> torch.allclose(layer(x), expected, atol=1e-5)
        True
    """
    if strategy not in STRATEGIES:
        raise StrategyError(f"there is no strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
    token = _forced.set(strategy)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """The strategy that a `with force(...)` around the caller asks for; compilers do not see it."""
    return None if torch.compiler.is_compiling() else _forced.get()


def recorded() -> bool:
    """Whether `torch.jit.trace` writes down what is done, with sizes that Python has looked at as constants."""
    return torch.jit.is_tracing()  # type: ignore[attr-defined]


def mixes_through_hidden(x: Tensor, geometry: Geometry, attention: Attention) -> bool:
    """Whether a layer is to be evaluated by `evaluate_factored`, and its attention not computed."""
    if torch.compiler.is_compiling():
        return False  # without looking at the size of the batch, which may be left open
    if x.shape[0] < _MANY_SAMPLES and _forced.get() != "hidden":
        return False  # the answer must cost a small layer nothing
    return choose(x, geometry, attention).strategy == "hidden"


def choose(x: Tensor, geometry: Geometry, attention: Attention | None = None) -> Choice:
    """How to evaluate a layer on this input; where only its attentions are known, without the branch they come from."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return Choice("plain", "traced: compilers and function transforms should see the definition")
    wanted = forced()
    if wanted is not None:
        if x.numel() == 0:
            return Choice("plain", "nothing to compute")
        if wanted == "hidden":
            _require_hidden(geometry, attention)
        elif wanted in _PARTICULAR:
            _PARTICULAR[wanted].require(x, geometry)
        return Choice(wanted, "forced")
    branch = None
    if attention is not None and x.shape[0] >= _MANY_SAMPLES and hidden_obstacle(attention) is None:
        branch = None if torch.is_autocast_enabled("cpu") and x.device.type == "cpu" else attention.shape
    key = geometry, x.shape, x.dtype, x.device.type, type(x), branch
    choice = _chosen.get(key)
    if choice is None:
        if len(_chosen) >= _REMEMBERED:
            _chosen.clear()
        choice = _rule(x, geometry)
        choice = _chosen[key] = choice if branch is None else _through_hidden(x, geometry, branch, choice)
    if choice.strategy in ("plain", "grouped") and recorded() and x.numel() > 0:
        return Choice("matmul", "traced: a convolution with a group for every sample would fit this batch only")
    return choice


def hidden_obstacle(attention: Attention | None) -> str | None:
    """Why a layer cannot be mixed through the hidden vector of its attention, or nothing."""
    if attention is None:
        return "its attentions are given, not the branch that they come from"
    if recorded():
        return "a trace would keep the size of this batch"
    shape = attention.shape
    if shape.function != "caf":
        return f"its attention function is {shape.function!r}; 'caf' is wanted"
    if shape.own_cells_only:
        return "its mixtures see their own cells only"
    if not isinstance(attention.fc2, nn.Linear):
        return f"the last layer of its attention is a {type(attention.fc2).__name__}, not a linear one"
    for name, part in (("attention", attention), ("attention.fc2", attention.fc2)):
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return f"a hook wants to see what its {name} computes"
    return None


def _require_hidden(geometry: Geometry, attention: Attention | None) -> None:
    problem = hidden_obstacle(attention)
    if problem is not None:
        raise StrategyError(f"the layer with kernel {geometry.partition.kernel_shape} cannot be hidden: {problem}")


def _through_hidden(x: Tensor, geometry: Geometry, shape: AttentionShape, usual: Choice) -> Choice:
    """Mixing through the hidden vector, or what is usual otherwise."""
    batch, units, cells = x.shape[0], shape.units, shape.cells
    if usual.strategy == "plain" or geometry.groups > 1 or type(x) is not Tensor:
        return usual
    positions = math.prod(geometry.output_size(tuple(x.shape[2:]))) if geometry.spatial_axes else x.shape[1]
    mixed = units + units * cells / batch  # kernels mixed for a sample
    if x.device.type == "cpu":
        # Products of one kernel position and many output positions are a library's, in backward at least.
        library = pointwise.obstacle(geometry) is None and positions > native.MANY_POSITIONS
        limit = _LEFT_OF_COMPILED if usual.strategy == "native" and not library else _LEFT_OF_PURE
        left = (positions + mixed) / (positions + cells)
    else:
        limit, left = _LEFT_OF_MIXING, mixed / cells
    saved = batch * (cells - mixed) * math.prod(geometry.partition.kernel_shape)
    if left > limit or saved < _FEWEST_SAVED:
        return usual
    return Choice("hidden", f"mixes {units} kernels for the batch, then {units} instead of {cells} for each sample")


def _rule(x: Tensor, geometry: Geometry) -> Choice:
    if x.numel() == 0 or x.device.type == "meta":
        return Choice("plain", "nothing to compute")
    if geometry.groups > 1 and geometry.partition.kernel_shape[1] == 1:
        hindrance = depthwise.obstacle(x, geometry)
        if hindrance is None:
            return Choice("depthwise", "compiled: channel by channel, in cache")
        return Choice("plain", f"depth-wise: the kernels are small enough to keep; not compiled, as {hindrance}")
    obstacle = native.obstacle(x, geometry)
    positions = math.prod(geometry.output_size(tuple(x.shape[2:])))
    if pointwise.obstacle(geometry) is None:
        return _choose_pointwise(x.shape[0], positions, geometry, obstacle)
    if obstacle is None:
        return Choice("native", "compiled: mixes and multiplies in cache")
    if math.prod(geometry.partition.cell_shape[2:]) > 1:
        return Choice("grouped", "cells wider than one position, which a product per position would copy first")
    if geometry.spatial_axes == 0:
        return Choice("matmul", "linear: one batched product")
    if x.device.type == "cpu" and positions <= _FEW_POSITIONS and x.dtype in (torch.float32, torch.float64):
        return Choice("matmul", f"{positions} output positions, at most {_FEW_POSITIONS}; not native, as {obstacle}")
    return Choice("grouped", f"{positions} output positions; not native, as {obstacle}")


def _choose_pointwise(batch: int, positions: int, geometry: Geometry, obstacle: str | None) -> Choice:
    if obstacle is not None:
        return Choice("pointwise", f"one kernel position; not native, as {obstacle}")
    if geometry.partition.cell_shape[0] < _WIDE_CELL:
        return Choice("pointwise", f"one kernel position, cells narrower than {_WIDE_CELL} output channels")
    few = native.MANY_POSITIONS if math.prod(geometry.partition.cell_shape) < _LARGE_CELL else _FEW_POSITIONS
    if positions > _LARGE_IMAGE or (positions > few and batch >= _SMALL_BATCH):
        return Choice("pointwise", f"one kernel position, {positions} output positions: large products")
    return Choice("native", "compiled: mixes and multiplies in cache")
