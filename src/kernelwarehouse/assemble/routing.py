"""The one place that decides how a layer is evaluated."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from kernelwarehouse.assemble import hidden, route_table
from kernelwarehouse.assemble.basis import Prepared
from kernelwarehouse.assemble.context import FORCED, forced, recorded
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.layout import channels_last
from kernelwarehouse.assemble.measure import choose, measure
from kernelwarehouse.assemble.question import Question
from kernelwarehouse.assemble.registry import BASES, BASIS, STRATEGIES
from kernelwarehouse.assemble.route_table import Choice
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.attention import Attention
from kernelwarehouse.errors import StrategyError

_log = logging.getLogger("kernelwarehouse")

# Output positions up to which the rule takes products of small matrices, which a convolution library starts slowly on.
_SMALL_MAP = 256

# Output positions, 14 x 14, up to which windows of the input are small beside the kernels of a batch.
_FEW_WINDOWS = 196

# A question takes longer to answer than a small layer to compute; what was asked before is not asked again.
_REMEMBERED = 4096
_answers: dict[Question, "Route"] = {}
_answered_at = 0
_turn = Lock()


@dataclass(frozen=True)
class Route:
    """The strategies for one call, and why."""

    forward: str
    backward: str | None
    reason: str


@contextmanager
def force(strategy: str) -> Iterator[None]:
    """Evaluate every layer by this strategy inside the `with` block (backward follows its forward).

    For comparisons and second derivatives; without it, each layer takes the way that suits it. What `torch.compile` has
    made looks at it when it runs, in forward and in backward; there is no second derivative, and no `"hidden"`. On a
    GPU such a backward runs in a thread of torch's own, which does not see it, and goes by the route.

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
    token = FORCED.set(strategy)
    try:
        yield
    finally:
        FORCED.reset(token)


