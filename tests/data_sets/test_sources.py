"""What can stand after --data, and what is said when it cannot."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kernelwarehouse.data import open_dataset
from kernelwarehouse.errors import DataError, UnreadableImageError


def make_npz(path: Path, **changes: np.ndarray) -> Path:
    generator = np.random.default_rng(0)
    arrays = {
        "x_train": generator.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8),
        "y_train": np.arange(12) % 3,
        "x_test": generator.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8),
        "y_test": np.arange(6) % 3,
    } | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def make_folder(root: Path, splits: dict[str, dict[str, int]]) -> Path:
    """Class folders with so many images each, below each split ('' for no split)."""
    for split, classes in splits.items():
        for number, (name, count) in enumerate(classes.items()):
            folder = root / split / name
            folder.mkdir(parents=True)
            for image in range(count):
                Image.new("RGB", (10, 10), (number * 20, image, 0)).save(folder / f"{image:03d}.png")
    return root


def test_embedded_images_are_balanced_and_complete() -> None:
    data = open_dataset("embedded")
    assert data.classes[0] == "t-shirt"
    assert data.classes[9] == "ankle boot"
    assert np.bincount(data.train.labels).tolist() == [500] * 10
    assert np.bincount(data.validation.labels).tolist() == [100] * 10
    assert data.train.load(0).size == (28, 28)
    assert data.train.load(0).mode == "RGB"


def test_npz_images_and_labels_are_those_of_the_file(tmp_path: Path) -> None:
    path = make_npz(tmp_path / "set.npz", classes=np.array(["a", "b", "c"]))
    data = open_dataset(str(path))
    assert data.classes == ("a", "b", "c")
    with np.load(path) as arrays:
        np.testing.assert_array_equal(np.asarray(data.train.load(5)), arrays["x_train"][5])
        np.testing.assert_array_equal(data.validation.labels, arrays["y_test"])
    assert "x_train[5]" in data.train.name(5)


def test_npz_without_class_names_counts_labels(tmp_path: Path) -> None:
    assert open_dataset(str(make_npz(tmp_path / "set.npz"))).classes == ("0", "1", "2")


def test_npz_to_evaluate_on_needs_no_training_images(tmp_path: Path) -> None:
    data = open_dataset(str(make_npz(tmp_path / "set.npz", x_train=None, y_train=None)))
    assert data.train is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None}, "holds x_train, y_test, y_train; expected"),
        ({"x_train": np.zeros((12, 8, 8, 3), dtype=np.float32)}, "float32 of shape"),
        ({"y_train": np.zeros(5, dtype=np.int64)}, "expected 12 whole numbers"),
        ({"y_test": np.arange(6), "classes": np.array(["a", "b"])}, "labels run from 0 to .*there are 2 classes"),
        ({"y_test": np.array([0, 1, -1, 0, 1, 2])}, "labels run from -1"),
        ({"x_test": np.zeros((0, 8, 8), np.uint8), "y_test": np.zeros(0, np.int64)}, "no validation images"),
    ],
)
def test_npz_that_makes_no_sense(tmp_path: Path, changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(str(make_npz(tmp_path / "set.npz", **changes)))


def test_file_that_is_no_npz(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    path.write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"set\.npz: not a readable"):
        open_dataset(str(path))


def test_npz_with_pickles_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, x_test=np.array([{"a": 1}], dtype=object), y_test=np.zeros(1, np.int64))
    with pytest.raises(DataError, match="not a readable"):
        open_dataset(str(path))


def test_imagenet_layout(tmp_path: Path) -> None:
    data = open_dataset(str(make_folder(tmp_path, {"train": {"cat": 3, "dog": 2}, "val": {"cat": 1, "dog": 1}})))
    assert data.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert data.validation.name(1).endswith("val/dog/000.png")
    assert data.train.load(4).getpixel((0, 0)) == (20, 1, 0)


def test_plain_class_folders_hold_out_every_tenth(tmp_path: Path) -> None:
    data = open_dataset(str(make_folder(tmp_path, {"": {"cat": 20, "dog": 11}})))
    assert [data.validation.name(i)[-11:] for i in range(3)] == ["cat/009.png", "cat/019.png", "dog/009.png"]
    assert len(data.train.labels) == 28
    assert not {data.train.name(i) for i in range(28)} & {data.validation.name(i) for i in range(3)}


def test_train_folder_alone_holds_out_too(tmp_path: Path) -> None:
    data = open_dataset(str(make_folder(tmp_path, {"train": {"cat": 10, "dog": 10}})))
    assert (len(data.train.labels), len(data.validation.labels)) == (18, 2)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({}, "empty of classes"),
        ({"train": {"cat": 2, "dog": 0}, "val": {"cat": 1, "dog": 1}}, "dog"),
        ({"train": {"cat": 2, "dog": 2}, "val": {"cat": 1, "cow": 1}}, "only one of them has cow, dog"),
        ({"": {"cat": 3}}, "none can be held out"),
    ],
)
def test_folders_that_make_no_sense(tmp_path: Path, splits: dict[str, dict[str, int]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(str(make_folder(tmp_path, splits)))


def test_unreadable_image_is_named(tmp_path: Path) -> None:
    root = make_folder(tmp_path, {"train": {"cat": 1}, "val": {"cat": 1}})
    whole = (root / "train/cat/000.png").read_bytes()
    (root / "train/cat/000.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableImageError, match=r"train/cat/000\.png"):
        open_dataset(str(root)).train.load(0)


def test_torchvision_set_is_read_from_its_files(tmp_path: Path) -> None:
    embedded = open_dataset("embedded")
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, images in (("train", embedded.train), ("t10k", embedded.validation)):
        pixels, labels = images.pixels[:20], images.labels[:20].astype(np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, 20, 28, 28) + pixels.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, 20) + labels.tobytes())
        for file in raw.glob(f"{prefix}-*-ubyte"):
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    data = open_dataset("fashionmnist", root=tmp_path)
    np.testing.assert_array_equal(np.asarray(data.train.load(7))[..., 0], embedded.train.pixels[7])
    np.testing.assert_array_equal(data.validation.labels, embedded.validation.labels[:20])
    assert data.classes[9] == "Ankle boot"


def test_torchvision_set_is_not_fetched_unasked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"CIFAR10 is not complete.*--download"):
        open_dataset("CIFAR10", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_data_lists_what_there_is() -> None:
    with pytest.raises(DataError, match=r"'no-such-set' is not there: expected 'embedded'.*CIFAR10"):
        open_dataset("no-such-set")
