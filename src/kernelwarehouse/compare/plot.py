"""One picture: the paper's accuracy and the measured cost, both against parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelwarehouse._extras import require
from kernelwarehouse.compare.files import check_writable, written_aside
from kernelwarehouse.compare.table import Row
from kernelwarehouse.errors import MeasurementError


def check_plot(path: Path) -> None:
    """Refuse what could not be drawn, before it is measured."""
    require("compare", "a plot")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise MeasurementError(f"plot {path} has no known format; its name must end in one of {', '.join(formats)}")
    check_writable(path)


def plot(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure  # an optional dependency
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    accuracy, cost = figure.subplots(1, 2)
    lengths = sorted({length for row in rows for length in row.paper_top1})
    for length, marker in zip(lengths, "os^D", strict=False):
        shown = [row for row in rows if length in row.paper_top1]
        _points(accuracy, shown, [row.paper_top1[length] for row in shown], marker, f"{length} of training")
    accuracy.set_ylabel("ImageNet top-1 in the paper (%)")
    _points(cost, rows, [row.training_ratio for row in rows], "o", "training step")
    _points(cost, rows, [row.single_ratio for row in rows], "^", "inference, one image")
    cost.set_ylabel("time here, static backbone = 1")
    for axes in (accuracy, cost):
        axes.set_xscale("log")
        axes.set_xlabel("parameters (millions)")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.margins(x=0.2)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
    with written_aside(path) as aside:
        figure.savefig(aside, dpi=120, format=path.suffix.removeprefix("."))


def _points(axes: Any, rows: Sequence[Row], values: Sequence[float], marker: str, label: str) -> None:
    """One marker a kind of value, one colour a family of networks. Names go left and right in turn, by height, so that
    networks of one size do not write over each other."""
    sizes = [row.parameters / 1e6 for row in rows]
    axes.scatter(sizes, values, marker=marker, c=[_colour(row) for row in rows], label=label, zorder=3)
    by_height = sorted(zip(sizes, values, rows, strict=True), key=lambda point: point[1])
    for number, (size, value, row) in enumerate(by_height):
        side = (6, "left") if number % 2 else (-6, "right")
        axes.annotate(
            short_name(row), (size, value), (side[0], -2.5), textcoords="offset points", ha=side[1], fontsize=7
        )


def _colour(row: Row) -> str:
    if row.name == row.backbone:
        return "black"
    return "tab:blue" if row.name.startswith("kw") else "tab:orange"


def short_name(row: Row) -> str:
    """The method alone: the backbone is on every label."""
    return "static" if row.name == row.backbone else row.name.split("_")[0]
