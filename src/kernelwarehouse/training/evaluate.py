"""Accuracy and loss over a data set, counted exactly however many processes share the work."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kernelwarehouse.errors import DataError
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.loading import Batch
from kernelwarehouse.training.precision import autocast


@dataclass(frozen=True)
class Evaluation:
    """Shares of images from 0 to 1, and the mean cross entropy."""

    top1: float
    top5: float
    loss: float
    images: int
    unreadable: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"unreadable": len(self.unreadable)}


@torch.inference_mode()
def evaluate(
    network: nn.Module, batches: Iterable[Batch], processes: Processes, precision: str = "float32"
) -> Evaluation:
    """Evaluate this process's batches and add up over all processes. The network is in eval mode during it."""
    was_training = network.training
    network.eval()
    processes.equalise_buffers(network)
    # Sums of counts and losses in float64: exact counts, and a loss that hardly depends on how images were dealt.
    sums = torch.zeros(4, dtype=torch.float64, device=processes.device)
    unreadable: list[str] = []
    for batch in batches:
        unreadable += batch.unreadable
        if not len(batch.targets):
            continue
        images = batch.images.to(processes.device, non_blocking=True)
        targets = batch.targets.to(processes.device, non_blocking=True)
        with autocast(processes.device, precision):
            logits = network(images)
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        losses = F.cross_entropy(logits.float(), targets, reduction="sum")
        sums += torch.stack([best[:, 0].sum(), best.sum(), losses, torch.tensor(len(targets), device=losses.device)])
    network.train(was_training)
    top1, top5, loss, images_seen = processes.sum(sums).tolist()
    names = tuple(sorted({name for share in processes.gather(unreadable) for name in share}))
    if images_seen == 0:
        raise DataError(f"none of the {len(names)} images to evaluate on can be read; the first: {names[0]}")
    return Evaluation(top1 / images_seen, top5 / images_seen, loss / images_seen, int(images_seen), names)
