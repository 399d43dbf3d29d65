"""What training is for: all that differs between classification and detection, in one place. The rest is the engine's.

The engine (`run`, `trainer`, `run_folder`, ...) takes steps, evaluates after every epoch, keeps the best network and
goes on after a kill. What a batch is made of, what its loss is and how good a network is, it asks the task.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from kernelwarehouse.training.distributed import Processes

Unreadable = Literal["stop", "skip"]
"""What to do at an image that cannot be read."""


class ReadTogether(Protocol):
    """A micro-batch, as far as the engine looks into it."""

    @property
    def unreadable(self) -> Sequence[str]:
        """Images that could not be read, each with the reason."""


class Evaluated(Protocol):
    """How good a network is."""

    @property
    def unreadable(self) -> Sequence[str]: ...

    def as_dict(self) -> dict[str, Any]:
        """What the log gets; the value named `Task.best_by` is among it."""


BatchKind = TypeVar("BatchKind", bound=ReadTogether)


class Objective(Protocol[BatchKind]):
    """From a micro-batch to its loss."""

    def prepare(self, part: BatchKind, device: torch.device, memory_format: torch.memory_format) -> BatchKind:
        """The batch where the network is, as the network is to see it. Draws from the global generators."""

    def loss(self, network: nn.Module, part: BatchKind) -> Tensor:
        """The mean loss of a prepared micro-batch; called under autocast."""


class Task(ABC, Generic[BatchKind]):
    """One task on one data set. Samples must depend on their place alone, so that a resumed run reads what it would
    have read."""

    best_by: ClassVar[str]
    """The value of an evaluation that decides which network is kept as the best: the one where it is highest."""

    evaluation_batch: ClassVar[int | None] = None
    """How many validation samples a process takes at once, where it changes what is found; by default as many as in
    training."""

    training_count: int
    validation_count: int

    @abstractmethod
    def training_samples(self, seed: int, unreadable: Unreadable) -> Dataset[Any]:
        """Augmented samples by `(epoch, index)`."""

    @abstractmethod
    def validation_samples(self, unreadable: Unreadable) -> Dataset[Any]:
        """Samples by index."""

    @property
    @abstractmethod
    def collate(self) -> Callable[[Sequence[Any]], BatchKind]:
        """From samples to a micro-batch; to be sent to worker processes."""

    @abstractmethod
    def objective(self) -> Objective[BatchKind]: ...

    @abstractmethod
    def evaluate(
        self, network: nn.Module, batches: Iterable[BatchKind], processes: Processes, precision: str
    ) -> Evaluated:
        """On this process's share of the validation samples and those of all others, with the same result in each."""

    @abstractmethod
    def told(self, values: dict[str, Any]) -> list[str]:
        """An epoch's values as the display shows them."""
