"""The report of finished runs, from what they left in their folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

import numpy as np
from PIL import Image

from kernelwarehouse.data.images import DataSet
from kernelwarehouse.errors import TrainingError, UnreadableImageError
from kernelwarehouse.report.attention_maps import AttentionMap, attention_maps
from kernelwarehouse.report.page import Chart, HeatMap, Page, Prediction, Section, Series, Table, write_page
from kernelwarehouse.report.pictures import data_uri, signed_heat_map
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.predict import open_trained
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.settings import EngineSettings, RunSettings

SAMPLE_PREDICTIONS = 12
ATTENTION_IMAGES = 64

# What the page shows of each kind of report.
REPORTED = {
    "step": ("loss", "learning_rate", "tau", "images_per_second"),
    "epoch": ("top1", "top5", "loss", "training_loss", "best", "tau", "unreadable"),
}


@dataclass(frozen=True)
class RunSummary:
    """What a report shows of one run."""

    name: str
    settings: RunSettings
    parameters: int
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    predictions: list[Prediction]
    maps: list[AttentionMap]

    @property
    def best(self) -> dict[str, Any]:
        """The epoch whose network was kept in `best`."""
        return [epoch for epoch in self.epochs if epoch["best"]][-1]

    @property
    def images_per_second(self) -> float:
        return median(step["images_per_second"] for step in self.steps)

    @property
    def seconds_per_step(self) -> float:
        return self.settings.recipe.batch_size / self.images_per_second


def summarise_run(folder: RunFolder, data: DataSet) -> RunSummary:
    settings = folder.read_settings()
    steps, epochs = (reported(folder, kind, names) for kind, names in REPORTED.items())
    trained = open_trained(folder.path)
    images, truths = _some_images(data)
    shown = range(0, len(images), max(1, len(images) // SAMPLE_PREDICTIONS))[:SAMPLE_PREDICTIONS]
    guesses = trained.predict([images[i] for i in shown], top=3)
    return RunSummary(
        settings.model,
        settings,
        sum(parameter.numel() for parameter in trained.network.parameters()),
        steps,
        epochs,
        [Prediction(data_uri(images[i]), truths[i], guess) for i, guess in zip(shown, guesses, strict=True)],
        attention_maps(trained.network, trained.prepare(images)),
    )


def reported(folder: RunFolder, kind: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The reports of a kind, with all that a page shows of them."""
    lines = [line for line in read_metrics(folder.metrics_path) if line["kind"] == kind]
    for name in names:
        missing = [line["step"] for line in lines if name not in line]
        if missing or not lines:
            what = f"the {kind} report at step {missing[0]} has no {name}" if missing else f"it has no {kind} reports"
            raise TrainingError(
                f"{folder.metrics_path} is damaged or missing: {what}, and a report of the run needs it"
            )
    if kind == "epoch" and not any(line["best"] for line in lines):
        raise TrainingError(f"{folder.metrics_path} is damaged: no epoch in it is the best")
    return lines


def spread(count: int, wanted: int) -> list[int]:
    """So many numbers below `count`, from all over."""
    return sorted(set(np.linspace(0, count - 1, wanted).round().astype(int).tolist()))


def _some_images(data: DataSet) -> tuple[list[Image.Image], list[str]]:
    """Validation images from all over the set, with their classes; unreadable ones are passed over."""
    images, truths = [], []
    for number in spread(len(data.validation.labels), ATTENTION_IMAGES):
        try:
            images.append(data.validation.load(number))
        except UnreadableImageError:
            continue
        truths.append(data.classes[int(data.validation.labels[number])])
    return images, truths


def write_run_report(folder: RunFolder, data: DataSet) -> Path:
    run = summarise_run(folder, data)
    summary = f"{run.settings.data}, {run.settings.recipe.summary}"
    return write_page(
        runs_page(f"{run.name}: {run.best['top1']:.2%} top-1", summary, [run]), folder.path / "report.html"
    )


def runs_page(title: str, summary: str, runs: Sequence[RunSummary]) -> Page:
    """One page about runs on the same data, side by side."""
    sections = [
        Section(
            f"Sample predictions of {run.name}",
            "Validation images with the three likeliest classes, by the best network.",
            predictions=run.predictions,
        )
        for run in runs
    ]
    sections += [_map_section(run) for run in runs if run.maps]
    return Page(title, summary, result_table(runs), _charts(runs), sections, settings_table(runs))


