"""A whole run of any task: steps, evaluation, checkpoints, metrics. Started again, it goes on where it was."""

import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from kernelwarehouse.assemble import route_table
from kernelwarehouse.data.batches import TrainingBatches
from kernelwarehouse.data.images import DataSet
from kernelwarehouse.errors import CheckpointError, ConfigError, DivergedError, Terminated, TrainingError
from kernelwarehouse.training.classification import Classification
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.loading import (
    check_workers,
    default_workers,
    evaluation_loader,
    read_batches,
    training_loader,
)
from kernelwarehouse.training.metrics import MetricsLog
from kernelwarehouse.training.progress import Display
from kernelwarehouse.training.recipe import EngineRecipe
from kernelwarehouse.training.run_folder import STATE_FILE, RunFolder
from kernelwarehouse.training.settings import EngineSettings, RunSettings
from kernelwarehouse.training.task import Evaluated, ReadTogether, Task, Unreadable
from kernelwarehouse.training.termination import Termination
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
        for name, least in (("report_every", 1), ("device_batch_size", 0), ("checkpoint_seconds", 0)):
            if not getattr(self, name) >= least:  # so that NaN is refused as well
                raise ConfigError(f"{name} (={getattr(self, name)}) must be at least {least}")
        check_workers(self.workers)


def accumulation_parts(recipe: EngineRecipe, options: RunOptions, processes: Processes) -> int:
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


class Report(NamedTuple):
    """What the log gets: after every few steps (`kind` "step") and after every epoch ("epoch")."""

    kind: str
    step: int
    values: dict[str, Any]


