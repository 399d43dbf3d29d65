"""Draws docs/method.png: partition -> warehouse -> attention -> assembled kernel.

    python scripts/draw_method.py [file]        # docs/method.png unless told

Two layers of one stage share a warehouse. What the picture shows is computed by the code that the layers use: the
kernels are cut, the attentions of three samples made, the cells mixed and joined. Only the cells' values are chosen by
hand, as cosine patterns that the eye can tell apart, drawn 6 x 6 where a network has 64 x 64.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor

from kernelwarehouse._files import replacing
from kernelwarehouse.assemble import assemble_kernels
from kernelwarehouse.assignment import beta, start_cells
from kernelwarehouse.attention import Attention, AttentionShape
from kernelwarehouse.partition import Partition

SIDE = 6
LAYER_A = Partition((SIDE, SIDE, 3, 3), (SIDE, SIDE, 1, 1))
LAYER_B = Partition((2 * SIDE, SIDE, 1, 1), (SIDE, SIDE, 1, 1))
CELLS = LAYER_A.mixtures + LAYER_B.mixtures
SAMPLES = 3
TEMPERATURE = 0.25

INK, FAINT, PANEL, EDGE = "#1f2933", "#64707d", "#f6f8fa", "#d5dce3"
ORANGE, BLUE = "#c2571a", "#1f6fb2"
OWNERS = [ORANGE] * LAYER_A.mixtures + [BLUE] * LAYER_B.mixtures
PITCH = 0.37  # a column of attentions is as wide as the cell above it
LEFT, TOP = 4.5, 2.95  # of layer A's attentions
RIGHT = LEFT + CELLS * PITCH


@dataclass(frozen=True)
class Method:
    """Everything the picture shows. Attentions are `[samples, mixtures, cells]`."""

    cells: Tensor
    start: Tensor
    learned: Tensor
    attention_a: Tensor
    attention_b: Tensor

    def mixtures(self, attention: Tensor, layer: Partition) -> Tensor:
        """What the layer's kernels are made of, `[samples, mixtures, *cell]`."""
        return torch.stack([layer.split(kernel) for kernel in assemble_kernels(attention, self.cells, layer)])


@torch.no_grad()
def compute() -> Method:
    torch.manual_seed(3)
    steps = (torch.arange(SIDE) + 0.5) * math.pi / SIDE
    waves = torch.stack([torch.outer((u * steps).cos(), (v * steps).cos()) for u in range(4) for v in range(4)])
    cells = waves[1 : CELLS + 1].reshape(CELLS, SIDE, SIDE, 1, 1)
    starts = start_cells("one_to_one", [LAYER_A.mixtures, LAYER_B.mixtures], CELLS)
    pooled = torch.randn(SAMPLES, 8)
    weights = []
    for partition, ranges in zip((LAYER_A, LAYER_B), starts, strict=True):
        branch = Attention(AttentionShape(8, partition.mixtures, CELLS, 16, "layer"), beta(ranges, CELLS))
        made = []
        for tau in (1.0, 0.0, TEMPERATURE):
            branch.set_temperature(tau)
            made.append(branch(pooled))
        weights.append(made)
    (start, learned, attention_a), (_, _, attention_b) = weights
    return Method(cells, start[0], learned[0], attention_a, attention_b)


