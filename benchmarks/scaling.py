"""How time and memory grow with batch, budget and width, with one thread and two: ResNet18, static, plain and ours.

    python -m benchmarks.scaling             all of it: about half an hour on a machine that does nothing else
    python -m benchmarks.scaling --resume    goes on with a run that was broken off

One of the three is varied at a time, the others stay at batch 8, budget 1 and width 1; images are 112x112, as whole
networks of 224x224 would take hours. Every number of threads has a process of its own.

Static and ours take turns after two steps of each that are not counted. What is slow and for information is done once:
the plain definition is timed in one round (after one to warm up) and with the first number of threads only, and so is
memory, that of a training step, each way in a process of its own. The static network is not measured alone here, as
`benchmarks.speed` does.
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
from torch import nn

import kernelwarehouse as kw
from benchmarks import child, results, tables
from benchmarks.cases import MODES, WAYS, runner
from benchmarks.memory import process_memory
from benchmarks.speed import CLOCKS, take_turns
from kernelwarehouse.assemble.build import load_native

_CHANNELS = (64, 128, 256, 512)
THREADS = (1, 2)


@dataclass(frozen=True)
class Point:
    batch: int = 8
    budget: float = 1.0
    width: float = 1.0
    image: int = 112


AXES: dict[str, tuple[float, ...]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "budget": (0.5, 1, 2, 4),
    "width": (0.5, 1, 2),
}


def point_at(axis: str, value: float) -> Point:
    return replace(Point(), **{axis: int(value) if axis == "batch" else float(value)})


def static_network(point: Point) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet18", channels=tuple(int(point.width * channels) for channels in _CHANNELS))


def converted_network(point: Point) -> nn.Module:
    static = static_network(point)
    converted = kw.convert(static, kw.plan(static, kw.WarehouseConfig(budget=point.budget)))
    kw.set_temperature(converted, 0.0)
    return converted


def milliseconds(point: Point, mode: str, ways: Sequence[str], chosen: argparse.Namespace) -> dict[str, float]:
    static, converted = static_network(point), converted_network(point)
    models = {"static": static, "plain": converted, "ours": converted}
    runs = {way: runner(models[way], way, mode, point.batch, point.image) for way in ways}
    times = take_turns(runs, chosen.seconds, chosen.rounds, chosen.clock, plain_rounds=1)
    return {way: round(1e3 * statistics.median(times[way]), 2) for way in ways}


def peak_in_this_process(point: Point, way: str) -> int:
    """Bytes of training steps above what imports took: two steps, or one of the plain definition, as it is slow."""
    load_native()
    before = process_memory("VmRSS")
    model = static_network(point) if way == "static" else converted_network(point)
    run = runner(model, way, "training", point.batch, point.image)
    for _ in range(1 if way == "plain" else 2):
        run()
    return process_memory("VmHWM") - before


def megabytes(point: Point, way: str, threads: int) -> float:
    options = ["--child", way, "--point", json.dumps(asdict(point)), "--threads", str(threads)]
    return round(child.ask("scaling", options)["bytes"] / 1e6, 1)


def measure(point: Point, chosen: argparse.Namespace) -> dict[str, Any]:
    """Times and, unless the run is to be brief, those of the plain definition and memory."""
    (threads,) = chosen.threads
    ways = [way for way in WAYS if way in chosen.ways and not (chosen.brief and way == "plain")]
    return {
        "threads": threads,
        "point": asdict(point),
        "milliseconds": {mode: milliseconds(point, mode, ways, chosen) for mode in MODES},
        "megabytes": {} if chosen.brief else {way: megabytes(point, way, threads) for way in ways},
    }


def settings(facts: dict[str, Any], chosen: argparse.Namespace) -> dict[str, Any]:
    """What has to be equal for two runs to be one."""
    kept = ("processor", "cores", "vector instructions", "torch", "commit")
    how = {"ways": chosen.ways, "rounds": chosen.rounds, "seconds": chosen.seconds, "clock": chosen.clock}
    return {**{key: facts[key] for key in kept}, **how}


def measured_before(out: Path | None, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run that was broken off, to go on with."""
    if out is None or not out.exists():
        return []
    data = json.loads(out.read_text())
    there = data.get("settings", {})
    differences = [f"{key} {there.get(key)}, now {value}" for key, value in wanted.items() if there.get(key) != value]
    if differences:
        raise SystemExit(f"{out} cannot be resumed ({'; '.join(differences)}): run without --resume to replace it")
    return data["rows"]


def run_axes(out: Path | None, chosen: argparse.Namespace) -> None:
    """All points with one number of threads, added to what is in the file."""
    torch.set_num_threads(*chosen.threads)
    facts = {**results.machine(chosen.threads), "clock": chosen.clock}
    wanted = settings(facts, chosen)
    rows = measured_before(out, wanted) if chosen.resume else []
    facts["threads"] = list(dict.fromkeys([*(row["threads"] for row in rows), *chosen.threads]))
    console = Console()
    for axis in chosen.axis:
        for value in AXES[axis]:
            point = point_at(axis, value)
            same = [row for row in rows if row["point"] == asdict(point) and row["threads"] in chosen.threads]
            if any(row["axis"] == axis for row in same):
                continue
            found = same[0] if same else measure(point, chosen)  # the middle of all axes is measured once
            rows.append({**found, "axis": axis, "value": value})
            console.print(f"{axis} {value:g}: {found['milliseconds']} ms, {found['megabytes']} MB")
            if out:  # after every point: a long run that is broken off has measured something
                results.write(out, {"machine": facts, "settings": wanted, "rows": rows})
    taken = [row for row in rows if row["threads"] in chosen.threads]
    console.print(tables.scaling(taken).rich("ResNet18: static, then plain and ours relative to it"))


def run_threads(out: Path | None, chosen: argparse.Namespace) -> None:
    """Every number of threads in a process: what layers find out with one number is not to be used with another."""
    same = ["--axis", *chosen.axis, "--ways", *chosen.ways, "--clock", chosen.clock]
    same += ["--seconds", str(chosen.seconds), "--rounds", str(chosen.rounds), *(["--out", str(out)] if out else [])]
    for index, threads in enumerate(chosen.threads):
        options = ["--threads", str(threads), *(["--resume"] if chosen.resume or index else [])]
        options += ["--brief"] if index else []
        done = subprocess.run([sys.executable, "-m", "benchmarks.scaling", *same, *options], check=False)
        if done.returncode:
            raise SystemExit(done.returncode)


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axis", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--threads", nargs="+", type=int, default=list(THREADS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="static and ours have to be in it")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: where others use the machine")
    parser.add_argument("--seconds", type=float, default=1.5, help="time for a point and mode, at least")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a point and mode, at least")
    parser.add_argument("--brief", action="store_true", help="times of static and ours only")
    parser.add_argument("--resume", action="store_true", help="go on with the file's run: same commit and settings")
    parser.add_argument("--out", type=Path, help="JSON file; by default one in benchmarks/results for all axes")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = arguments_parser()
    chosen = parser.parse_args(arguments)
    if not {"static", "ours"} <= set(chosen.ways):
        parser.error(f"--ways {' '.join(chosen.ways)}: static and ours have to be among them")
    if chosen.child:
        torch.set_num_threads(*chosen.threads)
        print(json.dumps({"bytes": peak_in_this_process(Point(**chosen.point), chosen.child)}))
        return
    whole = chosen.axis == list(AXES)
    out = results.destination("scaling", results.machine(1), chosen.out) if chosen.out or whole else None
    (run_axes if len(chosen.threads) == 1 else run_threads)(out, chosen)


if __name__ == "__main__":
    main()
