"""The report of finished runs for detection, from what they left in their folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from kernelwarehouse.detection.data import CocoData
from kernelwarehouse.detection.drawing import draw_detections
from kernelwarehouse.detection.predict import TrainedDetector, open_detector
from kernelwarehouse.detection.training import DetectionSettings
from kernelwarehouse.errors import UnreadableImageError
from kernelwarehouse.report.page import Chart, Drawing, Page, Section, Table, write_page
from kernelwarehouse.report.pictures import data_uri
from kernelwarehouse.report.run import curves, reported, settings_table, spread, step_charts
from kernelwarehouse.training.run_folder import RunFolder

SHOWN = 8
"""Pictures with what was found in them."""

PRECISIONS = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "APs", "ap_medium": "APm", "ap_large": "APl"}
"""COCO's names of what an epoch's report has, of masks and of boxes."""

REPORTED = {
    "step": ("loss", "learning_rate", "tau", "images_per_second"),
    "epoch": (
        *(f"{kind}_{name}" for kind in ("mask", "box") for name in PRECISIONS),
        *("training_loss", "best", "tau", "unreadable"),
    ),
}
"""What the page shows of each kind of report."""


@dataclass(frozen=True)
class DetectionSummary:
    """What a report shows of one run."""

    name: str
    settings: DetectionSettings
    parameters: int
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    drawings: list[Drawing]

    @property
    def best(self) -> dict[str, Any]:
        """The epoch whose detector was kept in `best`."""
        return [epoch for epoch in self.epochs if epoch["best"]][-1]

    @property
    def images_per_second(self) -> float:
        return median(step["images_per_second"] for step in self.steps)


def summarise_detection(folder: RunFolder, data: CocoData) -> DetectionSummary:
    settings = folder.read_settings(DetectionSettings)
    steps, epochs = (reported(folder, kind, names) for kind, names in REPORTED.items())
    trained = open_detector(folder.path)
    parameters = sum(parameter.numel() for parameter in trained.network.parameters())
    drawings = [Drawing(name, data_uri(picture)) for name, picture in drawn_findings(trained, data, SHOWN)]
    return DetectionSummary(settings.model, settings, parameters, steps, epochs, drawings)


def drawn_findings(trained: TrainedDetector, data: CocoData, count: int) -> list[tuple[str, Image.Image]]:
    """Validation pictures from all over the set, with what the detector finds; unreadable ones are passed over."""
    drawn = []
    for number in spread(len(data.validation), count):
        try:
            pixels = data.validation.picture(number)
        except UnreadableImageError:
            continue
        name = Path(data.validation.pictures.name(number)).name
        drawn.append((name, draw_detections(pixels, trained.predict(pixels), trained.classes)))
    return drawn


def write_detection_report(folder: RunFolder, data: CocoData) -> Path:
    run = summarise_detection(folder, data)
    title = f"Mask R-CNN on {run.name}: mask AP {run.best['mask_ap']:.1%}"
    summary = f"{run.settings.data}, {run.settings.recipe.summary}"
    return write_page(detection_page(title, summary, [run]), folder.path / "report.html")


def detection_page(title: str, summary: str, runs: Sequence[DetectionSummary]) -> Page:
    """One page about runs on the same data, side by side."""
    sections = [
        Section(
            f"What {run.name} finds",
            "Validation pictures with the detections of the best network that are at least 50% sure.",
            drawings=run.drawings,
        )
        for run in runs
    ]
    charts = [
        Chart("Mask AP", "epoch", curves(runs, "epochs", "mask_ap"), percent=True),
        Chart("Mask AP50", "epoch", curves(runs, "epochs", "mask_ap50"), percent=True),
        Chart("Box AP", "epoch", curves(runs, "epochs", "box_ap"), percent=True),
        Chart("Training loss", "epoch", curves(runs, "steps", "loss")),
        *step_charts(runs),
    ]
    return Page(title, summary, result_table(runs), charts, sections, settings_table(runs))


def result_table(runs: Sequence[DetectionSummary]) -> Table:
    last = [run.epochs[-1] for run in runs]
    rows = [["parameters", *(f"{run.parameters:,}" for run in runs)]]
    for kind in ("mask", "box"):
        for name, shown in PRECISIONS.items():
            values = [run.best[f"{kind}_{name}"] for run in runs]
            rows.append([f"{kind} {shown}, best epoch", *("-" if value < 0 else f"{value:.1%}" for value in values)])
    rows += [
        ["mask AP, last epoch", *(f"{epoch['mask_ap']:.1%}" for epoch in last)],
        ["training loss, last epoch", *(f"{epoch['training_loss']:.4f}" for epoch in last)],
        ["tau at the end", *("-" if epoch["tau"] is None else f"{epoch['tau']:g}" for epoch in last)],
        ["epochs / steps", *(f"{len(run.epochs)} / {run.epochs[-1]['step']}" for run in runs)],
        ["images per second", *(f"{run.images_per_second:,.1f}" for run in runs)],
        ["unreadable images", *(str(epoch["unreadable"]) for epoch in last)],
    ]
    return Table(["", *(run.name for run in runs)], rows)
