"""Detectors that take a second a step, scenes for them, and how they are trained for a few steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernelwarehouse.builder import builder_of, remember_builder
from kernelwarehouse.detection.detector import Detector, build_detector
from kernelwarehouse.zoo import build_by_name

CLASSES = 3
TINY_RESNET = {"channels": [8, 16, 24, 32], "layers": [1, 1, 1, 1]}
TINY_CONVNEXT = {"dims": [8, 8, 16, 16]}  # the preset names its blocks, so that they must be there
FAMILIES: dict[str, dict[str, Any]] = {
    "resnet18": TINY_RESNET,
    "kw1x_resnet18": TINY_RESNET,
    "kw4x_resnet50": TINY_RESNET,
    "dy4x_resnet18": TINY_RESNET,
    "od4x_resnet18": TINY_RESNET,
    "kw1x_small_resnet": {"widths": [8, 16, 16]},
    "kw1x_mobilenetv2_050": {},
    "kw1x_convnext_tiny": TINY_CONVNEXT,
}
FEW = {"rpn_post_nms_top_n_train": 50, "box_batch_size_per_image": 32, "rpn_post_nms_top_n_test": 20}


def tiny_detector(backbone: str = "kw1x_resnet18", **changes: Any) -> Detector:
    settings = {"arguments": FAMILIES.get(backbone, TINY_RESNET), "width": 16, "sizes": ((64,), 96), "options": FEW}
    torch.manual_seed(0)
    return build_detector(backbone, CLASSES, **(settings | changes))


def tiny_classifier(name: str, **arguments: Any) -> nn.Module:
    """A network for five classes that can be saved."""
    model = build_by_name(name, num_classes=5, **arguments)
    if builder_of(model) is None:
        remember_builder(model, name, {"num_classes": 5, **arguments})
    return model


def scene(height: int, width: int, label: int = 1, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Noise with a bright rectangle in it."""
    image = torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed)) / 2
    left, top, right, bottom = width // 4, height // 4, width // 4 + 24, height // 4 + 30
    masks = torch.zeros(1, height, width, dtype=torch.uint8)
    masks[0, top:bottom, left:right] = 1
    image[:, top:bottom, left:right] += 0.4
    boxes = torch.tensor([[left, top, right, bottom]], dtype=torch.float32)
    return image, {"boxes": boxes, "labels": torch.tensor([label]), "masks": masks}


def two_scenes() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """A wide one and a high one: both are padded."""
    (one, first), (other, second) = scene(64, 96), scene(96, 64, label=2, seed=1)
    return [one, other], [first, second]


def losses(detector: Detector, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    found = detector(images, targets)
    if not isinstance(found, dict):
        raise TypeError("the detector is not in training mode")
    return found


def train(detector: Detector, steps: int = 2) -> None:
    """With weight decay, which moves whatever it is given."""
    images, targets = two_scenes()
    optimiser = torch.optim.SGD([p for p in detector.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    detector.train()
    for _ in range(steps):
        optimiser.zero_grad()
        sum(losses(detector, images, targets).values()).backward()
        optimiser.step()
