"""Runs of detectors that take seconds: a few small scenes and a very small backbone."""

from pathlib import Path
from typing import Any

from kernelwarehouse.detection.data import CocoData
from kernelwarehouse.detection.recipe import DetectionRecipe, load_schedule
from kernelwarehouse.detection.training import train_detector
from kernelwarehouse.training.run import RunOptions
from kernelwarehouse.training.run_folder import RunFolder

TINY_RESNET = {"channels": [8, 8, 16, 16], "layers": [1, 1, 1, 1]}
SCENES = {"images": 8, "validation_images": 3, "size": 48}
# Two steps an epoch, in two parts each where a run is asked to, with everything that is random or stateful.
CHANGES = {
    "epochs": 2,
    "batch_size": 4,
    "short_sides": [40, 48],
    "evaluation_side": 48,
    "longest_side": 64,
    "width": 8,
    "proposals": 20,
    "sampled_boxes": 8,
    "tau_epochs": 1.5,
    "ema_decay": 0.9,
}
OPTIONS = RunOptions(workers=0, report_every=1, checkpoint_seconds=0)


def tiny_recipe(**changes: Any) -> DetectionRecipe:
    return load_schedule("small").with_overrides(CHANGES | changes)


def train_tiny(
    data: CocoData,
    output: Path,
    backbone: str = "kw1x_resnet18",
    *,
    options: RunOptions = OPTIONS,
    recipe: DetectionRecipe | None = None,
    weights: Path | None = None,
) -> RunFolder:
    return train_detector(
        backbone,
        data,
        recipe or tiny_recipe(),
        output,
        options=options,
        arguments=TINY_RESNET,
        weights=weights,
        device="cpu",
    )
