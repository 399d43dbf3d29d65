"""Parts of torchvision's Mask R-CNN as they are needed here: boxes that stay exact, and levels of known strides.

torchvision takes the type of anchors from the feature maps, and that of boxes from what the heads predict. In mixed
precision both are halves, which know numbers above 256 in steps of 2 (bfloat16) only: anchors, proposals, found boxes
and even the targets would be rounded to several pixels. Here whatever becomes a box is at least float32.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper


class Anchors(AnchorGenerator):
    """torchvision's, exact in mixed precision."""

    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        super().set_cell_anchors(_wide_type(dtype), device)


class ProposalHead(RPNHead):
    """torchvision's, but proposals are decoded from wide numbers in mixed precision."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, deltas = super().forward(x)
        return [_wide(level) for level in scores], [_wide(level) for level in deltas]


class BoxPredictor(FastRCNNPredictor):
    """torchvision's, but boxes are decoded from wide numbers in mixed precision."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return _wide(scores), _wide(deltas)


class RoiAlign(MultiScaleRoIAlign):
    """torchvision's, for levels of known strides, from fine to coarse, each twice the one before.

    torchvision guesses the strides from the first batch, and keeps them. It compares maps with images that are not
    padded yet: after a first batch of very low images, every later one is sampled at the wrong places.

    Maps of halves are sampled at exact places, as autocast has it, and in networks that are halves themselves too.
    """

    def __init__(self, strides: Sequence[int], output_size: int) -> None:
        super().__init__([str(level) for level in range(len(strides))], output_size, sampling_ratio=2)
        finest, coarsest = (int(math.log2(stride)) for stride in (strides[0], strides[-1]))
        self.scales = [1 / stride for stride in strides]
        self.map_levels = initLevelMapper(finest, coarsest, self.canonical_scale, self.canonical_level)

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: Sequence[tuple[int, int]]) -> Tensor:
        own = x[self.featmap_names[0]].dtype
        wide = {name: x[name].to(boxes[0].dtype) for name in self.featmap_names}
        return super().forward(wide, boxes, image_shapes).to(own)


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(values: Tensor) -> Tensor:
    return values.to(_wide_type(values.dtype))
