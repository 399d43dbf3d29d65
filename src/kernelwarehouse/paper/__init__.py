"""Every table of the paper as data, so that any report can put measured beside published.

One JSON file a table, named by its LaTeX label; each row carries that label. Numbers are as printed (parameters in
millions, accuracies in per cent, memory in MB); a static backbone has no method and no budget.
"""

from kernelwarehouse.paper.presets import Published, preset_name, published, recipes
from kernelwarehouse.paper.tables import (
    CellCounts,
    Result,
    StageLayer,
    cell_counts,
    results,
    stage_layers,
    table_labels,
)

__all__ = [
    "CellCounts",
    "Published",
    "Result",
    "StageLayer",
    "cell_counts",
    "preset_name",
    "published",
    "recipes",
    "results",
    "stage_layers",
    "table_labels",
]
