"""The task of telling classes apart: images augmented by the recipe, cross entropy, top-1."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernelwarehouse.data.images import DataSet, Images
from kernelwarehouse.errors import DataError
from kernelwarehouse.training.augment import evaluation_transform, training_transform
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.evaluate import Evaluation, evaluate
from kernelwarehouse.training.loading import Batch, EvaluationImages, Sample, TrainingImages, collate
from kernelwarehouse.training.optimisation import make_loss, make_mixing
from kernelwarehouse.training.progress import accuracies_told
from kernelwarehouse.training.recipe import Recipe
from kernelwarehouse.training.settings import RunSettings
from kernelwarehouse.training.task import Task, Unreadable


class CrossEntropy:
    """The loss by the recipe: smoothed, and of images that are mixed or not."""

    def __init__(self, recipe: Recipe, classes: int) -> None:
        self._mixing = make_mixing(recipe, classes)
        self._loss = make_loss(recipe)

    def prepare(self, part: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        images = part.images.to(device, non_blocking=True, memory_format=memory_format)
        targets = part.targets.to(device, non_blocking=True)
        if self._mixing is not None:
            images, targets = self._mixing(images, targets)
        return part._replace(images=images, targets=targets)

    def loss(self, network: nn.Module, part: Batch) -> Tensor:
        return self._loss(network(part.images), part.targets)


class Classification(Task[Batch]):
    best_by = "top1"

    def __init__(self, data: DataSet, settings: RunSettings) -> None:
        self._train = _training_split(data)
        self._data = data
        self._settings = settings
        self.training_count = len(self._train.labels)
        self.validation_count = len(data.validation.labels)

    def training_samples(self, seed: int, unreadable: Unreadable) -> TrainingImages:
        transform = training_transform(self._settings.recipe, self._settings.image_size)
        return TrainingImages(self._train, transform, seed, unreadable)

    def validation_samples(self, unreadable: Unreadable) -> EvaluationImages:
        recipe = self._settings.recipe
        transform = evaluation_transform(self._settings.image_size, recipe.evaluation_crop, recipe.interpolation)
        return EvaluationImages(self._data.validation, transform, unreadable)

    @property
    def collate(self) -> Callable[[Sequence[Sample]], Batch]:
        return collate

    def objective(self) -> CrossEntropy:
        return CrossEntropy(self._settings.recipe, len(self._data.classes))

    def evaluate(
        self, network: nn.Module, batches: Iterable[Batch], processes: Processes, precision: str
    ) -> Evaluation:
        return evaluate(network, batches, processes, precision)

    def told(self, values: dict[str, Any]) -> list[str]:
        return accuracies_told(values)


def _training_split(data: DataSet) -> Images:
    if data.train is None:
        raise DataError(f"{data.name} has no training images, only some to evaluate on")
    return data.train
