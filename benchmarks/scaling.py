"""How time and memory grow with batch, budget and width: ResNet18, static, plain and ours.

One of the three is varied at a time, the others stay at batch 8, budget 1 and width 1. Memory is that of a training
step, taken in a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import kernelwarehouse as kw
from benchmarks import results
from benchmarks.cases import MODES, WAYS, runner
from benchmarks.memory import process_memory
from benchmarks.speed import CLOCKS, interleave
from kernelwarehouse.assemble.build import load_native

_CHANNELS = (64, 128, 256, 512)


@dataclass(frozen=True)
class Point:
    batch: int = 8
    budget: float = 1.0
    width: float = 1.0
    image: int = 112


AXES: dict[str, tuple[float, ...]] = {
    "batch": (1, 4, 16, 32),
    "budget": (0.5, 1, 2, 4),
    "width": (0.5, 1, 2),
}


def networks(point: Point) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    static = timm.create_model("resnet18", channels=tuple(int(point.width * channels) for channels in _CHANNELS))
    converted = kw.convert(static, kw.plan(static, kw.WarehouseConfig(budget=point.budget)))
    kw.set_temperature(converted, 0.0)
    return {"static": static, "plain": converted, "ours": converted}


def seconds(point: Point, mode: str, chosen: argparse.Namespace) -> dict[str, float]:
    models = networks(point)
    runs = {way: runner(models[way], way, mode, point.batch, point.image) for way in WAYS}
    times = interleave(runs, chosen.seconds, chosen.rounds, chosen.clock)
    return {way: statistics.median(taken) for way, taken in times.items()}


def peak_in_this_process(point: Point, way: str) -> int:
    load_native()
    before = process_memory("VmRSS")
    model = networks(point)[way]
    run = runner(model, way, "training", point.batch, point.image)
    for _ in range(2):
        run()
    return process_memory("VmHWM") - before


def in_child(point: Point, way: str, threads: int) -> int:
    command = [sys.executable, "-m", "benchmarks.scaling", "--threads", str(threads), "--child", way]
    command += ["--point", json.dumps(asdict(point))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1])["bytes"])


def measure(axis: str, value: float, chosen: argparse.Namespace) -> dict[str, Any]:
    point = replace(Point(), **{axis: int(value) if axis == "batch" else value})
    row: dict[str, Any] = {
        "axis": axis,
        "value": value,
        "threads": chosen.threads,
        "point": asdict(point),
        "milliseconds": {},
    }
    for mode in MODES:
        taken = seconds(point, mode, chosen)
        row["milliseconds"][mode] = {way: round(1e3 * time, 2) for way, time in taken.items()}
    row["megabytes"] = {way: round(in_child(point, way, chosen.threads) / 1e6, 1) for way in WAYS}
    return row


def table(rows: Sequence[dict[str, Any]], axis: str) -> Table:
    shown = Table(title=f"ResNet18 by {axis}: static, then plain and ours relative to it", title_justify="left")
    for column in (axis, "inference ms", "plain", "ours", "training ms", "plain", "ours", "memory MB", "plain", "ours"):
        shown.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row['value']:g}"]
        for taken in (*(row["milliseconds"][mode] for mode in MODES), row["megabytes"]):
            cells += [f"{taken['static']:.0f}", *(f"{taken[way] / taken['static']:.2f}" for way in WAYS[1:])]
        shown.add_row(*cells)
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--axis", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: where others use the machine")
    parser.add_argument("--seconds", type=float, default=4, help="time for a point and mode, at least")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a point and mode, at least")
    parser.add_argument("--out", type=Path, help="JSON file; by default one in benchmarks/results for all axes")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.child:
        print(json.dumps({"bytes": peak_in_this_process(Point(**chosen.point), chosen.child)}))
        return
    whole = chosen.axis == list(AXES)
    out = results.destination("scaling", results.machine(1), chosen.out) if chosen.out or whole else None
    console, rows = Console(), []
    facts = {**results.machine(chosen.threads), "clock": chosen.clock}
    for axis in chosen.axis:
        for value in AXES[axis]:
            rows.append(measure(axis, value, chosen))
            if out:  # after every point: a long run that is broken off has measured something
                results.write(out, {"machine": facts, "rows": rows})
        console.print(table([row for row in rows if row["axis"] == axis], axis))


if __name__ == "__main__":
    main()
