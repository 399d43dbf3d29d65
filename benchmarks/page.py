"""Tables and plots of the documentation from benchmarks/results: `python -m benchmarks.page`.

The tables of all machines replace what is between the marks `<!-- name -->` and `<!-- /name -->` of a page.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import Result, committed
from kernelwarehouse._files import replacing, write_file

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
WAYS = {"static": ("static", "0.45"), "plain": ("plain definition", "tab:red"), "ours": ("ours", "tab:blue")}
# A page's marks, and the names of the results that stand there.
PAGES = {
    "performance.md": {
        "speed": r"speed-\d+",
        "memory": "memory",
        "scaling": "scaling",
        "mixing": "mixing",
        "routing": r"routing-\d+",
    },
    "training.md": {"training_loop": "training_loop", "loader": "loader"},
    "detection.md": {"detection": r"detection-\d+"},
}


def ratio_plot(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.2))
    for index, row in enumerate(reversed(rows)):
        axes.barh(index + 0.2, row["ratio"].get("plain", 0), 0.38, color=WAYS["plain"][1])
        axes.barh(index - 0.2, row["ratio"]["ours"], 0.38, color=WAYS["ours"][1])
        if row["most"]:
            axes.plot([row["most"]] * 2, [index - 0.42, index + 0.02], color="black", linewidth=2)
    axes.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)], fontsize=8)
    axes.axvline(1, color=WAYS["static"][1], linestyle="--", linewidth=1)
    axes.set_xlabel(title)
    handles = [plt.Rectangle((0, 0), 1, 1, color=WAYS[way][1]) for way in ("plain", "ours")]
    axes.legend(
        [*handles, plt.Line2D([], [], color="black")], [WAYS["plain"][0], WAYS["ours"][0], "target"], fontsize=8
    )
    figure.tight_layout()
    return figure


def scaling_lines(axes: Axes, rows: Sequence[dict[str, Any]], pick: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A line for each way and number of threads; the first number is drawn whole, others dashed."""
    threads = list(dict.fromkeys(row["threads"] for row in rows))
    for way, (label, colour) in WAYS.items():
        for count in threads:
            found = [(row["value"], pick(row)[way]) for row in rows if row["threads"] == count and way in pick(row)]
            if found:
                style, name = ("o-", label) if count == threads[0] else ("o--", f"{label}, {count} threads")
                axes.plot(*zip(*found, strict=True), style, color=colour, label=name, markersize=3)


def scaling_plot(rows: Sequence[dict[str, Any]]) -> Figure:
    measures = {
        "inference (ms)": lambda row: row["milliseconds"]["inference"],
        "training step (ms)": lambda row: row["milliseconds"]["training"],
        "training memory (MB)": lambda row: row["megabytes"],
    }
    names = list(dict.fromkeys(row["axis"] for row in rows))
    figure, grid = plt.subplots(len(measures), len(names), figsize=(10, 7.5), squeeze=False)
    for down, (measure, pick) in enumerate(measures.items()):
        for across, name in enumerate(names):
            axes = grid[down][across]
            scaling_lines(axes, [row for row in rows if row["axis"] == name], pick)
            axes.set_ylim(bottom=0)
            axes.set_xlabel(name)
            if across == 0:
                axes.set_ylabel(measure)
    grid[0][0].legend(fontsize=8)
    figure.tight_layout()
    return figure


PLOTS: dict[str, Callable[[Sequence[dict[str, Any]]], Figure]] = {
    "speed": lambda rows: ratio_plot(rows, "time relative to the static network"),
    "memory": lambda rows: ratio_plot(rows, "peak memory relative to the static network"),
    "scaling": scaling_plot,
}


def save(figure: Figure, name: str) -> str:
    """Draw into docs/images; returns how a page refers to it."""
    images = DOCS / "images"
    images.mkdir(parents=True, exist_ok=True)
    with replacing(images / name) as aside:
        figure.savefig(aside, metadata={"Date": None})
    plt.close(figure)
    return f"images/{name}"


def sections(mark: str, found: Sequence[Result]) -> Iterator[str]:
    """The tables of a mark, each with its plot if it has one."""
    if not found:
        yield f"No run has been committed; `python -m benchmarks.{mark}` makes one."
    for result in found:
        yield result.markdown()
        if mark in PLOTS:
            yield f"![{mark}]({save(PLOTS[mark](result.rows), f'performance-{result.path.stem}.svg')})"


def fill(page: str, name: str, content: str) -> str:
    mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not mark.search(page):
        sys.exit(f"the page has no marks <!-- {name} --> and <!-- /{name} -->")
    return mark.sub(lambda found: found[1] + content + "\n" + found[2], page)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "kernelwarehouse"
    results = list(committed())
    for name, marks in PAGES.items():
        page = (DOCS / name).read_text()
        for mark, pattern in marks.items():
            found = [result for result in results if re.fullmatch(pattern, result.name)]
            page = fill(page, mark, "\n\n".join(sections(mark, found)))
        write_file(DOCS / name, page)


if __name__ == "__main__":
    main()
