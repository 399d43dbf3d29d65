"""The temperature tau: part of a model's state, and the schedule that lowers it."""

import numbers
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kernelwarehouse.errors import KernelWarehouseError

_ONE = 2**62
TEMPERATURE_UNIT = 1 / _ONE


class HasTemperature(nn.Module):
    """A module whose output depends on tau, from 1 (start of training) to 0 (trained).

    Tau is stored as a 64-bit integer in units of 2^-62: weight averaging copies integers instead of averaging them
    (timm's `ModelEmaV3`; torch's `AveragedModel` copies all buffers unless told otherwise), and
    `model.to(torch.bfloat16)` leaves them alone. Doubles above 0.002 are stored exactly.
    """

    temperature: Tensor

    def __init__(self, tau: float = 1.0, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(round(tau * _ONE), dtype=torch.int64, device=device))

    @property
    def follows_temperature(self) -> bool:
        """Whether tau can be anything but 0 here."""
        return True

    def tau(self, dtype: torch.dtype) -> Tensor:
        return self.temperature.to(dtype) * TEMPERATURE_UNIT

    def set_temperature(self, tau: float) -> None:
        self.temperature.fill_(round(tau * _ONE))

    def get_temperature(self) -> float:
        return int(self.temperature.item()) / _ONE


def _holders(model: nn.Module) -> Iterator[HasTemperature]:
    found = False
    for module in model.modules():
        if isinstance(module, HasTemperature):
            found = True
            yield module
    if not found:
        raise KernelWarehouseError(
            f"{type(model).__name__} has no layer with a temperature; convert it with kernelwarehouse.convert first"
        )


def set_temperature(model: nn.Module, tau: float) -> None:
    """Set tau in every layer of the model: 1 is the start of training, 0 its end.

    Layers without a start strategy, and those that begin at their logits (`WarehouseConfig.begin`), stay at 0.

    Arguments:
        model: a model with converted layers; wrappers such as DistributedDataParallel may be around it.
        tau: a number from 0 to 1.

    Raises:
        KernelWarehouseError: for another number, or a model without a layer that has a temperature.

    Example:
        >>> import kernelwarehouse as kw
        >>> model = kw.create_model("kw1x_mobilenetv2_050", num_classes=2)
        >>> kw.set_temperature(model, 0.25)
        >>> kw.get_temperature(model)
        0.25
    """
    value: object = tau
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= 1:
        raise KernelWarehouseError(f"temperature is {tau!r}; a number from 0 to 1 is wanted")
    for module in _holders(model):
        module.set_temperature(float(tau))


def get_temperature(model: nn.Module) -> float:
    """The tau of the model's layers; the highest, where they differ.

    Arguments:
        model: a model with converted layers.

    Raises:
        KernelWarehouseError: for a model without a layer that has a temperature.
    """
    # Some layers stay at 0 whatever the others do, so the highest is the model's.
    return max(module.get_temperature() for module in _holders(model))


class TemperatureSchedule:
    """Lowers tau linearly from 1 to 0 over the first `steps` iterations: call `step()` after each of them.

    Sets the model's tau at once, so the first iteration runs at 1 (at 0 for `steps=0`, as fine-tuning wants). Layers
    that begin at their logits are at 0 throughout; a model of such layers alone needs no schedule, and is none the
    worse for one.

    Arguments:
        model: a model with converted layers.
        steps: iterations until tau is 0; the recipes of the paper are in `kernelwarehouse.training.recipes`.

    Raises:
        KernelWarehouseError: where `steps` is no whole number of 0 or more, or the model has no temperature.

    Example:
        >>> import kernelwarehouse as kw
        >>> model = kw.create_model("kw1x_mobilenetv2_050", num_classes=2)
        >>> schedule = kw.TemperatureSchedule(model, steps=4)
        >>> for iteration in range(3):
        ...     schedule.step()
        >>> schedule.temperature
        0.25
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        count: object = steps
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or int(count) < 0:
            raise KernelWarehouseError(f"steps is {steps!r}; a whole number of iterations, 0 or more, is wanted")
        self.model = model
        self._moves = any(module.follows_temperature for module in _holders(model))
        self.steps = int(steps)
        self.done = 0
        self._apply()

    @property
    def temperature(self) -> float:
        """The tau of the iteration to come."""
        return max(0.0, 1 - self.done / self.steps) if self.steps and self._moves else 0.0

    def step(self) -> None:
        """Go on to the next iteration."""
        self.done += 1
        if self.done <= self.steps:
            self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is, for a checkpoint."""
        return {"steps": self.steps, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, and set the model's tau to it."""
        counts = [state.get(key) for key in ("steps", "done")] if isinstance(state, dict) else [None]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise KernelWarehouseError(f"schedule state is {state!r}; whole numbers 'steps' and 'done' are wanted")
        self.steps, self.done = int(state["steps"]), int(state["done"])
        self._apply()

    def _apply(self) -> None:
        set_temperature(self.model, self.temperature)
