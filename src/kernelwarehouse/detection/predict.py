"""A trained detector with all that is needed to use it."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kernelwarehouse._bfloat16 import require_computable
from kernelwarehouse.detection.data import CocoData
from kernelwarehouse.detection.detector import Detector
from kernelwarehouse.detection.evaluation import DetectionScores
from kernelwarehouse.detection.loading import EvaluationScenes, collate_scenes
from kernelwarehouse.detection.training import Detection, DetectionSettings, evaluate_detector, refuse_vanishing
from kernelwarehouse.errors import DataError, TrainingError
from kernelwarehouse.saving.checkpoint import load
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.loading import check_workers, default_workers, evaluation_loader, read_batches
from kernelwarehouse.training.run_folder import open_run
from kernelwarehouse.training.task import Unreadable


@dataclass(frozen=True)
class TrainedDetector:
    network: Detector
    classes: tuple[str, ...]

    @torch.inference_mode()
    def predict(self, image: Tensor) -> Mapping[str, Tensor]:
        """What is to be seen in a picture, `uint8` of `[3, height, width]`: boxes, labels from 1 on, scores, masks."""
        device = next(self.network.parameters()).device
        require_computable(device, torch.float32)
        [found] = self.network.eval()([image.to(device)])
        return found

    def evaluate(
        self, data: CocoData, processes: Processes, *, workers: int | None, unreadable: Unreadable
    ) -> DetectionScores:
        """On the validation pictures, one at a time as in training. They must have this detector's classes."""
        if data.classes != self.classes:
            raise DataError(
                f"{data.name} has {len(data.classes)} classes ({_some(data.classes)}), the detector was trained for "
                f"{len(self.classes)} ({_some(self.classes)}); they must be the same, in the same order"
            )
        refuse_vanishing(data.validation, self.network.sizes)
        check_workers(workers)
        workers = default_workers(processes) if workers is None else workers
        scenes = EvaluationScenes(data.validation, unreadable)
        size, count = Detection.evaluation_batch, len(data.validation)
        loader = evaluation_loader(scenes, count, size, workers, processes, collate_scenes)
        with closing(read_batches(loader)) as batches:
            return evaluate_detector(self.network.to(processes.device), data.validation, batches, processes)


def open_detector(path: str | Path) -> TrainedDetector:
    """The best detector of a run, or the one in `RUN/best` or `RUN/last`.

    Raises:
        TrainingError: a folder that is not that of a run for detection, or holds another network.
    """
    settings, place = open_run(path, DetectionSettings)
    network = load(place)
    if not isinstance(network, Detector) or network.classes != len(settings.classes):
        found = f"one for {network.classes} classes" if isinstance(network, Detector) else type(network).__name__
        raise TrainingError(
            f"{place} holds {found}, but the run's settings are those of a detector for {len(settings.classes)} "
            "classes: they are not of the same run"
        )
    return TrainedDetector(network, settings.classes)


def as_pixels(picture: Image.Image) -> Tensor:
    """`uint8` of `[3, height, width]`, from a picture in RGB."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
