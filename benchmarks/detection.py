"""Time and memory of a training step of Mask R-CNN, with warehouses in the backbone and without.

All detectors take turns in one process for the times, and each has a process of its own for the memory. A step is
forward, losses, backward and SGD with momentum, on two images with four objects each, both of 320 x 320, and once more
where one is lower and one narrower than that, so that the batch is padded. Backbones are at temperature 0 and frozen as
in fine-tuning: the stem, the first stage and the batch norms.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import child, results
from benchmarks.memory import process_memory
from benchmarks.speed import CLOCKS, interleave
from benchmarks.tables import Figures, detection
from kernelwarehouse.assemble.build import load_native
from kernelwarehouse.detection.detector import build_detector
from kernelwarehouse.temperature import HasTemperature, set_temperature
from kernelwarehouse.zoo import find_preset

PRESETS = ("kw1x_resnet50", "kw4x_resnet50")
CLASSES = 80
OBJECTS = 4
MOST_TIME, MOST_MEMORY = 1.3, 1.1
"""The targets, relative to the static backbone."""
SHAPES = {"square": ((1.0, 1.0),), "padded": ((0.94, 1.0), (1.0, 0.9))}
"""Height and width of the images of a batch, in turn, as parts of the side."""


def scene(height: int, width: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Noise, and objects that are rectangles of random places and sizes."""
    image = torch.rand(3, height, width, generator=generator)
    side = min(height, width)
    corners = torch.rand(OBJECTS, 2, generator=generator) * side / 2
    sizes = (0.1 + torch.rand(OBJECTS, 2, generator=generator) * 0.4) * side
    boxes = torch.cat([corners, corners + sizes], 1).round()
    masks = torch.zeros(OBJECTS, height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    labels = torch.randint(1, CLASSES + 1, (OBJECTS,), generator=generator)
    return image, {"boxes": boxes, "labels": labels, "masks": masks}


def runner(backbone: str, side: int, batch: int, shapes: str) -> Callable[[], None]:
    """A function that does one step of a new detector, always on the same images."""
    torch.manual_seed(0)
    sizes = ((side,), side)
    detector = build_detector(backbone, CLASSES, frozen_stages=1, norms="frozen", sizes=sizes).train()
    if any(isinstance(module, HasTemperature) for module in detector.modules()):
        set_temperature(detector, 0.0)
    generator = torch.Generator().manual_seed(0)
    parts = [SHAPES[shapes][number % len(SHAPES[shapes])] for number in range(batch)]
    scenes = [scene(round(high * side), round(wide * side), generator) for high, wide in parts]
    images, targets = zip(*scenes, strict=True)
    # A rate of 0 costs what any other does, and leaves the network as it is.
    trained = [parameter for parameter in detector.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9)

    def run() -> None:
        torch.manual_seed(1)  # which proposals are sampled
        optimizer.zero_grad(set_to_none=True)
        sum(detector(images, targets).values()).backward()
        optimizer.step()

    return run


def peak_in_this_process(backbone: str, side: int, batch: int, shapes: str, steps: int) -> int:
    """Bytes: the most this process has held during the steps, without what it held before the detector was made."""
    load_native()
    before = process_memory("VmRSS")
    run = runner(backbone, side, batch, shapes)
    for _ in range(steps):
        run()
    return process_memory("VmHWM") - before


def measure(presets: Sequence[str], shapes: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every preset, all of them on one static backbone."""
    static = find_preset(presets[0]).backbone
    others = [preset for preset in presets if find_preset(preset).backbone != static]
    if others:
        raise SystemExit(f"{others[0]} is not on {static}, as {presets[0]} is; measure one backbone at a time")
    options = ["--image", str(chosen.image), "--batch", str(chosen.batch), "--threads", str(chosen.threads)]
    options += ["--steps", str(chosen.steps), "--shapes", shapes]
    backbones = [static, *presets]
    peaks = {}
    for name in backbones:  # told at once: a run that is broken off has measured something
        peaks[name] = int(child.ask("detection", ["--child", name, *options])["bytes"])
        Console().print(f"{name}, {shapes}: {peaks[name] / 1e6:.0f} MB")
    runs = {name: runner(name, chosen.image, chosen.batch, shapes) for name in backbones}
    times = interleave(runs, chosen.seconds, chosen.rounds, chosen.clock)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return [
        {
            "name": f"{preset}, batch {chosen.batch} at {chosen.image}x{chosen.image}, {shapes}",
            "preset": preset,
            "batch": chosen.batch,
            "image": chosen.image,
            "rounds": len(times[preset]),
            "milliseconds": {"static": round(1e3 * medians[static], 1), "ours": round(1e3 * medians[preset], 1)},
            "megabytes": {"static": round(peaks[static] / 1e6, 1), "ours": round(peaks[preset] / 1e6, 1)},
            "time ratio": round(medians[preset] / medians[static], 3),
            "memory ratio": round(peaks[preset] / peaks[static], 3),
            "most": {"time": MOST_TIME, "memory": MOST_MEMORY},
        }
        for preset in presets
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detection", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", nargs="+", default=list(PRESETS), help="presets on one backbone")
    parser.add_argument("--image", type=int, default=320, help="side of the images")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: where others use the machine")
    parser.add_argument("--seconds", type=float, default=60, help="time for all rounds, at least")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, at least")
    parser.add_argument("--steps", type=int, default=3, help="steps that the peak of memory is taken over")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, help="JSON file; by default one in benchmarks/results for the default presets"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.child:
        [shapes] = chosen.shapes
        peak = peak_in_this_process(chosen.child, chosen.image, chosen.batch, shapes, chosen.steps)
        print(json.dumps({"bytes": peak}))
        return
    facts = {**results.machine(chosen.threads), "clock": chosen.clock}
    usual = all(getattr(chosen, name) == parser.get_default(name) for name in ("preset", "image", "batch", "shapes"))
    out = results.destination(f"detection-{chosen.threads}", facts, chosen.out) if chosen.out or usual else None
    rows = [row for shapes in chosen.shapes for row in measure(chosen.preset, shapes, chosen)]
    if out:
        results.write(out, {"machine": facts, "rows": rows})
    table: Figures = detection(rows)
    Console().print(table.rich(f"a training step relative to the static backbone, {chosen.threads} thread(s)"))


if __name__ == "__main__":
    main()
