"""Scenes into batches, in worker processes: augmented, and resized to many scales for training."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from kernelwarehouse.data.seeds import derive_seed, seed_generators
from kernelwarehouse.detection.data import CocoPart
from kernelwarehouse.detection.detector import Sizes
from kernelwarehouse.errors import UnreadableImageError
from kernelwarehouse.training.loading import read_or_next
from kernelwarehouse.training.task import Unreadable

LEARNT_FROM = ("boxes", "labels", "masks")
"""The parts of a target that the losses look at."""

Target = dict[str, Tensor]
NOTHING: Target = {
    "boxes": torch.empty(0, 4),
    "labels": torch.empty(0, dtype=torch.int64),
    "masks": torch.empty(0, dtype=torch.uint8),
}
"""The target of a picture in which nothing is to be found, or in evaluation."""


class SceneSample(NamedTuple):
    """A picture by its id, and what to learn from it, which in evaluation is nothing. `image` is missing where it could
    not be read, and `unreadable` then says why."""

    image: Tensor | None
    target: Target
    image_id: int
    unreadable: tuple[str, ...] = ()


class SceneBatch(NamedTuple):
    """Pictures of different sizes with their targets, packed into four tensors.

    A tensor that a worker process sends costs an open file on both sides; batches of 16 pictures with three tensors of
    targets each, read ahead by eight workers, would exceed what many systems allow.
    """

    pixels: Tensor
    sizes: list[tuple[int, int]]
    """Height and width of each picture."""
    boxes: Tensor
    labels: Tensor
    masks: Tensor
    objects: list[int]
    """Their number in each picture."""
    image_ids: list[int]
    unreadable: list[str]

    @property
    def images(self) -> list[Tensor]:
        """`[3, height, width]` each, as torchvision's detectors take them."""
        flat = self.pixels.split([3 * height * width for height, width in self.sizes])
        return [values.view(3, *size) for values, size in zip(flat, self.sizes, strict=True)]

    @property
    def targets(self) -> list[Target]:
        pairs = list(zip(self.objects, self.sizes, strict=True))
        masks = self.masks.split([count * height * width for count, (height, width) in pairs])
        return [
            {"boxes": boxes, "labels": labels, "masks": values.view(count, *size)}
            for boxes, labels, values, (count, size) in zip(
                self.boxes.split(self.objects), self.labels.split(self.objects), masks, pairs, strict=True
            )
        ]

    def to(self, device: torch.device) -> "SceneBatch":
        return self._replace(
            pixels=self.pixels.to(device, non_blocking=True),
            boxes=self.boxes.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            masks=self.masks.to(device, non_blocking=True),
        )


class TrainingScenes(Dataset[SceneSample]):
    """Augmented scenes by `(epoch, index)`: the same pair always gives the same tensors.

    A scene is flipped or not, and resized so that its shorter side is one of those in `sizes`, as torchvision's
    detectors do it in training. Here it is done before images meet in a batch, so that a scene's size depends neither
    on the number of processes nor on that of parts.

    With `unreadable="skip"` the next readable picture takes the place of one that cannot be read, so that all batches
    keep their size.
    """

    def __init__(self, part: CocoPart, *, sizes: Sizes, flip: float, seed: int, unreadable: Unreadable) -> None:
        self._part = part
        self._flip = flip
        self._seed = seed
        self._unreadable = unreadable
        self._scales = GeneralizedRCNNTransform(tuple(sizes[0]), sizes[1], image_mean=[0.0] * 3, image_std=[1.0] * 3)

    def __getitem__(self, place: tuple[int, int]) -> SceneSample:
        epoch, index = place
        found, picture, problems = read_or_next(self._part.picture, index, len(self._part), self._unreadable)
        target = {name: values for name, values in self._part.target(found).items() if name in LEARNT_FROM}
        image = picture / 255
        seed_generators(derive_seed("augment", self._seed, epoch, found))
        if float(torch.rand(())) < self._flip:
            image, target = flipped(image, target)
        image, resized = self._scales.resize(image, target)
        return SceneSample(image, without_emptied(resized or {}), int(self._part.image_ids[found]), problems)


class EvaluationScenes(Dataset[SceneSample]):
    """Scenes by index, as they are. Unreadable ones are left out of the batch with `unreadable="skip"`."""

    def __init__(self, part: CocoPart, unreadable: Unreadable = "stop") -> None:
        self._part = part
        self._unreadable = unreadable

    def __getitem__(self, index: int) -> SceneSample:
        image_id = int(self._part.image_ids[index])
        try:
            return SceneSample(self._part.picture(index), {}, image_id)
        except UnreadableImageError as error:
            if self._unreadable == "stop":
                raise
            return SceneSample(None, {}, image_id, (str(error),))


def collate_scenes(samples: Sequence[SceneSample]) -> SceneBatch:
    readable = [(sample.image, sample) for sample in samples if sample.image is not None]
    targets = [sample.target or NOTHING for _, sample in readable]
    return SceneBatch(
        pixels=torch.cat([image.flatten() for image, _ in readable] or [torch.empty(0)]),
        sizes=[(image.shape[-2], image.shape[-1]) for image, _ in readable],
        boxes=torch.cat([target["boxes"] for target in targets] or [NOTHING["boxes"]]),
        labels=torch.cat([target["labels"] for target in targets] or [NOTHING["labels"]]),
        masks=torch.cat([target["masks"].flatten() for target in targets] or [NOTHING["masks"]]),
        objects=[len(target["labels"]) for target in targets],
        image_ids=[sample.image_id for _, sample in readable],
        unreadable=[problem for sample in samples for problem in sample.unreadable],
    )


def flipped(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Left and right exchanged."""
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[-1]
    boxes = torch.stack([width - right, top, width - left, bottom], 1)
    return image.flip(-1), target | {"boxes": boxes, "masks": target["masks"].flip(-1)}


def without_emptied(target: Target) -> Target:
    """Without objects so small that rounding has left their boxes no area."""
    boxes = target["boxes"]
    kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
    return target if bool(kept.all()) else {name: values[kept] for name, values in target.items()}
