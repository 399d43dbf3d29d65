"""From what a user writes after `--data` to a `DataSet`."""

import os
import zipfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torchvision
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from kernelwarehouse.data.images import ArrayImages, DataSet, FileImages, TorchvisionImages
from kernelwarehouse.errors import DataError

TRAIN_FOLDERS = ("train",)
VALIDATION_FOLDERS = ("val", "validation", "test")

# Every tenth image of a class is kept for validation where a folder has no split of its own.
HOLD_OUT = 10

# More classes than any data set has: a label beyond is a mistake, and a network for it would not fit into memory.
MOST_CLASSES = 10_000_000

# Which arguments torchvision's classes take for the two splits.
_BY_TRAIN_FLAG: tuple[dict[str, Any], dict[str, Any]] = ({"train": True}, {"train": False})
_BY_SPLIT: tuple[dict[str, Any], dict[str, Any]] = ({"split": "train"}, {"split": "test"})
TORCHVISION_SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "CIFAR10": _BY_TRAIN_FLAG,
    "CIFAR100": _BY_TRAIN_FLAG,
    "DTD": _BY_SPLIT,
    "FashionMNIST": _BY_TRAIN_FLAG,
    "FGVCAircraft": ({"split": "trainval"}, {"split": "test"}),
    "Flowers102": _BY_SPLIT,
    "Food101": _BY_SPLIT,
    "GTSRB": _BY_SPLIT,
    "KMNIST": _BY_TRAIN_FLAG,
    "MNIST": _BY_TRAIN_FLAG,
    "OxfordIIITPet": ({"split": "trainval"}, {"split": "test"}),
    "STL10": _BY_SPLIT,
    "SVHN": _BY_SPLIT,
}


def open_dataset(where: str, *, root: str | Path = ".", download: bool = False) -> DataSet:
    """Open `embedded`, an `.npz` file, a folder of class folders (with or without train/ and val/), or a torchvision
    name such as `CIFAR10` (below `root`; fetched only if `download`)."""
    if where == "embedded":
        with as_file(files("kernelwarehouse.data") / "embedded_fashion_mnist.npz") as path:
            return _open_npz(path, "embedded")
    path = Path(where)
    if os.path.isdir(path):  # unlike the methods of Path, these take names that no file can have
        return _open_folder(path)
    if os.path.isfile(path):
        return _open_npz(path, where)
    torchvision_name = {name.lower(): name for name in TORCHVISION_SETS}.get(where.lower())
    if torchvision_name is not None:
        return _open_torchvision(torchvision_name, Path(root), download)
    raise DataError(
        f"data {where!r} is not there: expected 'embedded', an .npz file, a folder of class folders, "
        f"or one of torchvision's sets ({', '.join(TORCHVISION_SETS)})"
    )


def _open_npz(path: Path, name: str) -> DataSet:
    if not zipfile.is_zipfile(path):
        raise DataError(f"{name}: not a readable .npz file, as numpy.savez writes it; an .npy file has only one array")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except Exception as error:  # a damaged archive fails in many ways, and each means the same here
        raise DataError(f"{name}: not a readable .npz file ({error})") from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise DataError(f"{name}: {key} is no array; expected what numpy.savez writes")
    if "x_val" in arrays and "y_val" in arrays:
        arrays |= {"x_test": arrays["x_val"], "y_test": arrays["y_val"]}
    missing = {"x_test", "y_test"} - arrays.keys()
    if missing or ("x_train" in arrays) != ("y_train" in arrays):
        raise DataError(
            f"{name}: holds {', '.join(sorted(arrays)) or 'no arrays'}; expected x_train, y_train, x_test, y_test "
            "(x_val and y_val will do for the latter), and classes (names) if you like"
        )
    train = ArrayImages(arrays["x_train"], arrays["y_train"], f"{name}:x_train") if "x_train" in arrays else None
    validation = ArrayImages(arrays["x_test"], arrays["y_test"], f"{name}:x_test")
    if "classes" in arrays:
        if arrays["classes"].ndim != 1:
            raise DataError(f"{name}: classes have shape {arrays['classes'].shape}; expected a list of names")
        classes = tuple(str(label) for label in arrays["classes"])
    else:
        highest = max(int(images.labels.max(initial=-1)) for images in (train, validation) if images is not None)
        if highest >= MOST_CLASSES:
            raise DataError(
                f"{name}: the highest label is {highest}, which would make {highest + 1} classes; labels must be "
                "numbered from 0, without gaps"
            )
        classes = tuple(str(label) for label in range(highest + 1))
    return DataSet(name, classes, train, validation)


