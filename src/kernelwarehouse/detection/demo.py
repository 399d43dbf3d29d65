"""`kernelwarehouse detect demo`: a small detector and its KernelWarehouse twin learn to find and outline garments."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kernelwarehouse._extras import require
from kernelwarehouse._files import replacing
from kernelwarehouse._terminal import console
from kernelwarehouse.detection.data import CocoData, open_coco
from kernelwarehouse.detection.drawing import contact_sheet, draw_detections
from kernelwarehouse.detection.predict import open_detector
from kernelwarehouse.detection.recipe import DetectionRecipe, load_schedule
from kernelwarehouse.detection.report import detection_page, result_table, summarise_detection, write_detection_report
from kernelwarehouse.detection.scenes import make_scenes
from kernelwarehouse.detection.training import train_detector
from kernelwarehouse.report.page import write_page
from kernelwarehouse.report.run import spread
from kernelwarehouse.training.run import RunOptions

DEMO_FOLDER = Path("runs/detect-demo")
SCENES = {"images": 400, "validation_images": 100, "size": 96}
STATIC, TWIN = "resnet18", "kw1x_resnet18"
BACKBONE = {"channels": [16, 32, 64, 128], "layers": [1, 1, 1, 1]}
"""ResNet18 with a quarter of its channels and half of its blocks."""
START = {"begin": "logits"}
"""Of the twin: attentions that begin at random lose some epochs, which a short run does not make up for."""
OPTIONS = RunOptions(seed=0, workers=1, report_every=25)
PICTURED = 8
LEAST_SCORE = 0.2
"""Of what is drawn: after so short a training, detectors are not sure of much."""


def run_demo(
    output: Path,
    scenes: dict[str, int] = SCENES,
    changes: dict[str, Any] | None = None,
    backbone: dict[str, Any] = BACKBONE,
) -> int:
    """Make scenes, train both detectors, and show what they have learnt; started again, it goes on where it was.

    Arguments:
        output: the folder for scenes, runs, the picture and the report.
        scenes: how many of which size.
        changes: to the recipe for small pictures.
        backbone: arguments of both backbones; the twin begins at its logits besides.
    """
    require("detection", "the demonstration of detectors")
    # The other half of the cores is for the process that reads scenes: more threads than cores slow each other down.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    began = time.monotonic()
    out = console()
    recipe = load_schedule("small").with_overrides(changes or {})
    data = _scenes(output / "scenes", scenes)
    side = scenes["size"]
    out.print(
        f"Generated scenes of {side}x{side}: {scenes['images']:,} to train, {len(data.validation):,} to validate, "
        f"{len(data.classes)} kinds of garments."
    )
    summaries = []
    for name in (STATIC, TWIN):
        out.print(f"\nTraining Mask R-CNN on a small {name} (in {output / name}; the same command again resumes it):")
        made_with = backbone | (START if name == TWIN else {})
        folder = train_detector(name, data, recipe, output / name, options=OPTIONS, arguments=made_with)
        write_detection_report(folder, data)
        summaries.append(summarise_detection(folder, data))
    title = f"Mask R-CNN on {STATIC} and its KernelWarehouse twin"
    about = f"{recipe.epochs} epochs on generated scenes, the same recipe, seed and order of scenes for both."
    report = write_page(detection_page(title, about, summaries), output / "report.html")
    picture = write_picture(data, recipe, output)
    result = result_table(summaries)
    table = Table(title=title)
    for number, name in enumerate(result.columns):
        table.add_column(name, justify="right" if number else "left")
    for row in result.rows:
        table.add_row(*row)
    out.print("", table)
    shown = ", ".join(f"{run.best['mask_ap50']:.1%} ({run.name})" for run in summaries)
    out.print(f"Mask AP50: {shown}", soft_wrap=True)
    out.print(f"What was found, beside the truth: {picture.resolve()}", soft_wrap=True)
    out.print(f"Report with curves: {report.resolve()}", soft_wrap=True)
    out.print(f"{time.monotonic() - began:.0f} seconds in all.")
    return 0


def _scenes(folder: Path, scenes: dict[str, int]) -> CocoData:
    if not (folder / "val.json").exists():
        make_scenes(folder, **scenes)
    return open_coco(folder)


def write_picture(data: CocoData, recipe: DetectionRecipe, output: Path) -> Path:
    """Validation scenes, a row each for the truth, the static detector and its twin."""
    numbers = spread(len(data.validation), PICTURED)
    images = [data.validation.picture(number) for number in numbers]
    side = 2 * recipe.evaluation_side
    rows = [
        draw_detections(image, data.validation.target(number), data.classes, least_side=side)
        for image, number in zip(images, numbers, strict=True)
    ]
    for name in (STATIC, TWIN):
        trained = open_detector(output / name)
        rows += [
            draw_detections(image, trained.predict(image), trained.classes, threshold=LEAST_SCORE, least_side=side)
            for image in images
        ]
    path = output / "predictions.png"
    with replacing(path) as aside:
        contact_sheet(rows, columns=len(numbers)).save(aside)
    return path
