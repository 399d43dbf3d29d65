"""One optimiser step after another: everything that changes with a step, and nothing about files or data sets."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kernelwarehouse.data.seeds import derive_seed, seed_generators
from kernelwarehouse.errors import CheckpointError, TrainingError
from kernelwarehouse.temperature import HasTemperature, TemperatureSchedule
from kernelwarehouse.training.classification import CrossEntropy
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.optimisation import make_optimizer, make_schedule
from kernelwarehouse.training.precision import autocast, gradient_scaler
from kernelwarehouse.training.recipe import EngineRecipe, Recipe
from kernelwarehouse.training.task import Objective, ReadTogether


class Trainer:
    """A network in training: weights, their average, optimiser, learning rate, temperature, and the step reached.

    `step` takes the micro-batches of one optimiser step. Temperature, learning rate and average move once per step,
    however many micro-batches and processes share it. `objective` is what a micro-batch's loss is; without one,
    `classes` are to be told apart.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: EngineRecipe,
        *,
        steps_per_epoch: int,
        classes: int = 0,
        objective: Objective[Any] | None = None,
        seed: int = 0,
        processes: Processes | None = None,
    ) -> None:
        self.processes = processes or Processes()
        self.recipe = recipe
        self.seed = seed
        self.steps_done = 0
        device = self.processes.device
        self._format = torch.channels_last if recipe.channels_last else torch.preserve_format
        if recipe.sync_batch_norm and self.processes.world_size > 1:
            if device.type != "cuda":
                raise TrainingError(
                    f"sync_batch_norm needs GPUs, this run is on {device.type}; set it to false (a network with "
                    "LayerNorm does not need it)"
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model.to(device).to(memory_format=self._format).train()  # type: ignore[call-overload]
        tau_steps = round(recipe.tau_epochs * steps_per_epoch)
        has_temperature = any(isinstance(module, HasTemperature) for module in model.modules())
        self.temperature = TemperatureSchedule(self.model, steps=tau_steps) if has_temperature else None
        self.average = (
            ModelEmaV3(self.model, decay=recipe.ema_decay, use_warmup=recipe.ema_warmup) if recipe.ema_decay else None
        )
        self.optimizer = make_optimizer(self.model, recipe)
        self.schedule = make_schedule(self.optimizer, recipe, steps_per_epoch)
        self.scaler = gradient_scaler(device, recipe.precision)
        self._objective = objective or _telling_apart(classes, recipe)
        self._network: nn.Module | None = self._wrap()

    def _wrap(self) -> nn.Module:
        network: nn.Module = torch.compile(self.model) if self.recipe.compile else self.model  # type: ignore[assignment]
        if self.processes.world_size == 1:
            return network
        devices = [self.processes.device] if self.processes.device.type == "cuda" else None
        return DistributedDataParallel(network, device_ids=devices, gradient_as_bucket_view=True)

    def let_go_of_processes(self) -> None:
        """For the end of training, as wrappers must go before the processes' group. A further step makes a new one."""
        self._network = None

    @property
    def result(self) -> nn.Module:
        """The network to evaluate and keep: the average if the recipe averages, else the trained one."""
        return self.average.module if self.average is not None else self.model

    @property
    def learning_rate(self) -> float:
        """The recipe's, at this step; groups with a factor have theirs times it."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"]) / float(group.get("lr_scale", 1.0))

    @property
    def tau(self) -> float | None:
        return self.temperature.temperature if self.temperature is not None else None

    def step(self, parts: Sequence[ReadTogether]) -> Tensor:
        """One optimiser step over this process's micro-batches; their mean loss, not yet waited for."""
        loss = torch.zeros((), device=self.processes.device)
        for number, part in enumerate(parts):
            # Drop path, dropout and mixing depend on the step and not on what was drawn before it.
            place = (self.seed, self.steps_done, number, self.processes.rank)
            seed_generators(derive_seed("step", *place))
            if self.processes.device.type == "cuda":
                torch.cuda.manual_seed(derive_seed("step", *place))
            loss += self._accumulate(part, len(parts), last=number == len(parts) - 1)
        if self.recipe.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.steps_done += 1
        self.schedule.step_update(self.steps_done)
        if self.temperature is not None:
            self.temperature.step()
        if self.average is not None:
            # Told the step, timm copies the model at the first one, also without a warm-up.
            self.average.update(self.model, step=self.steps_done if self.recipe.ema_warmup else None)
        return loss

    def _accumulate(self, part: ReadTogether, parts: int, *, last: bool) -> Tensor:
        """Add the gradient of one micro-batch; processes exchange gradients once, with the last."""
        device = self.processes.device
        prepared = self._objective.prepare(part, device, self._format)
        if self._network is None:
            self._network = self._wrap()
        network = self._network
        with network.no_sync() if isinstance(network, DistributedDataParallel) and not last else nullcontext():
            with autocast(device, self.recipe.precision):
                loss = self._objective.loss(network, prepared) / parts
            self.scaler.scale(loss).backward()
        return loss.detach()

    def spoiled_weight(self) -> str | None:
        """The first weight that is not finite. A step can spoil weights though its loss was finite."""
        names = (name for name, parameter in self.model.named_parameters() if not parameter.isfinite().all())
        return next(names, None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps_done": self.steps_done,
            "model": self.model.state_dict(),
            "average": self.average.module.state_dict() if self.average is not None else None,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "temperature": self.temperature.state_dict() if self.temperature is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            if self.average is not None:
                self.average.module.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.scaler.load_state_dict(state["scaler"])
            if self.temperature is not None:
                self.temperature.load_state_dict(state["temperature"])
            self.steps_done = state["steps_done"]
        except Exception as error:  # optimisers and schedules fail in many ways on a state that is not theirs
            raise CheckpointError(f"the saved state does not fit this network and recipe: {error}") from error


def _telling_apart(classes: int, recipe: EngineRecipe) -> Objective[Any]:
    if not isinstance(recipe, Recipe):
        raise TrainingError(f"a {type(recipe).__name__} does not say what the loss is; pass an objective")
    if classes < 1:
        raise TrainingError(f"classes (={classes}) must be the number of classes to tell apart; or pass an objective")
    return CrossEntropy(recipe, classes)
