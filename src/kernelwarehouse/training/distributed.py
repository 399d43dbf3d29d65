"""One process or many: what torchrun tells us, and the few things that processes exchange."""

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.rendezvous import rendezvous

from kernelwarehouse.errors import KernelWarehouseError, TrainingError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """This process among those of the run. Alone unless torchrun started it."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """The one process that writes files and talks to the user."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world_size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank, in every process."""
        if self.world_size == 1:
            return [value]
        box: list[Any] = [None] * self.world_size
        distributed.all_gather_object(box, value)
        return box

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process. On the CPU, so that a GPU's queue is not waited for."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        distributed.all_reduce(flags, op=distributed.ReduceOp.MAX)
        return bool(flags.item())

    def in_main(self, action: Callable[[], Result]) -> Result | None:
        """Do something in the main process only. An error of ours there is raised in all, so that none waits for it."""
        result, problem = None, None
        if self.is_main:
            try:
                result = action()
            except KernelWarehouseError as error:
                problem = error
        problem = self.gather(problem)[0]
        if problem is not None:
            raise problem
        return result

    def equalise_buffers(self, model: nn.Module) -> None:
        """Give every process the main process's running statistics, which batches of their own have moved apart."""
        if self.world_size > 1:
            for buffer in model.buffers():
                distributed.broadcast(buffer, src=0)


def is_main_process() -> bool:
    """Whether this is the process that writes and talks, as torchrun numbers them; also before and after they join."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def join_processes(device: str = "") -> Iterator[Processes]:
    """The processes of this run: those torchrun started, joined over NCCL (for tensors on GPUs) and gloo (for others),
    or just this one."""
    local_rank, local_world_size = _told_by_torchrun("LOCAL_RANK", 0), _told_by_torchrun("LOCAL_WORLD_SIZE", 1)
    chosen = _choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if _told_by_torchrun("WORLD_SIZE", 1) == 1:
        yield Processes(device=chosen)
        return
    try:
        store, rank, world_size = next(rendezvous("env://"))
    except ValueError as error:
        raise TrainingError(f"WORLD_SIZE is set, but not by torchrun: {error}; use torchrun, or unset it") from error
    # torchrun may keep one store over its restarts. Without a prefix, a restarted process can read there the address of
    # one that was killed, and fail to connect to it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = distributed.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield Processes(
            rank=rank,
            world_size=world_size,
            local_world_size=local_world_size,
            device=chosen,
        )
    finally:
        # DDP must go before its group: if it is what lets go of the group, torch may wait for itself. It is in a circle
        # of references, so that it is not gone when nothing uses it any more. (An error on its way may still hold it.)
        gc.collect()
        distributed.destroy_process_group()


def _told_by_torchrun(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise TrainingError(f"the environment has {variable}={text!r}; torchrun sets it to a number, so unset it")
    return int(text)


def _choose_device(name: str, local_rank: int) -> torch.device:
    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise TrainingError(f"device {name!r} is not for training here; expected cpu, cuda or cuda:N")
    device = torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError(f"device {name!r} was asked for, but torch finds no usable GPU; use --device cpu")
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise TrainingError(
            f"device '{device}' is wanted, but torch finds {torch.cuda.device_count()} GPUs, counted from cuda:0"
        )
    return device
