"""Costs beside the paper's figures, as text, Markdown, CSV or JSON."""

import csv
import dataclasses
import io
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from kernelwarehouse import paper
from kernelwarehouse.compare.measure import Cost, Setting


@dataclass(frozen=True)
class Row:
    """One network: what it costs here, as parts of its backbone where that says more, and what the paper prints."""

    name: str
    backbone: str
    parameters: int
    parameters_ratio: float
    macs: int
    macs_ratio: float
    single_ms: float
    single_ratio: float
    batch_ms: float
    batch_ratio: float
    training_ms: float
    training_ratio: float
    memory_mb: float | None
    memory_ratio: float | None
    paper_params_millions: float | None
    paper_top1: dict[str, float]
    paper_fps_ratio: float | None
    paper_memory_ratio: float | None


def make_rows(costs: Sequence[Cost]) -> list[Row]:
    """The rows of networks whose backbones are among the costs."""
    backbones = {cost.name: cost for cost in costs if cost.name == cost.backbone}
    return [_row(cost, backbones[cost.backbone]) for cost in costs]


def _row(cost: Cost, static: Cost) -> Row:
    printed, printed_static = paper.published(cost.name), paper.published(static.name)

    def paper_ratio(figure: Callable[[paper.Published], float | None]) -> float | None:
        if printed is None or printed_static is None:
            return None
        return _ratio(figure(printed), figure(printed_static))

    memory = None if cost.training_memory is None else cost.training_memory / 2**20
    return Row(
        name=cost.name,
        backbone=cost.backbone,
        parameters=cost.parameters,
        parameters_ratio=cost.parameters / static.parameters,
        macs=cost.macs,
        macs_ratio=cost.macs / static.macs,
        single_ms=1000 * cost.times.single,
        single_ratio=cost.relative.single,
        batch_ms=1000 * cost.times.batch,
        batch_ratio=cost.relative.batch,
        training_ms=1000 * cost.times.training,
        training_ratio=cost.relative.training,
        memory_mb=memory,
        memory_ratio=_ratio(cost.training_memory, static.training_memory),
        paper_params_millions=printed.params_millions if printed else None,
        paper_top1=dict(printed.top1) if printed else {},
        paper_fps_ratio=paper_ratio(lambda figures: figures.fps),
        paper_memory_ratio=paper_ratio(lambda figures: figures.training_memory_mb),
    )


def _ratio(value: float | None, whole: float | None) -> float | None:
    return None if value is None or whole is None else value / whole


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def columns(rows: Sequence[Row], setting: Setting) -> dict[str, Callable[[Row], str]]:
    """Heading -> cell. The paper's accuracies get a column for each length of training that occurs."""
    batch = setting.batch_size
    found: dict[str, Callable[[Row], str]] = {
        "network": lambda row: row.name,
        "params (M)": lambda row: f"{row.parameters / 1e6:.2f}",
        "paper (M)": lambda row: _number(row.paper_params_millions),
        "MACs (G)": lambda row: f"{row.macs / 1e9:.2f}",
        "MACs": lambda row: _number(row.macs_ratio),
        "infer 1": lambda row: _number(row.single_ratio),
        f"infer {batch}": lambda row: _number(row.batch_ratio),
        f"train {batch}": lambda row: _number(row.training_ratio),
        "memory": lambda row: _number(row.memory_ratio),
    }
    for length in sorted({length for row in rows for length in row.paper_top1}):
        found[f"top-1, {length}"] = lambda row, length=length: _number(row.paper_top1.get(length))  # type: ignore[misc]
    if any(row.paper_fps_ratio is not None for row in rows):
        found["paper FPS"] = lambda row: _number(row.paper_fps_ratio)
        found["paper memory"] = lambda row: _number(row.paper_memory_ratio)
    return found


def legend(rows: Sequence[Row], setting: Setting) -> str:
    text = (
        f"{setting.image_size}x{setting.image_size} images, {setting.threads} thread(s), medians of {setting.rounds} "
        f"rounds in turn with the static backbone. MACs, times (infer: one image and {setting.batch_size}; train: one "
        f"step on {setting.batch_size}) and the peak memory of a training step are parts of the backbone's. 'paper' "
        "and 'top-1' are printed in the paper (ImageNet)."
    )
    if any(row.paper_fps_ratio is not None for row in rows):
        text += " So are FPS and memory, on its GPU, as parts of the backbone's."
    if setting.prepare:
        text += " Networks with warehouses are timed after `prepare_inference`."
    return text


def as_text(rows: Sequence[Row], setting: Setting, width: int) -> str:
    cells = columns(rows, setting)
    table = Table()
    for heading in cells:
        table.add_column(heading, justify="left" if heading == "network" else "right", no_wrap=heading == "network")
    for row in rows:
        table.add_row(*(cell(row) for cell in cells.values()), end_section=row.name == row.backbone)
    console = Console(width=width, color_system=None, force_terminal=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
        console.print(legend(rows, setting), highlight=False)
    return capture.get()


def as_markdown(rows: Sequence[Row], setting: Setting) -> str:
    cells = columns(rows, setting)
    lines = ["| " + " | ".join(cells) + " |", "|---|" + "---:|" * (len(cells) - 1)]
    lines += ["| " + " | ".join(cell(row) for cell in cells.values()) + " |" for row in rows]
    return "\n".join([*lines, "", legend(rows, setting), ""])


def as_csv(rows: Sequence[Row]) -> str:
    """Every figure, unrounded; accuracies in a column for each length of training."""
    lengths = sorted({length for row in rows for length in row.paper_top1})
    plain = [field.name for field in dataclasses.fields(Row) if field.name != "paper_top1"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*plain, *(f"paper_top1_{length.replace(' ', '_')}" for length in lengths)])
    for row in rows:
        values = [getattr(row, name) for name in plain] + [row.paper_top1.get(length) for length in lengths]
        writer.writerow(["" if value is None else value for value in values])
    return text.getvalue()


def as_json(rows: Sequence[Row], setting: Setting) -> str:
    machine = {"system": platform.platform(), "processor": platform.processor() or platform.machine()}
    content = {
        "setting": dataclasses.asdict(setting),
        "machine": {**machine, "python": platform.python_version(), "torch": torch.__version__},
        "networks": [dataclasses.asdict(row) for row in rows],
    }
    return json.dumps(content, indent=1) + "\n"
