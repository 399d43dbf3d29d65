"""Training detectors with the engine that trains classifiers: the task of finding and outlining objects."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernelwarehouse._extras import require
from kernelwarehouse.builder import WEIGHT_ARGUMENTS
from kernelwarehouse.data.seeds import derive_seed, seed_generators
from kernelwarehouse.detection.backbone import Norms
from kernelwarehouse.detection.data import CocoData, CocoPart
from kernelwarehouse.detection.detector import Detector, Sizes, build_detector, vanishes
from kernelwarehouse.detection.evaluation import DetectionScores, Predictions
from kernelwarehouse.detection.loading import (
    EvaluationScenes,
    SceneBatch,
    SceneSample,
    TrainingScenes,
    collate_scenes,
)
from kernelwarehouse.detection.recipe import DetectionRecipe
from kernelwarehouse.errors import ConfigError, DataError
from kernelwarehouse.temperature import HasTemperature
from kernelwarehouse.training.distributed import Processes, join_processes
from kernelwarehouse.training.precision import autocast, require_precision
from kernelwarehouse.training.progress import Display
from kernelwarehouse.training.run import Run, RunOptions
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.settings import EngineSettings
from kernelwarehouse.training.task import Task, Unreadable


@dataclass(frozen=True)
class DetectionSettings(EngineSettings):
    """Those of a run for detection. `model` is the backbone, with its `arguments`, `weights` the classifier that it
    comes from, and `image_size` the shorter side in evaluation."""

    task = "detection"
    recipe_kind = DetectionRecipe

    recipe: DetectionRecipe


class SummedLosses:
    """The losses of proposals, classes, boxes and masks, all of the same weight."""

    def prepare(self, part: SceneBatch, device: torch.device, memory_format: torch.memory_format) -> SceneBatch:
        return part.to(device)  # images become a batch, of any format, only inside of the detector

    def loss(self, network: nn.Module, part: SceneBatch) -> Tensor:
        losses: dict[str, Tensor] = network(part.images, part.targets)
        return torch.stack(list(losses.values())).sum()


class Detection(Task[SceneBatch]):
    """The best network is that with the highest mask AP."""

    best_by = "mask_ap"
    evaluation_batch = 1  # at its border, an image meets the padding that images beside it bring

    def __init__(self, data: CocoData, recipe: DetectionRecipe) -> None:
        self._train = _training_part(data)
        refuse_vanishing(self._train, recipe.training_sizes)
        refuse_vanishing(data.validation, recipe.evaluation_sizes)
        self._validation = data.validation
        self._recipe = recipe
        self.training_count = len(self._train)
        self.validation_count = len(self._validation)

    def training_samples(self, seed: int, unreadable: Unreadable) -> TrainingScenes:
        recipe = self._recipe
        return TrainingScenes(
            self._train, sizes=recipe.training_sizes, flip=recipe.flip, seed=seed, unreadable=unreadable
        )

    def validation_samples(self, unreadable: Unreadable) -> EvaluationScenes:
        return EvaluationScenes(self._validation, unreadable)

    @property
    def collate(self) -> Callable[[Sequence[SceneSample]], SceneBatch]:
        return collate_scenes

    def objective(self) -> SummedLosses:
        return SummedLosses()

    def evaluate(
        self, network: nn.Module, batches: Iterable[SceneBatch], processes: Processes, precision: str
    ) -> DetectionScores:
        return evaluate_detector(network, self._validation, batches, processes, precision)

    def told(self, values: dict[str, Any]) -> list[str]:
        parts = [
            f"{kind} AP {values[f'{kind}_ap']:.1%} (AP50 {values[f'{kind}_ap50']:.1%})" for kind in ("mask", "box")
        ]
        return [*parts, f"training loss {values['training_loss']:.4f}"]


@torch.inference_mode()
def evaluate_detector(
    network: nn.Module,
    part: CocoPart,
    batches: Iterable[SceneBatch],
    processes: Processes,
    precision: str = "float32",
) -> DetectionScores:
    """Evaluate this process's batches of a part, and bring the findings of all processes together. The network is in
    eval mode during it."""
    was_training = network.training
    network.eval()
    processes.equalise_buffers(network)
    predictions = Predictions(part)
    unreadable: list[str] = []
    try:
        for batch in batches:
            unreadable += batch.unreadable
            if not batch.sizes:
                continue
            with autocast(processes.device, precision):
                found = network(batch.to(processes.device).images)
            predictions.add(dict(zip(batch.image_ids, found, strict=True)))
    finally:
        network.train(was_training)
    return predictions.score(processes, unreadable)


def train_detector(
    backbone: str,
    data: CocoData,
    recipe: DetectionRecipe,
    output: str | Path,
    *,
    options: RunOptions | None = None,
    arguments: dict[str, Any] | None = None,
    weights: Path | None = None,
    device: str = "",
) -> RunFolder:
    """Train Mask R-CNN on a backbone and leave everything in `output`. The same call again resumes the run, or finds it
    finished. The recipe's exceptions for this backbone hold. `arguments` go to the backbone's maker; `weights` is the
    folder of a classification run, or of `kernelwarehouse.save`, that the backbone starts from."""
    require("detection", "training detectors")
    options = options or RunOptions()
    recipe = recipe.for_model(backbone)
    task = Detection(data, recipe)
    with join_processes(device) as processes:
        require_precision(processes.device, recipe.precision)
        settings = DetectionSettings(
            model=backbone,
            data=data.name,
            classes=data.classes,
            image_size=recipe.evaluation_side,
            seed=options.seed,
            recipe=recipe,
            arguments=arguments or {},
            weights=str(weights) if weights else None,
            fingerprint=data.fingerprint() if processes.is_main else None,
        )
        model = new_detector(
            backbone, recipe, len(data.classes), seed=options.seed, arguments=arguments, weights=weights
        )
        folder = RunFolder(output, starts_from="")
        display = Display(silent=not processes.is_main)
        Run(model, task, settings, folder, options=options, processes=processes, display=display).train()
    return folder


def new_detector(
    backbone: str,
    recipe: DetectionRecipe,
    classes: int,
    *,
    seed: int,
    arguments: dict[str, Any] | None = None,
    weights: Path | None = None,
) -> Detector:
    """The detector that a run begins with, the same for the same seed. Its scenes come resized."""
    given = arguments or {}
    if weights is None and not any(given.get(name) for name in WEIGHT_ARGUMENTS):
        _refuse_frozen(recipe, backbone)
    seed_generators(derive_seed("network", seed))
    detector = build_detector(
        backbone,
        classes,
        arguments=given,
        backbone_weights=weights,
        frozen_stages=recipe.frozen_stages,
        norms=cast(Norms, recipe.norms),
        sizes=recipe.evaluation_sizes,
        width=recipe.width,
        options=recipe.options,
    )
    if weights is not None:
        _refuse_start_strategy(recipe, detector)
    detector.transform._skip_resize = True  # in training; what torchvision's own scripts set for this
    return detector


def _refuse_frozen(recipe: DetectionRecipe, backbone: str) -> None:
    """What has learnt nothing must not stay as it is."""
    frozen = []
    if recipe.frozen_stages >= 0:
        frozen.append(f"frozen_stages (={recipe.frozen_stages}) to -1")
    if recipe.norms == "frozen":
        frozen.append(f"norms (={recipe.norms!r}) to 'trained'")
    if frozen:
        raise ConfigError(
            f"{backbone} is new, and what the recipe freezes of it would never learn anything; pass "
            f"--backbone-checkpoint with a trained classifier, or set {' and '.join(frozen)}"
        )


def _refuse_start_strategy(recipe: DetectionRecipe, detector: Detector) -> None:
    """A trained backbone knows which cells to mix. The engine would raise its temperature to 1 again."""
    if recipe.tau_epochs and any(isinstance(module, HasTemperature) for module in detector.modules()):
        raise ConfigError(
            f"tau_epochs (={recipe.tau_epochs}) is the attention start strategy, for new backbones: it would disturb "
            "what the network of --backbone-checkpoint has learnt about its cells; use --set tau_epochs=0"
        )


def refuse_vanishing(part: CocoPart, sizes: Sizes) -> None:
    """Refuse pictures that are too narrow to be resized. The detector, which sees pixels only, could not name them."""
    shapes = part.file.sizes.tolist()
    narrow = [index for index, (height, width) in enumerate(shapes) if vanishes(height, width, sizes)]
    if narrow:
        height, width = shapes[narrow[0]]
        others = f", and {len(narrow) - 1:,} more are as narrow" if narrow[1:] else ""
        raise DataError(
            f"{part.pictures.name(narrow[0])} is {width} x {height} pixels, and nothing is left of it at a longest "
            f"side of {sizes[1]}{others}; sides of at most {sizes[1]} to 1 are wanted: take it out of {part.file.path}"
        )


def _training_part(data: CocoData) -> CocoPart:
    if data.train is None:
        raise DataError(f"{data.name} has no training images, only some to evaluate on")
    if not data.train.targets:
        count = len(data.train.file.labels)
        why = f"all of its {count:,} annotations are crowds or have no area" if count else "it has no annotations"
        raise DataError(f"{data.train.file.path} has no objects to learn from: {why}")
    if not (~data.validation.file.crowds).any():
        raise DataError(f"{data.validation.file.path} shows no objects, so no network could be the best")
    return data.train
