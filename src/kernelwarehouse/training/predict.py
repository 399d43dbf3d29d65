"""A trained network with all that is needed to use it: its classes, and how images are prepared for it."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from kernelwarehouse._bfloat16 import require_computable
from kernelwarehouse.data.images import DataSet, FileImages
from kernelwarehouse.errors import DataError, TrainingError
from kernelwarehouse.saving.checkpoint import load
from kernelwarehouse.training.augment import evaluation_transform
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.evaluate import Evaluation, evaluate
from kernelwarehouse.training.loading import (
    EvaluationImages,
    check_workers,
    default_workers,
    evaluation_loader,
    read_batches,
)
from kernelwarehouse.training.run_folder import open_run
from kernelwarehouse.training.settings import RunSettings
from kernelwarehouse.training.task import Unreadable


@dataclass(frozen=True)
class TrainedNetwork:
    network: nn.Module
    classes: tuple[str, ...]
    image_size: int
    crop: float
    interpolation: str

    def __post_init__(self) -> None:
        outputs = getattr(self.network, "num_classes", len(self.classes))
        if outputs != len(self.classes):
            raise TrainingError(
                f"the network tells {outputs} classes apart, but the run's settings name {len(self.classes)} "
                f"({_some(self.classes)}): they are not of the same run"
            )

    def prepare(self, images: Sequence[Image.Image]) -> Tensor:
        transform = evaluation_transform(self.image_size, self.crop, self.interpolation)
        return torch.stack([transform(image) for image in images])

    @torch.inference_mode()
    def predict(self, images: Sequence[Image.Image], top: int = 5) -> list[list[tuple[str, float]]]:
        """For each image the `top` likeliest classes with their probabilities."""
        device = next(self.network.parameters()).device
        require_computable(device, torch.float32)
        shares = self.network.eval()(self.prepare(images).to(device)).float().softmax(1)
        best = shares.topk(min(top, shares.shape[1]), dim=1)
        return [
            [(self.classes[number], share) for number, share in zip(numbers, values, strict=True)]
            for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def evaluate(
        self, data: DataSet, processes: Processes, *, batch_size: int, workers: int | None, unreadable: Unreadable
    ) -> Evaluation:
        """On the validation images, which must have this network's classes."""
        if data.classes != self.classes:
            raise DataError(
                f"{data.name} has {len(data.classes)} classes ({_some(data.classes)}), the network was trained for "
                f"{len(self.classes)} ({_some(self.classes)}); they must be the same, in the same order"
            )
        check_workers(workers)
        transform = evaluation_transform(self.image_size, self.crop, self.interpolation)
        images = EvaluationImages(data.validation, transform, unreadable)
        workers = default_workers(processes) if workers is None else workers
        loader = evaluation_loader(images, len(data.validation.labels), batch_size, workers, processes)
        with closing(read_batches(loader)) as batches:
            return evaluate(self.network.to(processes.device), batches, processes)


def open_trained(path: str | Path) -> TrainedNetwork:
    """The best network of a run, or the one in `RUN/best` or `RUN/last`."""
    settings, network = open_run(path, RunSettings)
    return TrainedNetwork(
        load(network),
        settings.classes,
        settings.image_size,
        settings.recipe.evaluation_crop,
        settings.recipe.interpolation,
    )


def read_pictures(paths: Sequence[str]) -> list[Image.Image]:
    files = FileImages(paths, [0] * len(paths))
    return [files.load(number) for number in range(len(paths))]


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
