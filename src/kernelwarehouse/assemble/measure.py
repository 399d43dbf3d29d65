"""Timing the ways to evaluate a layer on the input at hand, and choosing among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelwarehouse.assemble.question import Question
from kernelwarehouse.assemble.route_table import Choice
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.assemble.timing import best_times

# The way that is taken by rule keeps its place unless another takes less than this part of its time: differences that
# are noise should not decide.
_WIN = 0.95


@dataclass(frozen=True)
class Times:
    """Seconds by name of strategy; backward is empty where nothing is differentiated."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]

    def __str__(self) -> str:
        parts = []
        for title, times in (("forward", self.forward), ("backward", self.backward)):
            ranked = sorted(times.items(), key=lambda item: item[1])
            if ranked:
                parts.append(f"{title} " + ", ".join(f"{name} {1e3 * taken:.3g}" for name, taken in ranked))
        return "; ".join(parts) + " ms"


def measure(candidates: Sequence[Strategy], x: Tensor, cells: Tensor, question: Question) -> Times:
    """Times of every candidate on this input. Attentions are made up: their values do not matter."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        wants_input = x.requires_grad
        x, cells = x.detach(), cells.detach()
        mixing = {strategy.name: _mixing(strategy, x, question) for strategy in candidates}

        def forward(strategy: Strategy) -> Tensor:
            return strategy.forward(x, *mixing[strategy.name], cells, question.geometry)

        def backward(strategy: Strategy) -> None:
            if strategy.backward is not None:
                strategy.backward(grad, x, *mixing[strategy.name], cells, question.geometry, wants_input)

        forwards = best_times({strategy.name: lambda s=strategy: forward(s) for strategy in candidates})  # type: ignore[misc]
        if not question.training:
            return Times(forwards, {})
        grad = torch.ones_like(forward(candidates[0]))
        return Times(
            forwards,
            best_times({strategy.name: lambda s=strategy: backward(s) for strategy in candidates}),  # type: ignore[misc]
        )


def _mixing(strategy: Strategy, x: Tensor, question: Question) -> tuple[Tensor, ...]:
    batch, mixtures = x.shape[0], question.geometry.partition.mixtures
    if strategy.mixing == "weights":
        return (x.new_full((batch, mixtures, question.cells), 0.1),)
    units = question.units
    return x.new_full((batch, mixtures, units), 0.1), x.new_full((mixtures, units, question.cells), 0.1)


def choose(times: Times, usual: Choice, strategies: Mapping[str, Strategy]) -> Choice:
    """The fastest way, or the usual one where that is hardly slower.

    Forward and backward of strategies that mix with attentions can be combined at will; those that mix with their
    factors go together.
    """
    free = [name for name in times.forward if strategies[name].mixing == "weights"]
    best = Choice(
        _least(times.forward, free, usual.forward),
        _least(times.backward, free, usual.backward) if times.backward else None,
    )
    total = _total(times, best)
    for name in times.forward:
        together = Choice(name, name if times.backward else None)
        if name not in free and _total(times, together) < _WIN * total:
            best, total = together, _total(times, together)
    return best


def _least(times: Mapping[str, float], names: Sequence[str], usual: str | None) -> str:
    fastest = min(names, key=lambda name: times[name])
    return usual if usual is not None and usual in names and times[fastest] > _WIN * times[usual] else fastest


def _total(times: Times, choice: Choice) -> float:
    return times.forward[choice.forward] + (times.backward[choice.backward] if choice.backward else 0.0)