class Canvas:
    """A drawing in inches, y downwards."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = plt.figure(figsize=(width, height), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def text(self, x: float, y: float, words: str, size: float = 10.5, colour: str = INK, **options: object) -> None:
        self.axes.text(x, y, words, fontsize=size, color=colour, **{"ha": "center", "va": "center", **options})

    def box(self, x: float, y: float, width: float, height: float, face: str = "white", edge: str = FAINT) -> None:
        shape = "round,pad=0,rounding_size=0.09"
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=face, ec=edge))

    def panel(self, x: float, y: float, width: float, height: float, title: str, subtitle: str) -> None:
        self.box(x, y, width, height, PANEL, EDGE)
        ground = {"ha": "left", "zorder": 4, "bbox": {"fc": PANEL, "ec": "none", "pad": 1.5}}
        self.text(x + 0.16, y + 0.26, title, 13, fontweight="bold", **ground)
        self.text(x + 0.16, y + 0.55, subtitle, 10, FAINT, **ground)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], weight: float = 1.6) -> None:
        style = {"arrowstyle": "-|>", "mutation_scale": 9 * weight, "lw": weight, "color": INK}
        self.axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))

    def frame(self, x: float, y: float, width: float, height: float, colour: str, **options: object) -> None:
        self.axes.add_patch(Rectangle((x, y), width, height, **{"fill": False, "ec": colour, "lw": 1.6, **options}))

    def tile(self, x: float, y: float, side: float, cell: Tensor, colour: str) -> None:
        """A cell or a mixture of cells, each in its own range of greys."""
        values = cell.reshape(SIDE, SIDE)
        self._values(x, y, side, side, values, "Greys", 1.15 * float(values.abs().max()), line=0)
        self.frame(x, y, side, side, colour)

    def weights(self, x: float, y: float, pitch: float, values: Tensor, colour: str) -> None:
        """Attentions, a row a mixture: red above zero, blue below."""
        rows, columns = values.shape
        self._values(x, y, pitch * columns, pitch * rows, values, "RdBu_r", 0.55, line=0.3)
        self.frame(x, y, pitch * columns, pitch * rows, colour)

    def _values(
        self, x: float, y: float, width: float, height: float, values: Tensor, shades: str, most: float, line: float
    ) -> None:
        across, down = (torch.linspace(0, 1, size + 1).numpy() for size in (values.shape[1], values.shape[0]))
        # Without lines, a frame in the colour of the face closes the hairlines between squares.
        edges = {"edgecolors": "white" if line else "face", "linewidth": line or 0.2}
        mesh = self.axes.pcolormesh(
            x + width * across, y + height * down, values.numpy(), cmap=shades, vmin=-most, vmax=most, **edges
        )
        mesh.set_clip_path(Rectangle((x, y), width, height, transform=self.axes.transData))

    def kernel(self, x: float, y: float, side: float, gap: float, pieces: Tensor, colour: str) -> None:
        """Layer A's nine pieces at their positions in the 3 x 3 kernel."""
        for index, piece in enumerate(pieces):
            row, column = divmod(index, 3)
            self.tile(x + column * (side + gap), y + row * (side + gap), side, piece, colour)


def draw_partition(canvas: Canvas, method: Method) -> None:
    canvas.panel(0.15, 0.15, 3.45, 3.6, "1  Partition", "the kernels of one stage, cut into cells")
    canvas.text(0.42, 1.0, "layer A: 3x3", 11, ORANGE, ha="left", fontweight="bold")
    canvas.text(0.42, 1.26, "64 → 64 channels", 10, ha="left")
    canvas.kernel(0.42, 1.5, 0.44, 0.09, method.cells[: LAYER_A.mixtures], ORANGE)
    canvas.text(1.17, 3.38, "m = 9: a cell for\nevery position", 10)
    canvas.text(2.15, 1.0, "layer B: 1x1", 11, BLUE, ha="left", fontweight="bold")
    canvas.text(2.15, 1.26, "64 → 128 channels", 10, ha="left")
    for index, cell in enumerate(method.cells[LAYER_A.mixtures :]):
        canvas.tile(2.55, 1.77 + index * 0.53, 0.44, cell, BLUE)
    canvas.text(2.77, 3.38, "m = 2: a cell for\nevery 64 outputs", 10)


def draw_warehouse(canvas: Canvas, method: Method) -> None:
    subtitle = "cells for all layers of the stage: n = b · (9 + 2), with budget b = 1"
    canvas.panel(3.95, 0.15, 5.5, 1.72, "2  Warehouse", subtitle)
    for index, cell in enumerate(method.cells):
        x = LEFT + index * PITCH
        canvas.text(x + PITCH / 2, 1.0, f"$e_{{{index + 1}}}$", 11, OWNERS[index])
        canvas.tile(x + 0.02, 1.2, PITCH - 0.04, cell, OWNERS[index])
        canvas.axes.plot([x + PITCH / 2] * 2, [1.6, TOP - 0.04], color=FAINT, lw=0.8, ls=(0, (2, 2)), zorder=3)


