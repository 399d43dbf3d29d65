"""One picture: the paper's accuracy and the measured cost, both against parameters."""

from collections.abc import Sequence
from pathlib import Path

from kernelwarehouse.compare.files import check_writable, written_aside
from kernelwarehouse.compare.table import Row
from kernelwarehouse.errors import MeasurementError


def check_plot(path: Path) -> None:
    """Refuse what could not be drawn, before it is measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = "pip install 'kernelwarehouse[plots]'"
        raise MeasurementError(f"a plot needs matplotlib; install it with: {hint}") from None
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise MeasurementError(f"plot {path} has no known format; its name must end in one of {', '.join(formats)}")
    check_writable(path)


def plot(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    accuracy, cost = figure.subplots(1, 2)
    lengths = sorted({length for row in rows for length in row.paper_top1})
    for length, marker in zip(lengths, "os^D", strict=False):
        shown = [row for row in rows if length in row.paper_top1]
        accuracy.scatter(
            [row.parameters / 1e6 for row in shown],
            [row.paper_top1[length] for row in shown],
            marker=marker,
            label=f"{length} (paper)",
        )
        for row in shown:
            accuracy.annotate(
                short_name(row),
                (row.parameters / 1e6, row.paper_top1[length]),
                fontsize=7,
                xytext=(3, 3),
                textcoords="offset points",
            )
    accuracy.set_ylabel("ImageNet top-1 of the paper (%)")
    for label, marker, values in (
        ("training step", "o", [row.training_ratio for row in rows]),
        ("inference, one image", "^", [row.single_ratio for row in rows]),
    ):
        cost.scatter([row.parameters / 1e6 for row in rows], values, marker=marker, label=label)
    for row in rows:
        cost.annotate(
            short_name(row),
            (row.parameters / 1e6, row.training_ratio),
            fontsize=7,
            xytext=(3, 3),
            textcoords="offset points",
        )
    cost.set_ylabel("time, as part of the static backbone's")
    for axes in (accuracy, cost):
        axes.set_xscale("log")
        axes.set_xlabel("parameters (millions)")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    with written_aside(path) as aside:
        figure.savefig(aside, dpi=150, format=path.suffix.removeprefix("."))


def short_name(row: Row) -> str:
    """The method alone: the backbone is on every label."""
    return "static" if row.name == row.backbone else row.name.split("_")[0]
