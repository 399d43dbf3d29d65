#!/usr/bin/env python3
"""Cut the embedded images out of the full Fashion-MNIST: the first 500 + 100 images of each class, in their order.

Usage: make_embedded_dataset.py FASHION_MNIST.npz      (arrays x_train, y_train, x_test, y_test, classes)

The full set is in Debian's package dataset-fashion-mnist. The same input gives the same file, byte for byte.
"""

import sys
from pathlib import Path

import numpy as np

from kernelwarehouse._files import replacing

TARGET = Path(__file__).parents[1] / "src/kernelwarehouse/data/embedded_fashion_mnist.npz"
PER_CLASS = {"train": 500, "test": 100}


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """The positions, ascending, of the first `count` images of each label."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]))


def main(source: str) -> None:
    full = np.load(source, allow_pickle=False)
    arrays = {"classes": full["classes"]}
    for split, count in PER_CLASS.items():
        chosen = first_of_each_class(full[f"y_{split}"], count)
        arrays[f"x_{split}"] = full[f"x_{split}"][chosen]
        arrays[f"y_{split}"] = full[f"y_{split}"][chosen]
    with replacing(TARGET) as aside:
        np.savez_compressed(aside, **arrays)
    print(f"{TARGET}: {len(arrays['y_train'])} + {len(arrays['y_test'])} images, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
