"""How good the choice of strategies is: every layer of the networks, by every strategy that can evaluate it.

Layers that are alike (same kernel, cells and input) are measured once and counted as often as they are there. The
choice is made anew, as at the first call of a layer, before the candidates are timed. For training, forward and
backward are timed apart, as they are chosen apart; strategies that mix with factors of the attention have to be taken
for both.
"""

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks import results
from benchmarks.cases import MODES, converted_network
from benchmarks.speed import CLOCKS
from benchmarks.tables import routing, summary
from kernelwarehouse.assemble import STRATEGIES, force, hidden, route_table
from kernelwarehouse.layers import Linear, WarehouseLayer

NETWORKS = (
    "kw1x_small_resnet",
    "kw1x_mobilenetv2_100",
    "kw1x_resnet18",
    "kw1x_deit_small",
    "kw1x_convnext_tiny",
    "kw1x_resnet50",
)
BATCHES = (1, 16, 64)
_SLOW = 2.0  # times the fastest: not worth another run


@dataclass
class Place:
    """A layer with the shape of its input, and how many there are of it."""

    name: str
    layer: WarehouseLayer
    shape: tuple[int, ...]  # without the batch
    count: int = 1


def places(model: nn.Module, image: int) -> list[Place]:
    """All layers of the model that differ in what they cost."""
    found: dict[object, Place] = {}
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, WarehouseLayer)}

    def note(layer: nn.Module, given: tuple[Any, ...]) -> None:
        if isinstance(layer, WarehouseLayer):
            shape = tuple(given[0].shape[1:])
            place = found.setdefault(
                (layer.geometry, layer.attention.shape, shape), Place(names[layer], layer, shape, 0)
            )
            place.count += 1

    handles = [layer.register_forward_pre_hook(note) for layer in names]
    with torch.no_grad():
        device = next(model.parameters()).device  # shapes are enough: "meta" will do
        model.eval()(torch.zeros(1, 3, image, image, device=device))
    for handle in handles:
        handle.remove()
    return list(found.values())


def one_step(layer: WarehouseLayer, x: Tensor, mode: str, way: str | None, clock: str) -> tuple[float, float]:
    """Seconds of forward, and of backward (0 in inference), by one strategy or by the choice."""
    now = CLOCKS[clock]
    with force(way) if way else nullcontext(), torch.set_grad_enabled(mode == "training"):
        start = now()
        out = layer(x)
        forward = now() - start
    if mode == "inference":
        return forward, 0.0
    layer.zero_grad(set_to_none=True)
    x.grad = None
    grad = out.detach()
    start = now()
    out.backward(grad)
    return forward, now() - start


def candidates(layer: WarehouseLayer, x: Tensor) -> Iterator[str]:
    """Names of the strategies that can evaluate a layer, the definition aside."""
    for name, strategy in STRATEGIES.items():
        if strategy.mixing == "factors":
            possible = hidden.obstacle(layer.attention) is None and hidden.saves(len(x), layer.attention)
        else:
            possible = name != "plain" and strategy.obstacle(_seen(layer, x), layer.geometry) is None
        if possible:
            yield name


def _seen(layer: WarehouseLayer, x: Tensor) -> Tensor:
    return x.reshape(len(x), -1, x.shape[-1]) if isinstance(layer, Linear) else x


def _with_common_halves(best: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """What strategies have in common, forward or backward, took the least that any of them was seen to take."""
    halves = {name: ((0, STRATEGIES[name].forward), (1, STRATEGIES[name].backward)) for name in best}
    seen: dict[tuple[int, object], float] = {}
    for name, taken in best.items():
        for half, seconds in zip(halves[name], taken, strict=True):
            seen[half] = min(seconds, seen.get(half, seconds))
    return {name: (seen[forward], seen[backward]) for name, (forward, backward) in halves.items()}


def measure(place: Place, batch: int, mode: str, rounds: int, clock: str) -> dict[str, Any]:
    """One row: milliseconds of every candidate and of the choice."""
    layer = place.layer.train(mode == "training")
    x = torch.randn(batch, *place.shape, requires_grad=mode == "training")
    route_table.forget()
    one_step(layer, x, mode, None, clock)  # chooses
    route = layer.route  # other ways are forced below, and the layer remembers the last one
    if route is None:
        raise RuntimeError(f"{place.name} does not say which way it took")
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        name: lambda way=name: one_step(layer, x, mode, way, clock)  # type: ignore[misc]
        for name in candidates(layer, x)
    }
    runs["chosen"] = lambda: one_step(layer, x, mode, None, clock)
    best = {name: run() for name, run in runs.items()}
    for _ in range(rounds):
        limit = _SLOW * min(sum(taken) for taken in best.values())
        for name, run in runs.items():
            if name == "chosen" or sum(best[name]) <= limit:  # whatever disturbed its first run
                again = run()
                best[name] = min(best[name][0], again[0]), min(best[name][1], again[1])
    # The choice is a candidate, or two: its own runs are runs of theirs.
    ways, chosen = (route.forward, route.backward or route.forward), best.pop("chosen")
    for direction, way in enumerate(ways):
        taken = list(best[way])
        taken[direction] = min(taken[direction], chosen[direction])
        best[way] = taken[0], taken[1]
    best = _with_common_halves(best)
    seconds = best[ways[0]][0] + best[ways[1]][1]
    return {
        "layer": place.name,
        "count": place.count,
        "kernel": layer.geometry.partition.kernel_shape,
        "input": (batch, *place.shape),
        "mode": mode,
        "batch": batch,
        "chosen": (route.forward, route.backward),
        "forward ms": {name: round(1e3 * taken[0], 3) for name, taken in best.items()},
        "backward ms": {name: round(1e3 * taken[1], 3) for name, taken in best.items()} if mode == "training" else {},
        "ratio": round(seconds / least(best), 3),
        "chosen ms": 1e3 * seconds,
        "best ms": 1e3 * least(best),
    }


def least(best: dict[str, tuple[float, float]]) -> float:
    """Seconds of the best choice there is."""
    free = [name for name in best if STRATEGIES[name].mixing == "weights"]
    together = [sum(best[name]) for name in best if name not in free]
    apart = min(best[name][0] for name in free) + min(best[name][1] for name in free)
    return min([apart, *together])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--preset", nargs="+", default=list(NETWORKS))
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: where others use the machine")
    parser.add_argument("--rounds", type=int, default=3, help="times that what is not far behind is run again")
    parser.add_argument("--out", type=Path, help="JSON file; by default in benchmarks/results for all networks")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    whole = all(getattr(chosen, name) == parser.get_default(name) for name in ("preset", "batch", "mode"))
    facts = {**results.machine(chosen.threads), "clock": chosen.clock}
    out = results.destination(f"routing-{chosen.threads}", facts, chosen.out) if whole or chosen.out else None
    console = Console()
    rows: list[dict[str, Any]] = []
    for preset in chosen.preset:
        model = converted_network(preset)
        found = places(model, 32 if preset.endswith("small_resnet") else 224)
        for mode in chosen.mode:
            for batch in chosen.batch:
                rows += [
                    {"network": preset, **measure(place, batch, mode, chosen.rounds, chosen.clock)} for place in found
                ]
                console.print(f"{preset} {mode} batch {batch}: {summary(rows[-len(found) :])}")
                if out:  # after every network: a long run that is broken off has measured something
                    results.write(out, {"machine": facts, "rows": rows})
        del model, found
        gc.collect()
    console.print(routing(rows).rich("the choice against the best there is"))


if __name__ == "__main__":
    main()
