"""One split of a data set: images by number, each with a label and a name that an error can quote."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kernelwarehouse.errors import DataError, UnreadableImageError


class Images(Protocol):
    """What the loader needs of a split."""

    @property
    def labels(self) -> NDArray[np.int64]: ...

    def load(self, index: int) -> Image.Image:
        """The image in RGB; `UnreadableImageError` if it cannot be decoded."""

    def name(self, index: int) -> str: ...


class ArrayImages:
    """Images in memory, `N x H x W` (grey) or `N x H x W x 3`, uint8."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[Any], origin: str) -> None:
        if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] != 3):
            raise DataError(
                f"{origin}: images are {pixels.dtype} of shape {pixels.shape}; "
                "expected uint8 of shape N x H x W (grey) or N x H x W x 3 (colour)"
            )
        if labels.shape != (len(pixels),) or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"{origin}: labels are {labels.dtype} of shape {labels.shape}; expected {len(pixels)} whole numbers"
            )
        self.pixels = pixels
        self.labels = labels.astype(np.int64)
        self.origin = origin

    def load(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index]).convert("RGB")

    def name(self, index: int) -> str:
        return f"{self.origin}[{index}]"


class FileImages:
    """Images in files, decoded when asked for."""

    def __init__(self, paths: Sequence[str | Path], labels: Sequence[int]) -> None:
        # One array instead of a million strings: worker processes then share the memory instead of copying it
        # page by page as reference counts change.
        self._paths = np.array([os.fsencode(path) for path in paths])
        self.labels = np.asarray(labels, dtype=np.int64)

    def load(self, index: int) -> Image.Image:
        try:
            with Image.open(self.name(index)) as image:
                return image.convert("RGB")
        # Pillow's decoders raise SyntaxError for broken PNG chunks and ValueError for impossible sizes.
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UnreadableImageError(f"{self.name(index)}: {error}") from error

    def name(self, index: int) -> str:
        return os.fsdecode(self._paths[index])


class TorchvisionImages:
    """A split of a torchvision data set; `labels` costs a pass over the images where the set does not list them."""

    def __init__(self, dataset: Any, origin: str) -> None:
        self._dataset = dataset
        self.origin = origin
        for attribute in ("targets", "labels", "_labels"):
            if hasattr(dataset, attribute):
                self.labels = np.asarray(getattr(dataset, attribute), dtype=np.int64)
                break
        else:
            self.labels = np.array([int(dataset[index][1]) for index in range(len(dataset))], dtype=np.int64)

    def load(self, index: int) -> Image.Image:
        try:
            return self._dataset[index][0].convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise UnreadableImageError(f"{self.name(index)}: {error}") from error

    def name(self, index: int) -> str:
        return f"{self.origin}[{index}]"


@dataclass(frozen=True)
class DataSet:
    """What `--data` opens to. `train` is missing when only images to evaluate on were found."""

    name: str
    classes: tuple[str, ...]
    train: Images | None
    validation: Images

    def __post_init__(self) -> None:
        for split, images in (("training", self.train), ("validation", self.validation)):
            if images is None:
                continue
            if len(images.labels) == 0:
                raise DataError(f"{self.name}: there are no {split} images")
            low, high = int(images.labels.min()), int(images.labels.max())
            if low < 0 or high >= len(self.classes):
                raise DataError(
                    f"{self.name}: {split} labels run from {low} to {high}, but there are {len(self.classes)} classes; "
                    f"labels must run from 0 to {len(self.classes) - 1}"
                )
