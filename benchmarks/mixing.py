"""Time of single layers by mixing through the hidden vector, against the strategy that they would be evaluated by.

Forward and backward of a whole layer, its attention branch included, interleaved in one process after two steps of each
that are not counted. Where `hidden` is chosen, the ratio stands out.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import results, tables
from benchmarks.cases import MODES, converted_network
from benchmarks.speed import CLOCKS, interleave
from kernelwarehouse.assemble import force, route
from kernelwarehouse.layers import WarehouseLayer


@dataclass(frozen=True)
class Case:
    """A layer of a network, and the side of the images that reach it."""

    preset: str
    layer: str
    side: int


CASES = (
    Case("kw4x_resnet50", "layer3.1.conv1", 14),
    Case("kw4x_resnet50", "layer3.1.conv2", 14),
    Case("kw4x_resnet50", "layer3.1.conv3", 14),
    Case("kw4x_resnet50", "layer4.1.conv3", 7),
    Case("kw1x_resnet50", "layer3.1.conv2", 14),
    Case("kw1x_resnet50", "layer3.1.conv3", 14),
    Case("kw4x_resnet18", "layer3.1.conv1", 4),
    Case("kw4x_resnet18", "layer4.1.conv1", 7),
    Case("kw4x_resnet18", "layer4.1.conv1", 4),
)
BATCHES = (16, 64, 128, 256)


def step(layer: WarehouseLayer, x: Tensor, strategy: str, mode: str) -> None:
    """One forward pass, or forward and backward."""
    with force(strategy), torch.set_grad_enabled(mode == "training"):
        out = layer(x)
    if mode == "training":
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out.backward(out.detach())


def measure(layer: WarehouseLayer, case: Case, batch: int, mode: str, timing: Callable[..., Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    layer.train(mode == "training")
    x = torch.randn(batch, layer.geometry.in_channels, case.side, case.side, requires_grad=mode == "training")
    usual = route(x, layer.warehouse.cells, layer.geometry).forward
    times = timing({way: partial(step, layer, x, way, mode) for way in (usual, "hidden")})
    medians = {way: statistics.median(taken) for way, taken in times.items()}
    shape = layer.attention.shape
    return {
        "preset": case.preset,
        "layer": case.layer,
        "kernel": layer.geometry.partition.kernel_shape,
        "side": case.side,
        "cells": shape.cells,
        "units": shape.units,
        "batch": batch,
        "mode": mode,
        "usual": usual,
        "rounds": len(times[usual]),
        "milliseconds": {way: round(1e3 * median, 2) for way, median in medians.items()},
        "ratio": round(medians["hidden"] / medians[usual], 3),
        "chosen": route(x, layer.warehouse.cells, layer.geometry, layer.attention).forward,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixing", description=__doc__)
    parser.add_argument("--only", default="", help="layers whose name, with its network, contains this")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["training"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: where others use the machine")
    parser.add_argument("--seconds", type=float, default=2, help="time for a row, at least")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a row, at least")
    parser.add_argument("--out", type=Path, help="JSON file; by default one in benchmarks/results for all layers")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    timing = partial(interleave, seconds=chosen.seconds, fewest=chosen.rounds, clock=chosen.clock)
    cases = [case for case in CASES if chosen.only in f"{case.preset} {case.layer}"]
    whole = len(cases) == len(CASES) and tuple(chosen.batch) == BATCHES
    facts = {**results.machine(chosen.threads), "clock": chosen.clock}
    out = results.destination("mixing", facts, chosen.out) if chosen.out or whole else None
    console, rows = Console(), []
    for case in cases:
        layer = converted_network(case.preset).get_submodule(case.layer)
        if not isinstance(layer, WarehouseLayer):
            raise SystemExit(f"{case.preset} has no layer with a warehouse at {case.layer!r}")
        for mode in chosen.mode:
            for batch in chosen.batch:
                rows.append(measure(layer, case, batch, mode, timing))
                console.print(f"{case.preset} {case.layer} {mode} batch {batch}: {rows[-1]['ratio']:.2f}")
                if out:  # after every row: a long run that is broken off has measured something
                    results.write(out, {"machine": facts, "rows": rows})
        del layer
        gc.collect()
    console.print(tables.mixing(rows).rich("mixing through the hidden vector, relative to the strategy in brackets"))


if __name__ == "__main__":
    main()
