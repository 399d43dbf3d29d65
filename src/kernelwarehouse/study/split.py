"""The images of a study: to train on, to choose settings on, and to test on once at the end, in files of their own."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernelwarehouse._files import new_folder
from kernelwarehouse.data import ArrayImages, open_dataset
from kernelwarehouse.data.seeds import derive_seed
from kernelwarehouse.errors import DataError


@dataclass(frozen=True)
class Split:
    """Files that `open_dataset` reads. `train` holds the images to train on and those kept apart, as validation images;
    `test` the test images alone. `digest` is of all images, however they are split."""

    train: Path
    test: Path
    digest: str


def make_split(where: str, kept: int, seed: int, output: Path) -> Split:
    """Split the data, or find them split already, below `output`."""
    data = open_dataset(where)
    if not isinstance(data.train, ArrayImages) or not isinstance(data.validation, ArrayImages):
        raise DataError(f"{where}: a study wants images to train on and to test on as arrays, in an .npz file")
    chosen = choose_kept(data.train.labels, len(data.classes), kept, seed)
    digest = hashlib.blake2b(json.dumps(data.fingerprint(), sort_keys=True).encode(), digest_size=6).hexdigest()
    folder = output / f"data-{digest}-{kept}-{seed}"
    if not folder.exists():
        pixels, labels, classes = data.train.pixels, data.train.labels, np.array(data.classes)
        with new_folder(folder) as aside:
            np.savez(
                aside / "train.npz",
                x_train=pixels[~chosen],
                y_train=labels[~chosen],
                x_val=pixels[chosen],
                y_val=labels[chosen],
                classes=classes,
            )
            np.savez(aside / "test.npz", x_test=data.validation.pixels, y_test=data.validation.labels, classes=classes)
    return Split(folder / "train.npz", folder / "test.npz", digest)


def choose_kept(labels: NDArray[np.int64], classes: int, kept: int, seed: int) -> NDArray[np.bool_]:
    """Which images are kept apart: of every class the same number, the same ones for the same seed."""
    share, rest = divmod(kept, classes)
    fewest = int(np.bincount(labels, minlength=classes).min())
    if rest or not share < fewest:
        raise DataError(
            f"kept (={kept}) must be a multiple of the {classes} classes, so that each gives the same number, and "
            f"leave some of the {fewest} training images of the smallest class"
        )
    chosen = np.zeros(len(labels), dtype=bool)
    for label in range(classes):
        numbers = np.flatnonzero(labels == label).tolist()
        # A hash orders them alike for ever, which the generators of NumPy and torch do not promise.
        chosen[sorted(numbers, key=lambda number: derive_seed("kept apart", seed, number))[:share]] = True
    return chosen