def result_table(runs: Sequence[RunSummary]) -> Table:
    last = [run.epochs[-1] for run in runs]
    rows = [
        ["parameters", *(f"{run.parameters:,}" for run in runs)],
        ["top-1, best epoch", *(f"{run.best['top1']:.2%}" for run in runs)],
        ["top-1, last epoch", *(f"{epoch['top1']:.2%}" for epoch in last)],
        ["top-5, last epoch", *(f"{epoch['top5']:.2%}" for epoch in last)],
        ["validation loss, last epoch", *(f"{epoch['loss']:.4f}" for epoch in last)],
        ["training loss, last epoch", *(f"{epoch['training_loss']:.4f}" for epoch in last)],
        ["tau at the end", *("-" if epoch["tau"] is None else f"{epoch['tau']:g}" for epoch in last)],
        ["epochs / steps", *(f"{len(run.epochs)} / {run.epochs[-1]['step']}" for run in runs)],
        ["time per step", *(f"{run.seconds_per_step * 1000:,.0f} ms" for run in runs)],
        ["images per second", *(f"{run.images_per_second:,.0f}" for run in runs)],
        ["unreadable images", *(str(epoch["unreadable"]) for epoch in last)],
    ]
    return Table(["", *(run.name for run in runs)], rows)


class Curved(Protocol):
    """A run whose reports can be drawn over its epochs."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> EngineSettings: ...
    @property
    def steps(self) -> list[dict[str, Any]]: ...
    @property
    def epochs(self) -> list[dict[str, Any]]: ...


def curves(runs: Sequence[Curved], lines: Literal["steps", "epochs"], value: str) -> list[Series]:
    """A value of each run's step or epoch reports, over epochs."""
    return [
        Series(
            run.name,
            [
                (line["step"] * run.settings.recipe.epochs / run.epochs[-1]["step"], line[value])
                for line in getattr(run, lines)
                if line[value] is not None and isfinite(line[value])  # losses are not, if a network goes astray
            ],
        )
        for run in runs
    ]


def _charts(runs: Sequence[RunSummary]) -> list[Chart]:
    return [
        Chart("Validation accuracy, top-1", "epoch", curves(runs, "epochs", "top1"), percent=True),
        Chart("Training loss", "epoch", curves(runs, "steps", "loss")),
        Chart("Validation loss", "epoch", curves(runs, "epochs", "loss")),
        *step_charts(runs),
    ]


def step_charts(runs: Sequence[Curved]) -> list[Chart]:
    """What the steps of every task report."""
    return [
        Chart("Temperature tau", "epoch", curves(runs, "steps", "tau")),
        Chart("Learning rate", "epoch", curves(runs, "steps", "learning_rate")),
        Chart("Images per second", "epoch", curves(runs, "steps", "images_per_second")),
    ]


def _map_section(run: RunSummary) -> Section:
    return Section(
        f"Attention maps of {run.name}",
        f"How each layer mixes the cells of its warehouse: mean attention over {ATTENTION_IMAGES} validation images, "
        "one row a mixture, one column a cell. Red is positive, blue negative, white zero; each map is scaled to its "
        "own largest value. The spread is how far an attention strays from its mean from image to image.",
        heat_maps=[_heat_map(attention) for attention in run.maps],
    )


def _heat_map(attention: AttentionMap) -> HeatMap:
    mixtures, cells = attention.mean.shape
    limit = float(np.abs(attention.mean).max())
    note = f"warehouse {attention.warehouse}: {mixtures} x {cells}, up to {limit:.3f}, spread {attention.spread:.4f}"
    return HeatMap(attention.layer, note, data_uri(signed_heat_map(attention.mean, limit)))


def settings_table(runs: Sequence[Curved]) -> Table:
    def flat(settings: EngineSettings) -> dict[str, str]:
        values = settings.as_dict()
        recipe = {f"recipe: {name}": value for name, value in values["recipe"].items()}
        own = {name: value for name, value in values.items() if name not in ("recipe", "fingerprint")}
        return {name: str(value) for name, value in (own | recipe).items()}

    columns = [flat(run.settings) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table(["", *(run.name for run in runs)], rows)