def _open_folder(root: Path) -> DataSet:
    train_folder = _first_folder(root, TRAIN_FOLDERS)
    validation_folder = _first_folder(root, VALIDATION_FOLDERS)
    if train_folder is None and validation_folder is None:
        return _hold_out(root)
    if validation_folder is None:
        return _hold_out(root, inside=TRAIN_FOLDERS[0])
    classes = _class_folders(train_folder or validation_folder)
    validation_classes = _class_folders(validation_folder)
    if classes != validation_classes:
        odd = sorted(set(classes) ^ set(validation_classes))
        raise DataError(
            f"{root}: {train_folder} has {len(classes)} classes and {validation_folder} has {len(validation_classes)}; "
            f"they must be the same, but only one of them has {', '.join(odd[:5])}"
        )
    train = _files_of(train_folder, classes) if train_folder else None
    return DataSet(str(root), classes, train, _files_of(validation_folder, classes))


def _first_folder(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _class_folders(folder: Path) -> tuple[str, ...]:
    try:
        names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))
    except OSError as error:
        raise DataError(f"{folder}: the folder cannot be read ({error})") from error
    if not names:
        raise DataError(f"{folder}: the folder is empty of classes; expected one folder of images for each class")
    return names


def _files_of(folder: Path, classes: tuple[str, ...]) -> FileImages:
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        found = make_dataset(str(folder), numbers, extensions=IMG_EXTENSIONS)
    except FileNotFoundError as error:
        raise DataError(f"{folder}: {error}") from error
    return FileImages([path for path, _ in found], [label for _, label in found])


def _hold_out(root: Path, inside: str = "") -> DataSet:
    """A folder without validation images: of each class, every `HOLD_OUT`-th image in the order of names."""
    classes = _class_folders(root / inside)
    images = _files_of(root / inside, classes)
    held = np.zeros(len(images.labels), dtype=bool)
    for label in range(len(classes)):
        held[np.flatnonzero(images.labels == label)[HOLD_OUT - 1 :: HOLD_OUT]] = True
    if not held.any():
        raise DataError(
            f"{root}: no class has {HOLD_OUT} images, so none can be held out for validation; "
            f"put validation images into {root / VALIDATION_FOLDERS[0]}"
        )

    def part(chosen: Any) -> FileImages:
        numbers = np.flatnonzero(chosen)
        return FileImages([images.name(int(number)) for number in numbers], images.labels[numbers].tolist())

    return DataSet(str(root), classes, part(~held), part(held))


def _open_torchvision(name: str, root: Path, download: bool) -> DataSet:
    maker = getattr(torchvision.datasets, name)
    try:
        train, test = (maker(root, download=download, **arguments) for arguments in TORCHVISION_SETS[name])
    except Exception as error:  # what is missing, damaged or out of reach fails in many ways
        raise DataError(
            f"{name} is not complete below {root} ({error}); pass --download to fetch it, or --data-root where it lies"
        ) from error
    splits = [TorchvisionImages(part, f"{name}:{split}") for part, split in ((train, "train"), (test, "test"))]
    names = getattr(train, "classes", None)
    count = max(int(split.labels.max(initial=-1)) for split in splits) + 1
    classes = tuple(str(label) for label in (names or range(count)))
    return DataSet(name, classes, splits[0], splits[1])
