"""The order of images: complete, shuffled, the same for any number of processes, and from any step on."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwarehouse.data.batches import EvaluationShare, TrainingBatches
from kernelwarehouse.errors import TrainingError


def steps(batches: TrainingBatches) -> list[list[tuple[int, int]]]:
    """Micro-batches joined to the batches of steps."""
    parts = list(batches)
    count = batches.accumulation
    return [list(chain(*parts[i : i + count])) for i in range(0, len(parts), count)]


def test_an_epoch_takes_each_image_at_most_once_and_epochs_differ() -> None:
    batches = TrainingBatches(103, 10, epochs=2, seed=1)
    first, second = steps(batches)[:10], steps(batches)[10:]
    assert {epoch for batch in first for epoch, _ in batch} == {0}
    assert {epoch for batch in second for epoch, _ in batch} == {1}
    for epoch in (first, second):
        indices = [index for batch in epoch for _, index in batch]
        assert len(set(indices)) == len(indices) == 100
    assert [i for batch in first for _, i in batch] != [i for batch in second for _, i in batch]
    assert [i for batch in first for _, i in batch] != sorted(i for batch in first for _, i in batch)


@given(
    world=st.sampled_from([1, 2, 4]),
    accumulation=st.sampled_from([1, 2, 3]),
    per_process=st.integers(1, 3),
    images=st.integers(40, 60),
    seed=st.integers(0, 3),
)
def test_processes_and_parts_share_the_batches_of_one(
    world: int, accumulation: int, per_process: int, images: int, seed: int
) -> None:
    size = world * accumulation * per_process
    alone = steps(TrainingBatches(images, size, epochs=2, seed=seed))
    shares = [
        steps(
            TrainingBatches(images, size, epochs=2, seed=seed, accumulation=accumulation, rank=rank, world_size=world)
        )
        for rank in range(world)
    ]
    for number, batch in enumerate(alone):
        dealt = [share[number] for share in shares]
        assert sorted(chain(*dealt)) == sorted(batch)
        assert {len(part) for part in dealt} == {size // world}


@given(start=st.integers(0, 20))
def test_a_later_start_gives_the_rest(start: int) -> None:
    whole = list(TrainingBatches(53, 5, epochs=2, seed=0))
    rest = TrainingBatches(53, 5, epochs=2, seed=0, start_step=start)
    assert list(rest) == whole[start:]
    assert len(rest) == len(whole) - start


def test_seeds_give_other_orders() -> None:
    assert list(TrainingBatches(50, 5, epochs=1, seed=0)) != list(TrainingBatches(50, 5, epochs=1, seed=1))


def test_batches_that_cannot_be_made() -> None:
    with pytest.raises(TrainingError, match="batch size 64 is larger than the 10 training images"):
        TrainingBatches(10, 64, epochs=1, seed=0)
    with pytest.raises(TrainingError, match="multiple of 6"):
        TrainingBatches(100, 8, epochs=1, seed=0, accumulation=2, world_size=3)


@given(images=st.integers(0, 20), world=st.integers(1, 6))
def test_evaluation_counts_every_image_once(images: int, world: int) -> None:
    shares = [EvaluationShare(images, rank=rank, world_size=world) for rank in range(world)]
    assert sorted(chain(*shares)) == list(range(images))
    assert sum(len(share) for share in shares) == images
