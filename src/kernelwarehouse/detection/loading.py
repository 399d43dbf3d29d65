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


class SceneSample(NamedTuple):
    """A picture, and what to learn from it or, in evaluation, its id. `image` is missing where it could not be read,
    and `unreadable` then says why."""

    image: Tensor | None
    target: Target
    unreadable: tuple[str, ...] = ()


class SceneBatch(NamedTuple):
    """Pictures of different sizes, in lists as torchvision's detectors take them."""

    images: list[Tensor]
    targets: list[Target]
    unreadable: list[str]

    def to(self, device: torch.device) -> "SceneBatch":
        images = [image.to(device, non_blocking=True) for image in self.images]
        targets = [
            {name: values.to(device, non_blocking=True) for name, values in target.items()} for target in self.targets
        ]
        return self._replace(images=images, targets=targets)


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
        return SceneSample(image, without_emptied(resized or {}), problems)


class EvaluationScenes(Dataset[SceneSample]):
    """Scenes by index, as they are. Unreadable ones are left out of the batch with `unreadable="skip"`."""

    def __init__(self, part: CocoPart, unreadable: Unreadable = "stop") -> None:
        self._part = part
        self._unreadable = unreadable

    def __getitem__(self, index: int) -> SceneSample:
        target = {"image_id": torch.tensor(int(self._part.image_ids[index]))}
        try:
            return SceneSample(self._part.picture(index), target)
        except UnreadableImageError as error:
            if self._unreadable == "stop":
                raise
            return SceneSample(None, target, (str(error),))


def collate_scenes(samples: Sequence[SceneSample]) -> SceneBatch:
    readable = [(sample.image, sample.target) for sample in samples if sample.image is not None]
    return SceneBatch(
        [image for image, _ in readable],
        [target for _, target in readable],
        [problem for sample in samples for problem in sample.unreadable],
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
