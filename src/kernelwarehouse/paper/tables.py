"""Reading the tables: typed rows, checked on the way in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from kernelwarehouse.errors import KernelWarehouseError

_DETECTION_METRICS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
METRICS = frozenset(
    ["params_millions", "top1", "top1_gain", "top5", "top5_gain", "fps", "training_memory_mb", "inference_memory_mb"]
    + [f"{kind}_{name}" for kind in ("box", "mask") for name in _DETECTION_METRICS]
)


@dataclass(frozen=True)
class Result:
    """One measured row. `setting` names the variant in an ablation, `detector` is set for detection only."""

    table: str
    backbone: str
    method: str | None
    budget: Fraction | None
    setting: str | None
    detector: str | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CellCounts:
    """The numbers of mixtures and cells of a network's warehouses, in order."""

    table: str
    backbone: str
    budget: Fraction
    m: tuple[int, ...]
    n: tuple[int, ...]


@dataclass(frozen=True)
class StageLayer:
    """A ResNet18 layer (`k x k x in x out`), with its stage and cell as the network has it and as reassigned."""

    table: str
    kernel: tuple[int, ...]
    original_stage: int
    original_cell: tuple[int, ...]
    reassigned_stage: int
    reassigned_cell: tuple[int, ...]


@cache
def _tables() -> Mapping[str, list[dict[str, Any]]]:
    files = (file for file in resources.files("kernelwarehouse.paper").iterdir() if file.name.endswith(".json"))
    tables = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return MappingProxyType({table["label"]: table["rows"] for table in sorted(tables, key=lambda t: str(t["label"]))})


def table_labels() -> list[str]:
    return list(_tables())


def _result(row: Mapping[str, Any]) -> Result:
    known = {"table", "backbone", "method", "budget", "setting", "detector"}
    metrics = {key: float(value) for key, value in row.items() if key not in known}
    if unknown := sorted(metrics.keys() - METRICS):
        raise KernelWarehouseError(f"unknown columns {unknown} in a row of {row['table']}; known are {sorted(METRICS)}")
    return Result(
        table=row["table"],
        backbone=row["backbone"],
        method=row["method"],
        budget=None if row["budget"] is None else Fraction(row["budget"]),
        setting=row.get("setting"),
        detector=row.get("detector"),
        metrics=MappingProxyType(metrics),
    )


def results(table: str | None = None) -> list[Result]:
    """The rows with measurements, of one table (by its label, such as `table:detection`) or of all."""
    measured = {label: rows for label, rows in _tables().items() if label not in ("table:m_and_n", "table:stage")}
    if table is not None and table not in measured:
        raise KernelWarehouseError(f"the paper has no table of results {table!r}; there are {', '.join(measured)}")
    return [_result(row) for label, rows in measured.items() if table in (None, label) for row in rows]


def cell_counts() -> list[CellCounts]:
    return [
        CellCounts(row["table"], row["backbone"], Fraction(row["budget"]), tuple(row["m"]), tuple(row["n"]))
        for row in _tables()["table:m_and_n"]
    ]


def stage_layers() -> list[StageLayer]:
    return [
        StageLayer(
            table=row["table"],
            kernel=tuple(row["kernel"]),
            original_stage=row["original_stage"],
            original_cell=tuple(row["original_cell"]),
            reassigned_stage=row["reassigned_stage"],
            reassigned_cell=tuple(row["reassigned_cell"]),
        )
        for row in _tables()["table:stage"]
    ]
