"""Parameters of the paper's detectors: `python -m kernelwarehouse.detection.parameters` prints a line for every row.

The paper prints accuracies only. Detectors are those of `build_detector` for COCO's 80 classes, with batch norms that
are trained, so that their parameters count.
"""

from dataclasses import dataclass

import torch
from torch import nn

from kernelwarehouse.detection.detector import build_detector
from kernelwarehouse.paper import Result, preset_name, results

COCO_CLASSES = 80
TABLE = "table:detection"


@dataclass(frozen=True)
class DetectorParameters:
    """One row of the paper's table, and what a detector on its backbone counts."""

    row: Result
    preset: str
    backbone: int
    whole: int

    def markdown(self) -> str:
        row = self.row
        method = row.backbone if row.method is None else f"{row.backbone} + {row.method} ({row.budget}x)"
        counts = [f"{count / 1e6:.2f}M" for count in (self.backbone, self.whole)]
        accuracies = [f"{row.metrics[metric]:.1f}" for metric in ("box_ap", "mask_ap")]
        return f"| {' | '.join([method, f'`{self.preset}`', *counts, *accuracies])} |"


HEADER = (
    "| paper | preset | backbone | detector | box AP (paper) | mask AP (paper) |\n| --- | --- | --- | --- | --- | --- |"
)


def rows() -> list[Result]:
    """Those of the paper's table."""
    return results(TABLE)


def count(row: Result) -> DetectorParameters:
    """Without memory for the weights."""
    preset = preset_name(row)
    with torch.device("meta"):
        detector = build_detector(preset, COCO_CLASSES)
    return DetectorParameters(row, preset, _parameters(detector.backbone.body), _parameters(detector))


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    print(HEADER)
    for row in rows():
        print(count(row).markdown(), flush=True)


if __name__ == "__main__":
    main()
