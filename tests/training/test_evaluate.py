"""Counts that are exact, against counting by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernelwarehouse.errors import DataError
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.evaluate import evaluate
from kernelwarehouse.training.loading import Batch


class Echo(nn.Module):
    """The images are the logits."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images


def test_counts_every_image_of_uneven_batches_once() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(23, 10, generator=generator)
    targets = torch.randint(0, 10, (23,), generator=generator)
    batches = [Batch(logits[i : i + 8], targets[i : i + 8], []) for i in range(0, 23, 8)]
    result = evaluate(Echo().train(), batches, Processes())
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)
    assert result.images == 23
    assert result.top1 == pytest.approx(float((ranks < 1).double().mean()))
    assert result.top5 == pytest.approx(float((ranks < 5).double().mean()))
    assert result.loss == pytest.approx(float(F.cross_entropy(logits, targets)), rel=1e-6)


def test_fewer_classes_than_five() -> None:
    result = evaluate(Echo(), [Batch(torch.eye(3), torch.tensor([0, 1, 0]), [])], Processes())
    assert (result.top1, result.top5) == (pytest.approx(2 / 3), 1.0)


def test_mode_is_restored_and_unreadable_images_are_named() -> None:
    network = Echo().train()
    batches = [Batch(torch.empty(0), torch.empty(0), ["b: bad", "a: bad"]), Batch(torch.eye(2), torch.arange(2), [])]
    result = evaluate(network, batches, Processes())
    assert network.training
    assert result.unreadable == ("a: bad", "b: bad")
    assert result.images == 2


def test_nothing_to_count_is_an_error() -> None:
    with pytest.raises(DataError, match="none of the 1 images to evaluate on can be read; the first: a: bad"):
        evaluate(Echo(), [Batch(torch.empty(0), torch.empty(0), ["a: bad"])], Processes())
