"""Tables and plots of docs/performance.md from benchmarks/results: `python scripts/plot_performance.py`.

The tables replace what is between the marks `<!-- name -->` and `<!-- /name -->`.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from kernelwarehouse._files import replacing, write_file

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "images"
WAYS = {"static": ("static", "0.45"), "plain": ("plain definition", "tab:red"), "ours": ("ours", "tab:blue")}


def read(name: str) -> dict[str, Any]:
    path = RESULTS / name
    if not path.exists():
        sys.exit(
            f"{path.relative_to(ROOT)} is missing; make it with python -m benchmarks.{name.split('-')[0].split('.')[0]}"
        )
    return json.loads(path.read_text())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine_table(results: dict[str, Any]) -> str:
    facts = [
        (key, json.dumps(value) if isinstance(value, list | dict) else str(value)) for key, value in results.items()
    ]
    return markdown(["machine", ""], facts)


def ratio_table(rows: Sequence[dict[str, Any]], unit: str) -> str:
    lines = []
    for row in rows:
        ratio, most = row["ratio"]["ours"], row["most"]
        target = "" if most is None else f"{most:.2f} {'met' if ratio <= most else '**missed**'}"
        published = "" if row["published"] is None else f"{row['published']:.2f}"
        taken = row[unit]
        lines.append(
            [row["name"], f"{taken['static']:.0f}", published, f"{row['ratio']['plain']:.2f}", f"{ratio:.2f}", target]
        )
    header = ["case", f"static ({unit})", "published code", "plain definition", "ours", "at most"]
    return markdown(header, lines)


def scaling_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        cells = [row["axis"], f"{row['value']:g}"]
        for taken in (row["milliseconds"]["inference"], row["milliseconds"]["training"], row["megabytes"]):
            cells += [f"{taken['static']:.0f}", *(f"{taken[way] / taken['static']:.2f}" for way in ("plain", "ours"))]
        lines.append(cells)
    header = ["", "", "inference ms", "plain", "ours", "training ms", "plain", "ours", "memory MB", "plain", "ours"]
    return markdown(header, lines)


def mixing_table(rows: Sequence[dict[str, Any]]) -> str:
    batches = sorted({row["batch"] for row in rows})
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        kernel = "x".join(map(str, row["kernel"]))
        facts = (
            row["preset"],
            row["layer"],
            kernel,
            f"{row['side']}x{row['side']}",
            str(row["cells"]),
            str(row["units"]),
        )
        ratio = f"{row['ratio']:.2f}"
        chosen = f"**{ratio}**" if row["chosen"] == "hidden" else ratio
        lines.setdefault(facts, {})[row["batch"]] = f"{chosen} ({row['usual']})"
    header = ["network", "layer", "kernel", "image", "n", "h + 1", *(f"batch {batch}" for batch in batches)]
    return markdown(header, [[*facts, *(found.get(batch, "") for batch in batches)] for facts, found in lines.items()])


def ratio_plot(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.2))
    for index, row in enumerate(reversed(rows)):
        axes.barh(index + 0.2, row["ratio"]["plain"], 0.38, color=WAYS["plain"][1])
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
            axes, picked = grid[down][across], [row for row in rows if row["axis"] == name]
            for way, (label, colour) in WAYS.items():
                values = [row["value"] for row in picked]
                axes.plot(values, [pick(row)[way] for row in picked], "o-", color=colour, label=label, markersize=3)
            axes.set_ylim(bottom=0)
            axes.set_xlabel(name)
            if across == 0:
                axes.set_ylabel(measure)
    grid[0][0].legend(fontsize=8)
    figure.tight_layout()
    return figure


def scaling_section() -> str:
    """The table and plot of what has been measured; a whole run takes long, so some of it may be missing."""
    path = RESULTS / "scaling.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    if not rows:
        return "No run has been committed; `python -m benchmarks.scaling` makes one."
    save(scaling_plot(rows), "performance-scaling.svg")
    return scaling_table(rows) + "\n\n![growth](images/performance-scaling.svg)"


def save(figure: Figure, name: str) -> None:
    PLOTS.mkdir(parents=True, exist_ok=True)
    with replacing(PLOTS / name) as aside:
        figure.savefig(aside, metadata={"Date": None})
    plt.close(figure)


def fill(page: str, name: str, content: str) -> str:
    mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not mark.search(page):
        sys.exit(f"{PAGE.relative_to(ROOT)} has no marks <!-- {name} --> and <!-- /{name} -->")
    return mark.sub(lambda found: found[1] + content + "\n" + found[2], page)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "kernelwarehouse"
    speed, memory = read("speed-1.json"), read("memory.json")
    page = PAGE.read_text()
    page = fill(page, "machine", machine_table(speed["machine"]))
    page = fill(page, "speed", ratio_table(speed["rows"], "milliseconds"))
    page = fill(page, "memory", ratio_table(memory["rows"], "megabytes"))
    page = fill(page, "scaling", scaling_section())
    page = fill(page, "mixing", mixing_table(read("mixing.json")["rows"]))
    save(ratio_plot(speed["rows"], "time relative to the static network"), "performance-speed.svg")
    save(ratio_plot(memory["rows"], "peak memory relative to the static network"), "performance-memory.svg")
    write_file(PAGE, page)


if __name__ == "__main__":
    main()
