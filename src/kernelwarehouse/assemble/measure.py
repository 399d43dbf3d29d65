"""Timing the ways to evaluate a layer on the input at hand, and choosing among them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernelwarehouse._heap import give_back
from kernelwarehouse.assemble.geometry import Geometry
from kernelwarehouse.assemble.question import Question
from kernelwarehouse.assemble.route_table import Choice
from kernelwarehouse.assemble.strategy import Strategy
from kernelwarehouse.assemble.timing import Watch, best_times
from kernelwarehouse.errors import StrategyError

# The way that is taken by rule keeps its place unless another takes less than this part of its time: differences that
# are noise should not decide. Not 0.9: choices could then be 10% off, and sums should be within 5%.
_WIN = 0.95

# Samples that are enough to tell.
_SAMPLES = 16


@dataclass(frozen=True)
class Times:
    """Seconds by name of strategy; backward is empty where nothing is differentiated.

    Of strategies that have their forward or backward in common, only the first has a time of it.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    crowded: bool = False  # others had the processor meanwhile: the order may be another when they do not

    def __str__(self) -> str:
        parts = []
        for title, times in (("forward", self.forward), ("backward", self.backward)):
            ranked = sorted(times.items(), key=lambda item: item[1])
            if ranked:
                parts.append(f"{title} " + ", ".join(f"{name} {1e3 * taken:.3g}" for name, taken in ranked))
        return "; ".join(parts) + " ms"


def measure(candidates: Sequence[Strategy], x: Tensor, cells: Tensor, question: Question) -> Times:
    """Times of all that candidates do on this input. Attentions are made up: their values do not matter.

    Of large batches some samples have to do, where the time of a sample does not depend on how many there are.
    """
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x, cells, watch = x.detach(), cells.detach(), Watch()
        calls = {strategy.name: _Call.of(strategy, x, cells, question) for strategy in candidates}
        different = _different(calls, lambda strategy: strategy.forward)
        forward = best_times({name: call.forward for name, call in different.items()}, x.device)
        backward = {}
        if question.training:
            different = _different(calls, lambda strategy: strategy.backward)
            grads = {name: torch.ones_like(call.forward()) for name, call in different.items()}
            give_back()
            backward = best_times(
                {name: partial(call.backward, grads[name], question.wants_input) for name, call in different.items()},
                x.device,
            )
            del grads
        # Trials leave holes between what a training step keeps; without this, its first peak would be a third higher.
        give_back()
        scales = {name: len(x) / call.samples for name, call in calls.items()}
        whole = [{name: taken * scales[name] for name, taken in times.items()} for times in (forward, backward)]
        return Times(whole[0], whole[1], watch.crowded())


@dataclass(frozen=True)
class _Call:
    """One strategy with inputs of the right shapes."""

    strategy: Strategy
    tensors: tuple[Tensor, ...]  # input, mixing and cells
    geometry: Geometry
    samples: int

    @staticmethod
    def of(strategy: Strategy, x: Tensor, cells: Tensor, question: Question) -> "_Call":
        geometry, mixtures, units = question.geometry, question.geometry.partition.mixtures, question.units
        if strategy.mixing == "weights":
            x = x[:_SAMPLES]
            mixing: tuple[Tensor, ...] = (x.new_full((len(x), mixtures, question.cells), 0.1),)
        elif strategy.mixing == "basis":
            every_other = torch.arange(len(x))[:, None] + torch.arange(question.basis)  # as a ReLU leaves them
            mixing = 0.1 * (every_other % 2).to(x), x.new_full((len(x), mixtures), 0.1)
        else:
            mixing = (
                x.new_full((len(x), mixtures, units), 0.1),
                x.new_full((mixtures, units, question.cells), 0.1),
            )
        return _Call(strategy, (x, *mixing, cells), geometry, len(x))

    def forward(self) -> Tensor:
        return self.strategy.forward(*self.tensors, self.geometry)

    def backward(self, grad: Tensor, wants_input: bool) -> None:
        if self.strategy.backward is None:
            raise StrategyError(f"strategy {self.strategy.name!r} has no backward of its own to measure")
        self.strategy.backward(grad, *self.tensors, self.geometry, wants_input)


def _different(calls: Mapping[str, _Call], half: Callable[[Strategy], object]) -> dict[str, _Call]:
    """Of those that have this half in common, the first: in the registry's order, the one that rules name."""
    first: dict[object, str] = {}
    for name, call in calls.items():
        first.setdefault(half(call.strategy), name)
    return {name: calls[name] for name in first.values()}


def choose(times: Times, usual: Choice, strategies: Mapping[str, Strategy]) -> Choice:
    """The fastest way, or the usual one where that is hardly slower.

    Forward and backward of strategies that mix with attentions can be combined at will; those that mix with their
    factors go together.
    """

    def free(part: Mapping[str, float]) -> list[str]:
        return [name for name in part if strategies[name].mixing != "factors"]

    best = Choice(
        _least(times.forward, free(times.forward), usual.forward),
        _least(times.backward, free(times.backward), usual.backward) if times.backward else None,
    )
    total = _total(times, best)
    for name in times.forward:
        together = Choice(name, name if times.backward else None)
        if strategies[name].mixing == "factors" and _total(times, together) < _WIN * total:
            best, total = together, _total(times, together)
    return best


def _least(times: Mapping[str, float], names: Sequence[str], usual: str | None) -> str:
    fastest = min(names, key=lambda name: times[name])
    return usual if usual is not None and usual in names and times[fastest] > _WIN * times[usual] else fastest


def _total(times: Times, choice: Choice) -> float:
    return times.forward[choice.forward] + (times.backward[choice.backward] if choice.backward else 0.0)
