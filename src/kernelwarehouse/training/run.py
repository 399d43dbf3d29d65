"""A whole run: data, steps, evaluation, checkpoints, metrics, report. Started again, it goes on where it was."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from kernelwarehouse.data.batches import TrainingBatches
from kernelwarehouse.data.images import DataSet, Images
from kernelwarehouse.errors import ConfigError, DataError, TrainingError
from kernelwarehouse.training.augment import evaluation_transform, training_transform
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.evaluate import Evaluation, evaluate
from kernelwarehouse.training.loading import (
    Batch,
    EvaluationImages,
    TrainingImages,
    Unreadable,
    default_workers,
    evaluation_loader,
    read_batches,
    training_loader,
)
from kernelwarehouse.training.metrics import MetricsLog
from kernelwarehouse.training.progress import Display
from kernelwarehouse.training.recipe import Recipe
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.trainer import Trainer


@dataclass(frozen=True)
class RunOptions:
    """What a run needs to know beyond the recipe. Only `seed` has a say in the result.

    `device_batch_size` is how many images a process takes at once (0: its whole share of the batch); the rest of the
    batch is accumulated. Checkpoints are written after every epoch, and after a report if `checkpoint_seconds` have
    passed since the last one. A report comes every `report_every` steps.
    """

    seed: int = 0
    workers: int | None = None
    device_batch_size: int = 0
    checkpoint_seconds: float = 300.0
    report_every: int = 20
    unreadable: Unreadable = "stop"

    def __post_init__(self) -> None:
        if self.unreadable not in ("stop", "skip"):
            raise ConfigError(f"unreadable (={self.unreadable!r}) must be 'stop' or 'skip'")
        if self.report_every < 1 or self.device_batch_size < 0 or (self.workers or 0) < 0:
            raise ConfigError(
                f"report_every (={self.report_every}) must be at least 1, device_batch_size "
                f"(={self.device_batch_size}) and workers (={self.workers}) at least 0"
            )


def accumulation_parts(recipe: Recipe, options: RunOptions, processes: Processes) -> int:
    """Into how many micro-batches each process cuts its share of a batch."""
    share, rest = divmod(recipe.batch_size, processes.world_size)
    size = options.device_batch_size or share
    if rest or share % size:
        raise TrainingError(
            f"batch size {recipe.batch_size} over {processes.world_size} processes, {size} images at a time, does not "
            f"come out even; choose a device batch size that divides {recipe.batch_size // processes.world_size}"
        )
    if recipe.mixes and size % 2:
        raise TrainingError(f"{size} images at a time cannot be paired for mixup and cutmix; use an even number")
    return share // size


class Run:
    """One run of one model on one data set. `settings` say what it is, and are compared when it is started again."""

    def __init__(
        self,
        model: nn.Module,
        data: DataSet,
        recipe: Recipe,
        folder: RunFolder,
        *,
        settings: dict[str, Any],
        options: RunOptions,
        processes: Processes,
        display: Display,
    ) -> None:
        self.train_images = _training_split(data)
        self.data = data
        self.recipe = recipe
        self.folder = folder
        self.options = options
        self.processes = processes
        self.display = display
        self.size = int(settings["image_size"])
        self.workers = default_workers(processes) if options.workers is None else options.workers
        self.parts = accumulation_parts(recipe, options, processes)
        if processes.is_main:
            folder.claim(settings)
        self.batches = TrainingBatches(
            len(self.train_images.labels),
            recipe.batch_size,
            recipe.epochs,
            options.seed,
            accumulation=self.parts,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        self.trainer = Trainer(
            model,
            recipe,
            classes=len(data.classes),
            steps_per_epoch=self.batches.steps_per_epoch,
            seed=options.seed,
            processes=processes,
        )
        # Sums over the epoch so far, the best accuracy, and the images that could not be read: part of the checkpoint.
        self.loss_sum = 0.0
        self.best_top1 = -1.0
        self.unreadable: set[str] = set()
        self._resume()
        self.batches.start_step = self.trainer.steps_done

    def _resume(self) -> None:
        state = self.folder.read_state()
        steps = self.processes.gather(state["trainer"]["steps_done"] if state is not None else 0)
        if len(set(steps)) > 1:
            raise TrainingError(
                f"the processes find checkpoints of different steps {steps} in {self.folder.path}; "
                "it must be on storage that all of them share"
            )
        if state is None:
            return
        self.trainer.load_state_dict(state["trainer"])
        self.loss_sum = state["loss_sum"]
        self.best_top1 = state["best_top1"]
        self.unreadable = set(state["unreadable"])
        if self.trainer.steps_done == self.batches.steps:
            self.display.say(f"{self.folder.path} is finished: {self.recipe.epochs} epochs")
        else:
            epoch = self.trainer.steps_done / self.batches.steps_per_epoch
            self.display.say(f"resuming {self.folder.path} at step {self.trainer.steps_done} (epoch {epoch:.2f})")

    def go(self) -> None:
        """Train to the end of the last epoch."""
        log = MetricsLog(self.folder, self.trainer.steps_done) if self.processes.is_main else None
        self.display.start(self.trainer.steps_done, self.batches.steps)
        try:
            for report in self.reports():
                if log is not None:
                    log.write(*report)
        finally:
            self.display.stop()
            if log is not None:
                log.close()

    def reports(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Train, and yield `(kind, step, values)` after every few steps and after every epoch."""
        transform = training_transform(self.recipe, self.size)
        images = TrainingImages(self.train_images, transform, self.options.seed, self.options.unreadable)
        parts = read_batches(training_loader(images, self.batches, self.workers, self.processes))
        losses: list[Tensor] = []
        problems: list[str] = []
        clock = saved = time.monotonic()
        while self.trainer.steps_done < self.batches.steps:
            batch: list[Batch] = list(islice(parts, self.parts))
            problems += [problem for part in batch for problem in part.unreadable]
            losses.append(self.trainer.step(batch))
            step = self.trainer.steps_done
            epoch_ends = step % self.batches.steps_per_epoch == 0
            if not epoch_ends and step % self.options.report_every:
                continue
            mean_loss = self._account(losses, problems)
            now = time.monotonic()
            values = self._step_values(mean_loss, len(losses) * self.recipe.batch_size / (now - clock))
            yield "step", step, values
            losses, problems = [], []
            if epoch_ends:
                yield "epoch", step, self._finish_epoch()
            if epoch_ends or now - saved >= self.options.checkpoint_seconds:
                self._write_last()
                saved = time.monotonic()
            clock = time.monotonic()

    def _account(self, losses: list[Tensor], problems: list[str]) -> float:
        """The mean loss since the last report, over all processes; adds to the epoch's. Stops if it is not finite."""
        values = self.processes.sum(torch.stack(losses).double()) / self.processes.world_size
        finite = values.isfinite()
        if not finite.all():
            first = int((~finite).nonzero()[0])
            step = self.trainer.steps_done - len(losses) + first + 1
            raise TrainingError(
                f"the loss of step {step} is {float(values[first])}; the last good checkpoint is kept in "
                f"{self.folder.path / 'last'}. A smaller learning_rate, a longer warm-up or clip_norm may help"
            )
        self.loss_sum += float(values.sum())
        if self.options.unreadable == "skip":
            for problem in sorted({name for share in self.processes.gather(problems) for name in share}):
                self._note_unreadable(problem)
        return float(values.mean())

    def _note_unreadable(self, problem: str) -> None:
        if problem not in self.unreadable:
            self.unreadable.add(problem)
            self.display.say(f"unreadable image, skipped (number {len(self.unreadable)}): {problem}")

    def _epoch_name(self) -> str:
        return f"{-(-self.trainer.steps_done // self.batches.steps_per_epoch)}/{self.recipe.epochs}"

    def _step_values(self, loss: float, images_per_second: float) -> dict[str, Any]:
        values = {
            "loss": loss,
            "learning_rate": self.trainer.learning_rate,
            "tau": self.trainer.tau,
            "images_per_second": images_per_second,
        }
        steps_left = self.batches.steps - self.trainer.steps_done
        seconds_left = steps_left * self.recipe.batch_size / images_per_second
        self.display.step(self.trainer.steps_done, self._epoch_name(), values, seconds_left)
        return values

    def _finish_epoch(self) -> dict[str, Any]:
        evaluation = self.evaluate()
        best = evaluation.top1 > self.best_top1
        values = evaluation.as_dict() | {
            "training_loss": self.loss_sum / self.batches.steps_per_epoch,
            "best": best,
            "tau": self.trainer.tau,
            "unreadable": len(self.unreadable),
        }
        self.loss_sum = 0.0
        self.display.epoch(self._epoch_name(), values)
        if best:
            self.best_top1 = evaluation.top1
            if self.processes.is_main:
                self.trainer.require_finite_weights()
                self.folder.write("best", self.trainer.steps_done, self.trainer.result)
        return values

    def evaluate(self) -> Evaluation:
        """The network to keep, on all validation images."""
        transform = evaluation_transform(self.size, self.recipe.evaluation_crop, self.recipe.interpolation)
        images = EvaluationImages(self.data.validation, transform, self.options.unreadable)
        size = self.recipe.batch_size // self.processes.world_size // self.parts
        count = len(self.data.validation.labels)
        loader = evaluation_loader(images, count, size, self.workers, self.processes)
        evaluation = evaluate(self.trainer.result, read_batches(loader), self.processes, self.recipe.precision)
        for problem in evaluation.unreadable:
            self._note_unreadable(problem)
        return evaluation

    def _write_last(self) -> None:
        if not self.processes.is_main:
            return
        self.trainer.require_finite_weights()
        state = {
            "trainer": self.trainer.state_dict(),
            "loss_sum": self.loss_sum,
            "best_top1": self.best_top1,
            "unreadable": sorted(self.unreadable),
        }
        self.folder.write("last", self.trainer.steps_done, self.trainer.result, state)


def _training_split(data: DataSet) -> Images:
    if data.train is None:
        raise DataError(f"{data.name} has no training images, only some to evaluate on")
    return data.train