def route(
    x: Tensor,
    cells: Tensor,
    geometry: Geometry,
    attention: Attention | None = None,
    prepared: Prepared | None = None,
    training: bool | None = None,
    wants_input: bool | None = None,
) -> Route:
    """How to evaluate a layer on this input.

    Without the branch that its attentions come from, where only those are known. A call is taken for one of training
    where gradients are recorded, unless `training` says otherwise; then the input's gradient is wanted where the input
    requires it, unless `wants_input` says otherwise.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return Route("plain", None, "traced: compilers and function transforms should see the definition")
    if x.numel() == 0 or x.device.type == "meta":
        return Route("plain", None, "nothing to compute")
    wanted = forced()
    if wanted is not None:
        _require(STRATEGIES[wanted], x, geometry, attention)
        return Route(wanted, wanted, "forced")
    question = ask(x, cells, geometry, attention, prepared, training, wants_input)
    if recorded():
        return _for_traces(_by_rule(x, question), x, geometry)
    global _answered_at
    answer = _answers.get(question) if _answered_at == route_table.changes() else None
    if answer is None:
        with _turn:
            asked_at = route_table.changes()
            if _answered_at != asked_at or len(_answers) >= _REMEMBERED:
                _answers.clear()
                _answered_at = asked_at
            answer = _answer(x, cells, question, prepared)
            if asked_at == route_table.changes():  # a run that has begun or ended meanwhile may have others
                _answers[question] = answer
    return answer


def ask(
    x: Tensor,
    cells: Tensor,
    geometry: Geometry,
    attention: Attention | None = None,
    prepared: Prepared | None = None,
    training: bool | None = None,
    wants_input: bool | None = None,
) -> Question:
    """What the answer of `route` depends on."""
    training = torch.is_grad_enabled() if training is None else training
    wants_input = training and (x.requires_grad if wants_input is None else wants_input)
    basis, units, kept = 0, 0, ""
    if attention is not None:
        if prepared is not None and prepared.usable(x, attention, cells):
            basis, kept = attention.shape.units, prepared.stored.kind
        elif hidden.saves(x.shape[0], attention) and hidden.obstacle(attention) is None:
            units = attention.shape.units
    last = channels_last(x)
    threads = torch.get_num_threads() if x.device.type == "cpu" else 0
    # The one question that torch answers whichever of its two ways to allow TF32 was taken.
    product = torch.backends.cuda.matmul
    tf32 = x.device.type == "cuda" and x.dtype == torch.float32 and product.fp32_precision == "tf32"
    kind, sizes = (x.dtype, tf32, x.device, last, threads), (len(cells), units, basis)
    return Question(geometry, x.shape, *kind, *sizes, kept, training, wants_input)


def _require(strategy: Strategy, x: Tensor, geometry: Geometry, attention: Attention | None) -> None:
    problem = hidden.obstacle(attention) if strategy.mixing == "factors" else strategy.obstacle(x, geometry)
    if problem is not None:
        kernel = geometry.partition.kernel_shape
        raise StrategyError(f"the layer with kernel {kernel} cannot be {strategy.name}: {problem}")


def _answer(x: Tensor, cells: Tensor, question: Question, prepared: Prepared | None) -> Route:
    usual, candidates = _by_rule(x, question), _candidates(x, question)
    if question.basis and prepared is not None:  # what `prepare_inference` has chosen to keep is there to be used
        usual = Route(BASIS, None, f"prepared: mixes {question.basis} kernels instead of {question.cells}")
        candidates += prepared.strategies(x, question.geometry)
    if type(x) is not Tensor:
        return usual
    key, strategies = question.key(), {strategy.name: strategy for strategy in candidates}
    kept = route_table.of_runs(key)
    choice = kept or route_table.known(key)
    if choice is not None:
        problem = _obstacle(choice, x, question, strategies)
        if problem is None:
            if not kept:
                route_table.keep_with_runs(key, choice)
            backward = choice.backward if question.training else None
            return Route(choice.forward, backward, "as before in this run" if kept else "as chosen before")
        _say_passed_over(key, problem)
    if len(candidates) == 1:
        return usual
    if x.device.type != "cpu" or not route_table.measures():
        # A run that is resumed goes on by this rule even where something has been measured by then.
        route_table.keep_with_runs(key, Choice(usual.forward, usual.backward))
        return usual
    times = measure(candidates, x, cells, question)
    choice = choose(times, Choice(usual.forward, usual.backward), strategies)
    # Beside others' work, as that of a loader's processes, this is what suits; without it, something else may.
    route_table.remember(key, choice, lasting=not times.crowded)
    beside = " while others had the processor, so not for the next time" if times.crowded else ""
    return Route(choice.forward, choice.backward, f"measured{beside}: {times}")


@lru_cache(maxsize=_REMEMBERED)
def _say_passed_over(key: str, problem: str) -> None:
    """Once: many sizes share a choice."""
    _log.warning("the choice for [%s] is passed over: %s", key, problem)


def _obstacle(choice: Choice, x: Tensor, question: Question, candidates: Mapping[str, Strategy]) -> str | None:
    """Why a layer cannot take the ways that a run or a file names, or nothing.

    Those that nobody would measure are among them: the rule may have taken them, and people ask for what they like.
    """
    names = [choice.forward]
    if question.training:
        if choice.backward is None:
            return "it names no way for backward"
        names.append(choice.backward)
    for name in names:
        if name in candidates:
            continue
        if name in BASES:
            return f"{name!r} needs a layer that was prepared for inference in that way"
        if STRATEGIES[name].mixing == "factors":
            return f"{name!r} would save nothing, or cannot be used with the layer's attention"
        problem = STRATEGIES[name].obstacle(x, question.geometry)
        if problem is not None:
            return f"{name!r} cannot be used, as {problem}"
        if STRATEGIES[name].backward is None and len({*names}) > 1:
            return f"{name!r} goes with itself alone: it is differentiated step by step"
    return None


def _candidates(x: Tensor, question: Question) -> list[Strategy]:
    """Strategies that are worth a try on a layer.

    The definition is none of them, as it keeps what is large; nor are products of matrices of a single row, nor
    windows where compiled kernels do the same in cache: for none of ResNet18's layers were they faster.
    """
    hopeless = {"plain", "matmul"} if question.geometry.partition.kernel_shape[1] == 1 else {"plain"}
    hopeless |= {"windows"} if STRATEGIES["native"].obstacle(x, question.geometry) is None else set()
    return [
        strategy
        for strategy in STRATEGIES.values()
        if strategy.name not in hopeless
        and strategy.obstacle(x, question.geometry) is None
        and (strategy.mixing == "weights" or question.units)
    ]


def _by_rule(x: Tensor, question: Question) -> Route:
    """The way where nothing was measured."""
    name, reason = _rule(x, question)
    return Route(name, name if question.training else None, f"by rule: {reason}")


def _rule(x: Tensor, question: Question) -> tuple[str, str]:
    geometry = question.geometry
    if question.device.type != "cpu":
        return _rule_of_launches(question)
    if STRATEGIES["depthwise"].obstacle(x, geometry) is None:
        return "depthwise", "compiled, channel by channel, in cache"
    if STRATEGIES["native"].obstacle(x, geometry) is None:
        return "native", "compiled, mixes and multiplies in cache"
    if STRATEGIES["pointwise"].obstacle(x, geometry) is None:
        return "pointwise", "one kernel position is one batched product"
    if geometry.spatial_axes == 0:
        return "matmul", "a linear layer is one batched product"
    if math.prod(geometry.partition.cell_shape[2:]) > 1 or geometry.groups > 1:
        return "grouped", "cells wider than one position, or groups, are a convolution library's"
    if question.positions <= _SMALL_MAP and x.dtype in (torch.float32, torch.float64):
        return "matmul", f"{question.positions} output positions, at most {_SMALL_MAP}"
    return "grouped", f"{question.positions} output positions"


def _rule_of_launches(question: Question) -> tuple[str, str]:
    """For GPUs, where launches and the traffic of kernels count; `hidden`, of many small products, is never taken."""
    geometry, partition = question.geometry, question.geometry.partition
    if geometry.groups > 1:
        return "grouped", "groups are a convolution library's"
    if len(geometry.taps) == 1 and not any(geometry.padding):
        if partition.in_groups > 1 and partition.out_groups == 1:
            return "windows", "kernels of several input groups are mixed in order"
        if geometry.spatial_axes:
            return "pointwise", "one kernel position is one batched product"
        if partition.in_groups == 1:
            return "matmul", "a linear layer is one batched product"
        return "grouped", "a linear layer of cells that are neither rows nor columns of its kernel is assembled"
    if question.positions <= _FEW_WINDOWS:
        return "windows", f"{question.positions} output positions, at most {_FEW_WINDOWS}"
    return "grouped", f"{question.positions} output positions"


def _for_traces(answer: Route, x: Tensor, geometry: Geometry) -> Route:
    """A trace is used for other batches, which groups for every sample, or chunks of some, would not fit; and without
    this library, where torch's own operators do as well."""
    backward = answer.backward is not None
    if STRATEGIES["pointwise"].obstacle(x, geometry) is None:
        return Route("pointwise", "pointwise" if backward else None, "traced: one batched product")
    if answer.forward not in ("grouped", "windows"):
        return answer
    return Route("matmul", "matmul" if backward else None, "traced: for any size of the batch")
