"""How much the features of an image change when it lies in a padded batch, next to an image of another shape.

Features are those of the coarsest level that the pyramid takes, at the positions of the image, alone and in the batch;
the change is the norm of their difference relative to the norm of the features. Networks are new, with attentions at
work (temperature 0) and batch norms as in evaluation. "image": dynamic layers look at the image alone, which is what
detectors do; "padded": they look at all of the batch, as the released code's do.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.tables import Figures
from kernelwarehouse.detection.backbone import build_features
from kernelwarehouse.padding import padded_batch
from kernelwarehouse.temperature import HasTemperature, set_temperature

BACKBONES = ("resnet18", "kw1x_resnet18", "kw4x_resnet18", "od4x_resnet18", "resnet50", "kw1x_resnet50")


@dataclass(frozen=True)
class Change:
    """Relative changes: with kernels from the image alone, and with kernels from all that is in the batch."""

    image: float
    padded: float


@torch.no_grad()
def change_by_padding(backbone: str, size: tuple[int, int], arguments: Mapping[str, Any] | None = None) -> Change:
    """The change for an image of this height and width in a square batch of its longer side."""
    torch.manual_seed(0)
    body = build_features(backbone, arguments or {}).eval()
    if any(isinstance(module, HasTemperature) for module in body.modules()):
        set_temperature(body, 0.0)
    _settle(body, size)
    height, width = size
    side = max(size)
    image, beside = torch.randn(3, height, width), torch.randn(3, width, height)
    batch = torch.zeros(2, 3, side, side)
    batch[0, :, :height, :width], batch[1, :, :width, :height] = image, beside
    alone = body(image[None])[-1][0]
    with padded_batch([size, (width, height)], (side, side)):
        told = body(batch)[-1][0]
    untold = body(batch)[-1][0]
    return Change(_relative(told, alone), _relative(untold, alone))


def _settle(body: nn.Module, size: tuple[int, int]) -> None:
    """Give batch norms statistics, as training would: without them, features of new networks explode or vanish."""
    norms = [module for module in body.modules() if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))]
    for norm in norms:
        norm.momentum = None  # the mean over all that follows
        norm.train()
    for _ in range(2):
        body(torch.randn(8, 3, *size) + torch.randn(8, 3, 1, 1))
    body.eval()


def _relative(found: Tensor, wanted: Tensor) -> float:
    height, width = wanted.shape[1:]
    return float((found[:, :height, :width] - wanted).norm() / wanted.norm())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.padding", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES))
    parser.add_argument("--size", nargs=2, type=int, default=[240, 320], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--markdown", action="store_true", help="print the table as the documentation has it")
    chosen = parser.parse_args(arguments)
    lines = []
    for backbone in chosen.backbones:
        change = change_by_padding(backbone, tuple(chosen.size))
        lines.append([backbone, f"{change.image:.1%}", f"{change.padded:.1%}"])
    table = Figures(["backbone", "kernels from the image", "kernels from the padded batch"], lines)
    height, width = chosen.size
    title = f"change of features, {height} x {width} padded to {max(height, width)} x {max(height, width)}"
    console = Console()
    console.print(table.markdown() if chosen.markdown else table.rich(title))


if __name__ == "__main__":
    main()
