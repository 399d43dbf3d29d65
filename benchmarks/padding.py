"""How much the features of an image change when it lies in a padded batch, next to an image of another shape.

Features are those of a level that the pyramid takes, at the positions of the image, alone and in the batch; the change
is the norm of their difference relative to the norm of the features. Networks are new, with attentions at work
(temperature 0) and the statistics of the images in their batch norms. "image": dynamic layers look at the image alone,
which is what detectors do; "padded": they look at all of the batch, as the released code's do.

The finest level shows what padding does to kernels. At coarser ones, borders come in, for static layers as well: what
convolutions make of the padding reaches further into the image with every layer.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tables import Figures
from kernelwarehouse.detection.backbone import build_features
from kernelwarehouse.padding import padded_batch
from kernelwarehouse.temperature import HasTemperature, set_temperature

BACKBONES = ("resnet18", "kw1x_resnet18", "kw4x_resnet18", "od4x_resnet18")


@dataclass(frozen=True)
class Change:
    """Relative changes: with kernels from the image alone, and with kernels from all that is in the batch."""

    image: float
    padded: float


@torch.no_grad()
def change_by_padding(
    backbone: str, size: tuple[int, int], arguments: Mapping[str, Any] | None = None, level: int = 0, images: int = 4
) -> Change:
    """The mean change for images of this height and width, each in a square batch with one that is turned round."""
    torch.manual_seed(0)
    body = build_features(backbone, arguments or {})
    if any(isinstance(module, HasTemperature) for module in body.modules()):
        set_temperature(body, 0.0)
    _settle(body, size)
    height, width = size
    side = max(size)
    changes = []
    for image in _smooth_images(images, size):
        batch = torch.zeros(2, 3, side, side)
        batch[0, :, :height, :width], batch[1, :, :width, :height] = image, image.mT
        alone = body(image[None])[level][0]
        with padded_batch([size, (width, height)], (side, side)):
            told = body(batch)[level][0]
        untold = body(batch)[level][0]
        changes.append(Change(_relative(told, alone), _relative(untold, alone)))
    return Change(*(sum(values) / images for values in zip(*map(astuple, changes), strict=True)))


def _smooth_images(count: int, size: tuple[int, int]) -> Tensor:
    """Patches of colour, each image with a shade of its own, as large in mean and spread as normalised photographs."""
    patches = torch.randn(count, 3, size[0] // 16, size[1] // 16)
    shades = torch.randn(count, 3, 1, 1)
    return (F.interpolate(patches, size, mode="bicubic") + shades) / 2**0.5


def _settle(body: nn.Module, size: tuple[int, int]) -> None:
    """Give batch norms statistics, as training would: without them, features of new networks explode or vanish."""
    for module in body.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.momentum = None  # the mean over all that follows
    body.train()
    for _ in range(3):
        body(_smooth_images(8, size))
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
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 1], help="0 is the finest")
    parser.add_argument("--markdown", action="store_true", help="print the table as the documentation has it")
    chosen = parser.parse_args(arguments)
    lines = []
    for backbone in chosen.backbones:
        changes = [change_by_padding(backbone, tuple(chosen.size), level=level) for level in chosen.levels]
        lines.append([backbone, *(f"{value:.1%}" for change in changes for value in astuple(change))])
    columns = [f"level {level}, kernels from the {seen}" for level in chosen.levels for seen in ("image", "batch")]
    table = Figures(["backbone", *columns], lines)
    height, width = chosen.size
    title = f"change of features, {height} x {width} padded to {max(height, width)} x {max(height, width)}"
    if chosen.markdown:
        print(table.markdown())
    else:
        Console().print(table.rich(title))


if __name__ == "__main__":
    main()
