"""Figures of results as tables: for the terminal and, the same ones, for the documentation."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Row = dict[str, Any]
MODES = ("inference", "training")


@dataclass(frozen=True)
class Figures:
    """A table of texts. `**text**` stands out, as in Markdown."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def rich(self, title: str) -> Table:
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(self.header):
            table.add_column(column, justify="right" if index else "left")
        for line in self.lines:
            table.add_row(*(re.sub(r"\*\*(.*?)\*\*", r"[bold]\1[/]", cell) for cell in line))
        return table


def verdict(ratio: float, most: float | None) -> str:
    if most is None:
        return "no target"
    return f"{most:.2f} {'met' if ratio <= most else '**missed**'}"


def ratios(rows: Sequence[Row], unit: str) -> Figures:
    """Static in the unit, plain and ours relative to it, and whether the target is met."""
    lines = []
    for row in rows:
        found = {way: f"{ratio:.2f}" for way, ratio in row["ratio"].items()}
        published = f"{row['published']:.2f}" if row["published"] else ""
        static, target = row[unit]["static"], verdict(row["ratio"]["ours"], row["most"])
        lines.append([row["name"], f"{static:.0f}", published, found.get("plain", ""), found["ours"], target])
    return Figures(["case", f"static ({unit})", "published code", "plain definition", "ours", "at most"], lines)


def scaling(rows: Sequence[Row]) -> Figures:
    """Static, and plain and ours relative to it, for every point; what was not measured is left out."""
    lines = []
    for row in rows:
        cells = [row["axis"], f"{row['value']:g}", str(row["threads"])]
        for taken in (*(row["milliseconds"][mode] for mode in MODES), row["megabytes"]):
            cells.append(f"{taken['static']:.0f}" if taken else "")
            cells += [f"{taken[way] / taken['static']:.2f}" if way in taken else "" for way in ("plain", "ours")]
        lines.append(cells)
    measures = ("inference ms", "training ms", "memory MB")
    return Figures(["", "", "threads", *(column for name in measures for column in (name, "plain", "ours"))], lines)


def mixing(rows: Sequence[Row]) -> Figures:
    """Strategy hidden relative to the usual one; layers down, batches across."""
    batches = sorted({row["batch"] for row in rows})
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        kernel, side = "x".join(map(str, row["kernel"])), f"{row['side']}x{row['side']}"
        facts = (row["preset"], row["layer"], kernel, side, str(row["cells"]), str(row["units"]), row["mode"])
        ratio = f"{row['ratio']:.2f}"
        chosen = f"**{ratio}**" if row["chosen"] == "hidden" else ratio
        lines.setdefault(facts, {})[row["batch"]] = f"{chosen} ({row['usual']})"
    header = ["network", "layer", "kernel", "image", "n", "h + 1", "mode", *(f"batch {batch}" for batch in batches)]
    return Figures(header, [[*facts, *(found.get(batch, "") for batch in batches)] for facts, found in lines.items()])


def loader(rows: Sequence[Row]) -> Figures:
    """Images per second; data down, worker processes across."""
    workers = sorted({row["workers"] for row in rows})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        lines.setdefault((row["data"], row["recipe"]), {})[row["workers"]] = f"{row['images_per_second']:,.0f}"
    header = ["images", "recipe", *(f"workers: {count}" for count in workers)]
    return Figures(header, [[*facts, *(found.get(count, "") for count in workers)] for facts, found in lines.items()])


def training_loop(rows: Sequence[Row]) -> Figures:
    lines = []
    for row in rows:
        speeds = [f"{row[way]:,.0f}" for way in ("bare images/s", "loop images/s")]
        shares = [f"{row[share]:.0%}" for share in ("share", "share of CPU time")]
        lines.append([row["network"], *speeds, *shares])
    return Figures(["network", "bare images/s", "loop images/s", "kept, on the clock", "kept, CPU time"], lines)


def detection(rows: Sequence[Row]) -> Figures:
    """Time and memory of a detector's step beside those with the static backbone, and whether targets are met."""
    lines = []
    for row in rows:
        cells = [row["name"]]
        for unit, ratio, target in (("milliseconds", "time ratio", "time"), ("megabytes", "memory ratio", "memory")):
            cells += [f"{row[unit]['static']:.0f}", f"{row[ratio]:.2f}", verdict(row[ratio], row["most"][target])]
        lines.append(cells)
    return Figures(["backbone", "static (ms)", "time", "at most", "static (MB)", "memory", "at most"], lines)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of layers, and sums over layers, of the choice of strategies against the best there is."""
    layers = sum(row["count"] for row in rows)
    chosen, best = (sum(row["count"] * row[f"{which} ms"] for row in rows) for which in ("chosen", "best"))
    return {
        "layers": layers,
        "within 10%": round(sum(row["count"] for row in rows if row["ratio"] <= 1.1) / layers, 3),
        "worst": max(row["ratio"] for row in rows),
        "sum": round(chosen / best, 3),
    }


def routing(rows: Sequence[Row]) -> Figures:
    """A line for every network, mode and batch, and one for all."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["network"], row["mode"], str(row["batch"])), []).append(row)
    groups["all", "", ""] = list(rows)
    lines = []
    for names, some in groups.items():
        facts, ways = summary(some), Counter[str]()
        for row in some:
            ways.update({"/".join(dict.fromkeys(filter(None, row["chosen"]))): row["count"]})
        taken = ", ".join(f"{way} {count}" for way, count in ways.most_common())
        within = f"{facts['within 10%']:.1%}"
        lines.append([*names, str(facts["layers"]), within, f"{facts['worst']:.2f}", f"{facts['sum']:.3f}", taken])
    return Figures(["network", "mode", "batch", "layers", "within 10%", "worst", "sum of times", "chosen"], lines)


# By the first word of a result's name, which is its benchmark.
TABLES: dict[str, Callable[[Sequence[Row]], Figures]] = {
    "speed": lambda rows: ratios(rows, "milliseconds"),
    "memory": lambda rows: ratios(rows, "megabytes"),
    "scaling": scaling,
    "mixing": mixing,
    "routing": routing,
    "loader": loader,
    "training_loop": training_loop,
    "detection": detection,
}


def caption(machine: dict[str, Any]) -> str:
    """One sentence on what the figures below it were measured on."""
    threads = machine["threads"] if isinstance(machine["threads"], list) else [machine["threads"]]
    parts = [
        f"**{machine['processor']}, {machine['vector instructions']}**",
        f"{machine['cores']} cores",
        f"{' and '.join(map(str, threads))} {'thread' if threads == [1] else 'threads'}",
        f"load {machine['load when started'][0]:.2f} when started",
        f"commit {machine['commit']}",
        machine["date"].split("T")[0],
        f"torch {machine['torch']}",
        f"{machine.get('clock', 'wall')} clock",
    ]
    if machine.get("stolen") is not None:
        parts.append(f"{machine['stolen']:.1%} of the processor's time taken by other machines")
    if machine.get("told"):
        parts.append("told " + " ".join(f"{name}={value}" for name, value in machine["told"].items()))
    if machine["allocator"] != "default":
        parts.append(f"allocator {machine['allocator']}")
    if not machine["compiled kernels"]:
        parts.append("no compiled kernels")
    return ", ".join(parts) + "."
