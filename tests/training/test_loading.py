"""Batches: the same whoever reads them, and what happens at an image that cannot be read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kernelwarehouse.data import DataSet, FileImages
from kernelwarehouse.data.batches import TrainingBatches
from kernelwarehouse.errors import DataError, UnreadableImageError
from kernelwarehouse.training.augment import evaluation_transform, training_transform
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.loading import (
    Batch,
    EvaluationImages,
    TrainingImages,
    evaluation_loader,
    read_batches,
    training_loader,
)
from kernelwarehouse.training.recipe import Recipe, load_recipe


def load_all(data: DataSet, recipe: Recipe, workers: int, start_step: int = 0) -> list[Batch]:
    images = TrainingImages(data.train, training_transform(recipe, 16), seed=3)
    batches = TrainingBatches(len(data.train.labels), 16, epochs=2, seed=3, start_step=start_step)
    return list(training_loader(images, batches, workers, Processes()))


def test_augmentation_depends_on_epoch_and_image_only(striped: DataSet, recipe: Recipe) -> None:
    alone = load_all(striped, recipe, workers=0)
    torch.rand(7), np.random.rand(7)
    helped = load_all(striped, recipe, workers=2)
    assert len(alone) == len(helped) == 8
    for first, second in zip(alone, helped, strict=True):
        assert torch.equal(first.images, second.images)
        assert torch.equal(first.targets, second.targets)
    late = load_all(striped, recipe, workers=1, start_step=3)
    assert all(torch.equal(a.images, b.images) for a, b in zip(alone[3:], late, strict=True))


def test_epochs_are_augmented_differently(striped: DataSet, recipe: Recipe) -> None:
    images = TrainingImages(striped.train, training_transform(recipe, 16), seed=3)
    assert not torch.equal(images[0, 5].image, images[1, 5].image)


@pytest.mark.parametrize("name", ["traditional", "advanced", "small", "finetune"])
def test_transforms_give_the_size_asked_for(name: str) -> None:
    picture = Image.new("RGB", (50, 40), (124, 116, 104))
    recipe = load_recipe(name)
    for transform in (
        training_transform(recipe, 32),
        evaluation_transform(32, recipe.evaluation_crop, recipe.interpolation),
    ):
        assert transform(picture).shape == (3, 32, 32)
    # The mean colour of ImageNet becomes nearly zero.
    assert evaluation_transform(32, 1.0, "bilinear")(picture).abs().max() < 0.02


def test_strongest_randaugment_works() -> None:
    """At full magnitude timm posterises to 0 bits, which Pillow refuses."""
    transform = training_transform(load_recipe("advanced"), 32)
    [policy] = [part for part in transform.transforms[1].transforms if hasattr(part, "ops")]
    picture = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    names = [operation.name for operation in policy.ops]
    assert "PosterizeIncreasing" in names
    for operation in policy.ops:
        operation.prob, operation.magnitude, operation.magnitude_std = 1.0, 10, 0
        assert operation(picture).size == (32, 32)


@pytest.fixture
def files(tmp_path: Path) -> FileImages:
    """Six pictures, of which number 2 and 3 are broken."""
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (number * 40, 0, 0)).save(path)
    paths[2].write_bytes(b"no picture")
    paths[3].write_bytes(paths[4].read_bytes()[:40])
    return FileImages(paths, range(6))


def test_training_replaces_unreadable_images_by_the_next(files: FileImages) -> None:
    transform = evaluation_transform(8, 1.0, "bilinear")
    images = TrainingImages(files, transform, seed=0, unreadable="skip")
    sample = images[0, 2]
    assert sample.target == 4
    assert torch.equal(sample.image, images[0, 4].image)
    assert [problem.split(": ")[0][-5:] for problem in sample.unreadable] == ["2.png", "3.png"]
    with pytest.raises(UnreadableImageError, match=r"2\.png"):
        TrainingImages(files, transform, seed=0)[0, 2]


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "only.png"
    path.write_bytes(b"")
    images = TrainingImages(FileImages([path], [0]), evaluation_transform(8, 1.0, "bilinear"), 0, "skip")
    with pytest.raises(DataError, match=r"none of the 1 training images can be read.*only\.png"):
        images[0, 0]


def test_evaluation_leaves_unreadable_images_out(files: FileImages) -> None:
    images = EvaluationImages(files, evaluation_transform(8, 1.0, "bilinear"), "skip")
    batches = list(evaluation_loader(images, 6, batch_size=2, workers=0, processes=Processes()))
    assert [batch.targets.tolist() for batch in batches] == [[0, 1], [], [4, 5]]
    assert len(batches[1].unreadable) == 2


def test_images_of_different_sizes_cannot_be_stacked(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for size, path in zip((8, 9), paths, strict=True):
        Image.new("RGB", (size, size)).save(path)
    images = EvaluationImages(FileImages(paths, [0, 0]), lambda image: torch.zeros(3, *image.size))
    with pytest.raises(DataError, match=r"different sizes.*set the recipe's image_size"):
        list(evaluation_loader(images, 2, batch_size=2, workers=0, processes=Processes()))


def test_error_in_a_worker_reads_as_if_it_were_here(files: FileImages) -> None:
    images = EvaluationImages(files, evaluation_transform(8, 1.0, "bilinear"))
    for workers in (0, 1):
        loader = evaluation_loader(images, 6, batch_size=2, workers=workers, processes=Processes())
        with pytest.raises(UnreadableImageError) as caught:
            list(read_batches(loader))
        assert str(caught.value).startswith(files.name(2))
        assert "Traceback" not in str(caught.value)