class Run:
    """One run of one model on one task, as its settings say. A data set stands for the task of telling its classes
    apart."""

    def __init__(
        self,
        model: nn.Module,
        task: Task[Any] | DataSet,
        settings: EngineSettings,
        folder: RunFolder,
        *,
        options: RunOptions,
        processes: Processes,
        display: Display,
    ) -> None:
        self.task = task if isinstance(task, Task) else _classifying(task, settings)
        self.settings = settings
        self.recipe = recipe = settings.recipe
        self.folder = folder
        self.options = options
        self.processes = processes
        self.display = display
        self.termination = Termination()
        self.workers = default_workers(processes) if options.workers is None else options.workers
        self.parts = accumulation_parts(recipe, options, processes)
        self.batches = TrainingBatches(
            self.task.training_count,
            recipe.batch_size,
            recipe.epochs,
            settings.seed,
            accumulation=self.parts,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        self.trainer = Trainer(
            model,
            recipe,
            objective=self.task.objective(),
            steps_per_epoch=self.batches.steps_per_epoch,
            seed=settings.seed,
            processes=processes,
        )
        # Part of the checkpoint: the losses since the last report and their sum over the epoch before that, whether the
        # epoch has still to be evaluated, the best value, and the images that could not be read.
        self.losses: list[Tensor] = []
        self.loss_sum = 0.0
        self.evaluation_due = False
        self.best = -1.0
        self.unreadable: set[str] = set()
        # How layers are evaluated here, and what each process has told of that: another way rounds otherwise.
        self.routes: route_table.Choices = {}
        self.shared_routes: list[dict[str, Any]] = []
        self._problems: list[str] = []

    @property
    def _best_name(self) -> str:
        """In a checkpoint."""
        return f"best_{self.task.best_by}"

    def train(self) -> None:
        """Start the run, or resume it, and train to the end of the last epoch.

        SIGTERM ends it after the step that is being taken: a checkpoint is written, and `Terminated` raised. Ctrl-C
        ends it at once.
        """
        with self.termination.watched(), ExitStack() as opened:
            opened.callback(self.trainer.let_go_of_processes)
            self.processes.in_main(lambda: opened.enter_context(self.folder.claimed(self.settings)))
            self._resume()
            opened.enter_context(route_table.keeping(self.routes))
            log = self.processes.in_main(
                lambda: opened.enter_context(closing(MetricsLog(self.folder, self.trainer.steps_done)))
            )
            opened.callback(self.display.stop)
            self.display.start(self.trainer.steps_done, self.batches.steps)
            for report in opened.enter_context(closing(self.train_and_report())):
                if log is not None:
                    log.write(*report)
            self.termination.check_interrupt()

    def _resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        state = self.folder.read_state()
        steps = self.processes.gather(_steps_done(state, self.folder))
        if len(set(steps)) > 1:
            raise TrainingError(
                f"the processes find checkpoints of different steps {steps} in {self.folder.path}; "
                "it must be on storage that all of them share"
            )
        if state is None:
            return
        if steps[0] > self.batches.steps:
            last = self.folder.path / "last"
            raise CheckpointError(f"{last} is at step {steps[0]}, but the run has {self.batches.steps} steps")
        self.trainer.load_state_dict(state["trainer"])
        try:
            self.loss_sum = float(state["loss_sum"])
            self.best = float(state[self._best_name])
            self.unreadable = {str(problem) for problem in state["unreadable"]}
            # Not in the checkpoints of runs before format 2, which were written only where neither is pending.
            losses = torch.tensor(state.get("losses", []), dtype=torch.float64, device=self.processes.device)
            self.losses = list(losses)
            self.evaluation_due = bool(state.get("evaluation_due", False))
            self.shared_routes = list(state.get("routes", []))  # as in those before version 0.3
            for choices in self.shared_routes[self.processes.rank :][:1]:
                self.routes.update(route_table.from_json(choices, "the checkpoint"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder.path / 'last' / STATE_FILE} is not the state of a run: {error}"
            ) from error
        self.batches.start_step = self.trainer.steps_done
        if self.trainer.steps_done == self.batches.steps and not self.evaluation_due:
            self.display.say(f"{self.folder.path} is finished: {self.recipe.epochs} epochs")
        else:
            epoch = self.trainer.steps_done / self.batches.steps_per_epoch
            self.display.say(f"resuming {self.folder.path} at step {self.trainer.steps_done} (epoch {epoch:.2f})")

    def train_and_report(self) -> Generator[Report, None, None]:
        """Take all steps that are left, evaluate after every epoch and write checkpoints; yield what to log."""
        samples = self.task.training_samples(self.settings.seed, self.options.unreadable)
        loader = training_loader(samples, self.batches, self.workers, self.processes, self.task.collate)
        with closing(read_batches(loader)) as parts:
            yield from self._train_on(parts)

    def _train_on(self, parts: Iterator[ReadTogether]) -> Iterator[Report]:
        timed, clock, saved = 0, time.monotonic(), time.monotonic()
        while self.evaluation_due or self.trainer.steps_done < self.batches.steps:
            self.termination.check_interrupt()
            reported = False
            if not self.evaluation_due:  # else the run was ended between the last step of an epoch and its evaluation
                self._take_step(list(islice(parts, self.parts)))
                timed += 1
                reported = self.evaluation_due or self.trainer.steps_done % self.options.report_every == 0
                if reported:
                    speed = timed * self.recipe.batch_size / (time.monotonic() - clock)
                    yield Report("step", self.trainer.steps_done, self._report_steps(speed))
                    timed, clock = 0, time.monotonic()
                if self.processes.any(self.termination.asked):
                    self._end_early()
            epoch_ends = self.evaluation_due
            if epoch_ends:
                yield Report("epoch", self.trainer.steps_done, self._finish_epoch())
            if epoch_ends or (reported and time.monotonic() - saved >= self.options.checkpoint_seconds):
                self._write_last()
                clock = saved = time.monotonic()

    def _take_step(self, batch: list[ReadTogether]) -> None:
        self._problems += [problem for part in batch for problem in part.unreadable]
        self.losses.append(self.trainer.step(batch))
        self.evaluation_due = self.trainer.steps_done % self.batches.steps_per_epoch == 0

    def _shared_losses(self) -> Tensor:
        """The losses since the last report, each the mean over all processes. Stops if one is not finite."""
        if not self.losses:
            return torch.empty(0)
        local = torch.stack([loss.double() for loss in self.losses])
        values = self.processes.sum(local) / self.processes.world_size
        finite = values.isfinite()
        if not finite.all():
            first = int((~finite).nonzero()[0])
            step = self.trainer.steps_done - len(values) + first + 1
            raise DivergedError(
                f"the loss of step {step} is {float(values[first])}; {self.folder.kept()}. "
                "A smaller learning_rate, a longer warm-up or clip_norm may help"
            )
        if self.options.unreadable == "skip":
            for problem in sorted({name for share in self.processes.gather(self._problems) for name in share}):
                self._note_unreadable(problem)
        self._problems = []
        return values

    def _end_early(self) -> NoReturn:
        """Write where the run is, as SIGTERM asked for, and end."""
        self.losses = list(self._shared_losses())
        self._share_routes()
        self._write_last()
        # torchrun ends all processes when the first of them has ended, so none may before the checkpoint is written.
        self.processes.gather(None)
        raise Terminated(
            f"ended by SIGTERM after step {self.trainer.steps_done} of {self.batches.steps}; the checkpoint is in "
            f"{self.folder.path / 'last'}, and the same command goes on from there"
        )

    def _share_routes(self) -> None:
        """Tell the process that writes checkpoints how layers are evaluated here, where that is new to it."""
        rank, own = self.processes.rank, route_table.to_json(self.routes)
        if self.processes.any(rank >= len(self.shared_routes) or own != self.shared_routes[rank]):
            self.shared_routes = self.processes.gather(own)

    def _note_unreadable(self, problem: str) -> None:
        if problem not in self.unreadable:
            self.unreadable.add(problem)
            self.display.say(f"unreadable image, skipped (number {len(self.unreadable)}): {problem}")

    def _epoch_name(self) -> str:
        return f"{-(-self.trainer.steps_done // self.batches.steps_per_epoch)}/{self.recipe.epochs}"

    def _report_steps(self, images_per_second: float) -> dict[str, Any]:
        """The steps since the last report, which are counted towards the epoch now."""
        losses = self._shared_losses()
        self._share_routes()
        self.losses = []
        self.loss_sum += float(losses.sum())
        values = {
            "loss": float(losses.mean()),
            "learning_rate": self.trainer.learning_rate,
            "tau": self.trainer.tau,
            "images_per_second": images_per_second,
        }
        steps_left = self.batches.steps - self.trainer.steps_done
        seconds_left = steps_left * self.recipe.batch_size / images_per_second
        self.display.step(self.trainer.steps_done, self._epoch_name(), values, seconds_left)
        return values

    def _finish_epoch(self) -> dict[str, Any]:
        try:
            evaluation = self.evaluate()
        except _EvaluationLeft:
            self._end_early()
        self._share_routes()
        values = evaluation.as_dict()
        reached = float(values[self.task.best_by])
        best = reached > self.best
        values |= {
            "training_loss": self.loss_sum / self.batches.steps_per_epoch,
            "best": best,
            "tau": self.trainer.tau,
            "unreadable": len(self.unreadable),
        }
        self.loss_sum = 0.0
        self.evaluation_due = False
        self.display.epoch(self._epoch_name(), values, self.task.told(values))
        if best:
            self.best = reached
            if self.processes.is_main:
                self._refuse_spoiled_weights()
                self.folder.write("best", self.trainer.steps_done, self.trainer.result)
        return values

    def evaluate(self) -> Evaluated:
        """The network to keep, on all validation images."""
        samples = self.task.validation_samples(self.options.unreadable)
        size = self.task.evaluation_batch or self.recipe.batch_size // self.processes.world_size // self.parts
        count = self.task.validation_count
        loader = evaluation_loader(samples, count, size, self.workers, self.processes, self.task.collate)
        with closing(read_batches(loader)) as batches:
            watched = self._until_asked_to_end(batches)
            evaluation = self.task.evaluate(self.trainer.result, watched, self.processes, self.recipe.precision)
        for problem in evaluation.unreadable:
            self._note_unreadable(problem)
        return evaluation

    def _until_asked_to_end(self, batches: Iterator[ReadTogether]) -> Iterator[ReadTogether]:
        """One process leaves an evaluation at any batch. Several could not agree on one, so they finish it."""
        for batch in batches:
            self.termination.check_interrupt()
            if self.termination.asked and self.processes.world_size == 1:
                raise _EvaluationLeft
            yield batch

    def _refuse_spoiled_weights(self) -> None:
        """They must not replace a good checkpoint."""
        name = self.trainer.spoiled_weight()
        if name is not None:
            raise DivergedError(
                f"after step {self.trainer.steps_done}, {name} is not finite; {self.folder.kept()}. "
                "A smaller learning_rate, a longer warm-up or clip_norm may help"
            )

    def _write_last(self) -> None:
        if not self.processes.is_main:
            return
        self._refuse_spoiled_weights()
        state = {
            "trainer": self.trainer.state_dict(),
            "losses": [float(loss) for loss in self.losses],
            "loss_sum": self.loss_sum,
            "evaluation_due": self.evaluation_due,
            self._best_name: self.best,
            "unreadable": sorted(self.unreadable),
            "routes": self.shared_routes,
        }
        self.folder.write("last", self.trainer.steps_done, self.trainer.result, state)


def _classifying(data: DataSet, settings: EngineSettings) -> Task[Any]:
    if not isinstance(settings, RunSettings):
        raise TrainingError(f"{type(settings).__name__} are not for classification; pass the task that they are for")
    return Classification(data, settings)


def _steps_done(state: dict[str, Any] | None, folder: RunFolder) -> int:
    """How far a checkpoint is; 0 if there is none."""
    if state is None:
        return 0
    trainer = state.get("trainer")
    steps = trainer.get("steps_done") if isinstance(trainer, dict) else None
    if type(steps) is not int or steps < 0:
        raise CheckpointError(
            f"{folder.path / 'last' / STATE_FILE} is not the state of a run: it does not say its step"
        )
    return steps


class _EvaluationLeft(Exception):
    """SIGTERM came while the epoch was evaluated."""
