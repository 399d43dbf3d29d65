"""The results of a study as a picture: every seed, the mean and its interval, a line for each method; or, of a study
that only tries settings, accuracy against the learning rate."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernelwarehouse.compare.files import written_aside
from kernelwarehouse.errors import StudyError
from kernelwarehouse.study.spec import Study
from kernelwarehouse.study.table import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(study: Study, rows: Sequence[Row], path: Path) -> None:
    """To be checked by `kernelwarehouse.compare.plot.check_plot` first."""
    figure = _tests(study, rows, path) if study.tests else _trials(study, rows, path)
    with written_aside(path) as aside:
        figure.savefig(aside, dpi=120, format=path.suffix.removeprefix("."))


def _tests(study: Study, rows: Sequence[Row], path: Path) -> "Figure":
    from matplotlib.figure import Figure  # an optional dependency

    shown = [(row, row.accuracy) for row in rows if row.accuracy is not None]
    if not shown:
        raise StudyError(f"there is nothing to draw in {path}: no network of the study was tested yet")
    figure = Figure(figsize=(8, 1.4 + 0.42 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, (row, estimate) in enumerate(reversed(shown)):
        colour = "black" if row.method.name == study.baseline else "tab:blue"
        axes.plot(list(row.tested.values()), [place] * len(row.tested), "o", color=colour, alpha=0.35, markersize=4)
        axes.errorbar(
            estimate.mean, place, xerr=estimate.interval, fmt="D", color=colour, markersize=6, capsize=4, elinewidth=1.2
        )
        if row.method.name == study.baseline:
            axes.axvline(estimate.mean, color="0.6", linestyle="--", linewidth=1, zorder=0)
    axes.set_yticks(range(len(shown)), [row.method.name for row, _ in reversed(shown)])
    axes.set_xlabel("test accuracy (%): seeds, mean and 95% interval")
    axes.set_title(study.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    return figure


def _trials(study: Study, rows: Sequence[Row], path: Path) -> "Figure":
    """At every rate the best decay. Trials that diverged have no point."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    if not any(row.trials for row in rows):
        raise StudyError(f"there is nothing to draw in {path}: no trial of the study was run yet")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        best: dict[float, float] = {}
        for (rate, _), accuracy in row.trials.items():
            if accuracy is not None:
                best[rate] = max(accuracy, best.get(rate, accuracy))
        if not best:
            continue
        colour = "black" if row.method.name == study.baseline else None
        axes.plot(sorted(best), [best[rate] for rate in sorted(best)], "o-", color=colour, label=row.method.name)
    rates = study.tuning.learning_rates
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate")
    axes.set_ylabel("accuracy on images kept apart (%)")
    axes.set_title(study.title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