def draw_attention(canvas: Canvas, method: Method) -> None:
    canvas.panel(0.15, 4.0, 3.45, 4.12, "3  Attention", "a branch in every layer, run for every sample")
    steps = ("input x: mean over positions", "Linear, norm, ReLU", "Linear: logits z, m x (n + 1)")
    for index, words in enumerate(steps):
        y = 4.8 + index * 0.52
        canvas.box(0.45, y, 2.85, 0.35)
        canvas.text(1.875, y + 0.175, words)
        canvas.arrow((1.875, y + 0.35), (1.875, y + 0.52), 1.1)
    canvas.box(0.3, 6.36, 3.15, 1.58)
    mini, y = 0.083, 6.53
    canvas.weights(0.62, y, mini, method.start, ORANGE)
    canvas.weights(2.4, y, mini, method.learned, ORANGE)
    middle = y + mini * 4.5
    canvas.text(0.47, middle, "$\\tau$", 14)
    canvas.text(1.965, middle, "+ (1 – $\\tau$)", 11)
    canvas.text(1.08, 7.55, "$\\beta$: its own cell\n(start of training)", 9.5)
    canvas.text(2.85, 7.55, "z / $\\Sigma$|z|\n(learned)", 9.5)


def draw_mixing(canvas: Canvas, method: Method) -> None:
    bottom = TOP + LAYER_A.mixtures * PITCH
    second, centre = bottom + 0.66, LEFT + CELLS * PITCH / 2
    canvas.panel(
        3.95,
        2.12,
        5.5,
        6.0,
        "4  Mix",
        f"weights $\\alpha$ for one sample, here at $\\tau$ = {TEMPERATURE}: red > 0, blue < 0",
    )
    rows = [(TOP, "w", ORANGE, method.attention_a, LAYER_A), (second, "w'", BLUE, method.attention_b, LAYER_B)]
    for top, letter, colour, attention, layer in rows:
        canvas.weights(LEFT, top, PITCH, attention[0], colour)
        for index, mixture in enumerate(method.mixtures(attention, layer)[0]):
            y = top + index * PITCH
            canvas.text(LEFT - 0.24, y + PITCH / 2, f"${letter}_{{{index + 1}}}$", 11, colour)
            canvas.text(RIGHT + 0.17, y + PITCH / 2, "=", 11)
            canvas.tile(RIGHT + 0.34, y + 0.02, PITCH - 0.04, mixture, colour)
    canvas.text(centre, bottom + 0.33, r"a row mixes all cells:  $w_i = \Sigma_j\ \alpha_{ij}\, e_j$", 12.5)
    canvas.text(centre, second + LAYER_B.mixtures * PITCH + 0.24, "layer B: other weights, the same cells", 11, BLUE)


def draw_assembly(canvas: Canvas, method: Method) -> None:
    canvas.panel(9.8, 2.12, 2.9, 6.0, "5  Assemble", "every mixture to its place")
    kernels = method.mixtures(method.attention_a, LAYER_A)
    canvas.kernel(10.35, TOP + 0.12, 0.6, 0, kernels[0], ORANGE)
    canvas.text(11.25, TOP + 2.1, "kernel W(x) of layer A", 11, ORANGE, fontweight="bold")
    canvas.arrow((11.25, TOP + 2.28), (11.25, TOP + 2.58))
    canvas.box(10.3, TOP + 2.6, 1.9, 0.4)
    canvas.text(11.25, TOP + 2.8, "y = W(x) * x", 12)
    canvas.text(11.25, TOP + 3.55, "other samples, other kernels:", 10.5)
    for index in range(1, SAMPLES):
        canvas.kernel(8.94 + index * 1.2, TOP + 3.8, 0.33, 0, kernels[index], ORANGE)


def draw(path: Path) -> None:
    matplotlib.use("Agg")
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    method, canvas = compute(), Canvas(12.85, 8.27)
    for part in (draw_partition, draw_warehouse, draw_attention, draw_mixing, draw_assembly):
        part(canvas, method)
    canvas.text(9.96, 0.62, "Learned: the cells and\nthe attention branches.", 11, ha="left")
    canvas.text(9.96, 1.3, "Made for every sample:\nthe weights $\\alpha$ and\nthe kernels W(x).", 11, ha="left")
    canvas.arrow((3.62, 1.38), (4.42, 1.38), 2.2)
    canvas.arrow((3.62, 5.6), (4.12, 5.6), 2.2)
    canvas.arrow((RIGHT + 0.74, TOP + 1), (10.3, TOP + 1), 2.2)
    # Without the version in it, drawing again leaves the file as it is.
    with replacing(path) as aside:
        canvas.figure.savefig(aside, format="png", dpi=140, metadata={"Software": None}, pil_kwargs={"optimize": True})
    plt.close(canvas.figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "method.png")
