"""Images are kept apart evenly, the same ones for ever, and test images are in a file of their own."""

from pathlib import Path

import numpy as np
import pytest

from kernelwarehouse.data import open_dataset
from kernelwarehouse.errors import DataError
from kernelwarehouse.study.split import choose_kept, make_split


def test_every_image_is_in_one_place(striped_npz: Path, tmp_path: Path) -> None:
    split = make_split(str(striped_npz), 16, 0, tmp_path)
    whole, data, test = (open_dataset(str(path)) for path in (striped_npz, split.train, split.test))
    assert test.train is None
    assert np.array_equal(test.validation.pixels, whole.validation.pixels)
    assert data.classes == test.classes == whole.classes
    assert np.bincount(data.validation.labels).tolist() == [4] * 4
    assert len(data.train.labels) == 48

    def images(*parts: np.ndarray) -> list[bytes]:
        return sorted(image.tobytes() for part in parts for image in part)

    assert images(data.train.pixels, data.validation.pixels) == images(whole.train.pixels)
    labelled = {image.tobytes(): label for image, label in zip(whole.train.pixels, whole.train.labels, strict=True)}
    assert all(labelled[image.tobytes()] == y for image, y in zip(data.train.pixels, data.train.labels, strict=True))


def test_the_seed_decides_and_the_choice_never_changes() -> None:
    labels = np.arange(20) % 2
    assert np.flatnonzero(choose_kept(labels, 2, 6, 0)).tolist() == [2, 3, 4, 5, 10, 15]
    assert np.flatnonzero(choose_kept(labels, 2, 6, 1)).tolist() != [2, 3, 4, 5, 10, 15]


def test_a_split_is_written_once_and_beside_others(striped_npz: Path, tmp_path: Path) -> None:
    first = make_split(str(striped_npz), 16, 0, tmp_path)
    written = first.train.stat().st_mtime_ns
    assert make_split(str(striped_npz), 16, 0, tmp_path) == first
    assert first.train.stat().st_mtime_ns == written
    other = make_split(str(striped_npz), 16, 1, tmp_path)
    assert other.train != first.train
    assert other.digest == first.digest
    assert make_split("embedded", 1000, 0, tmp_path).digest != first.digest


@pytest.mark.parametrize(
    ("kept", "message"),
    [(15, r"kept \(=15\) must be a multiple of the 4 classes"), (64, r"leave some of the 16 training images")],
)
def test_uneven_and_whole_sets_are_refused(striped_npz: Path, tmp_path: Path, kept: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_split(str(striped_npz), kept, 0, tmp_path)
    assert not list(tmp_path.iterdir())


def test_files_of_images_are_refused(striped_npz: Path, tmp_path: Path) -> None:
    test = make_split(str(striped_npz), 16, 0, tmp_path).test
    with pytest.raises(DataError, match="a study wants images to train on and to test on as arrays"):
        make_split(str(test), 16, 0, tmp_path)
