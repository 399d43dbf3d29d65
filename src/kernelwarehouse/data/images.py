"""One split of a data set: images by number, each with a label and a name that an error can quote.

A split has a fingerprint, so that a run can tell whether it goes on with the images that it began with.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kernelwarehouse.errors import DataError, UnreadableImageError

# Of how many files, evenly spread, the fingerprint holds the size. Names and labels count for all; but to ask a network
# disk for the sizes of a million files can take longer than the first epoch.
SIZES_IN_FINGERPRINT = 10_000

TIFF_BITS, TIFF_PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0


class Images(Protocol):
    """What the loader needs of a split."""

    @property
    def labels(self) -> NDArray[np.int64]: ...

    def load(self, index: int) -> Image.Image:
        """The image in RGB; `UnreadableImageError` if it cannot be decoded."""

    def name(self, index: int) -> str: ...

    def content_hash(self) -> str:
        """Changes when the images do, as far as that can be seen without decoding them."""


class ArrayImages:
    """Images in memory, `N x H x W` (grey) or `N x H x W x 3`, uint8."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[Any], origin: str) -> None:
        if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] != 3):
            raise DataError(
                f"{origin}: images are {pixels.dtype} of shape {pixels.shape}; "
                "expected uint8 of shape N x H x W (grey) or N x H x W x 3 (colour)"
                + ("; (images >> 8).astype('uint8') makes 8 bits of 16" if pixels.dtype == np.uint16 else "")
            )
        if 0 in pixels.shape[1:]:
            raise DataError(f"{origin}: images are {pixels.shape[2]} x {pixels.shape[1]}; they have no pixels")
        if labels.shape != (len(pixels),) or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"{origin}: labels are {labels.dtype} of shape {labels.shape}; expected {len(pixels)} whole numbers"
            )
        self.pixels = pixels
        self.labels = labels.astype(np.int64)
        self.origin = origin

    def load(self, index: int) -> Image.Image:
        return to_rgb(Image.fromarray(self.pixels[index]))

    def name(self, index: int) -> str:
        return f"{self.origin}[{index}]"

    def content_hash(self) -> str:
        """Of all pixels."""
        return _array_hash(self.pixels)


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
                return to_rgb(image)
        except Exception as error:  # Pillow's decoders fail in many ways on a damaged file, and each means the same
            raise UnreadableImageError(f"{self.name(index)}: {error}") from error

    def name(self, index: int) -> str:
        return os.fsdecode(self._paths[index])

    def content_hash(self) -> str:
        """Of all names below the folder that holds them, and of the sizes of `SIZES_IN_FINGERPRINT` files at most."""
        paths = self._paths.tolist()
        root = os.path.dirname(os.path.commonprefix(paths))  # noqa: RUF071 (dirname cuts at a whole component)
        digest = hashlib.blake2b(digest_size=16)
        for path in paths:
            digest.update(path[len(root) :].replace(os.sep.encode(), b"/") + b"\0")
        for number in np.linspace(0, len(paths) - 1, min(len(paths), SIZES_IN_FINGERPRINT)).astype(int):
            digest.update(b"%d\0" % _size_of(paths[number]))
        return digest.hexdigest()


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
            return to_rgb(self._dataset[index][0])
        except Exception as error:  # as above
            raise UnreadableImageError(f"{self.name(index)}: {error}") from error

    def name(self, index: int) -> str:
        return f"{self.origin}[{index}]"

    def content_hash(self) -> str:
        """Of all pixels where the set keeps them in memory; of sets in files, only the labels can tell."""
        pixels = getattr(self._dataset, "data", None)
        return "" if pixels is None else _array_hash(np.asarray(pixels))


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in 8-bit RGB. Grey values of 16 bits keep their upper 8, as Pillow does it for colours of 16 bits.

    Transparency is dropped: the colours beneath it stay. Where the range of the values is unknown (32-bit whole
    numbers, floating point), the image is refused, for Pillow would cut off all above 255.
    """
    # PNG and PGM know no grey of more than 16 bits, which some versions of Pillow hold in 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        _require_full_range(image)
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "floating point" if image.mode == "F" else "32-bit whole numbers"
        raise UnreadableImageError(f"pixels are {kind}, of unknown range; images of 8 or 16 bits a channel are wanted")
    return image.convert("RGB")


def _require_full_range(image: Image.Image) -> None:
    """TIFF files can hold fewer bits than the 16 they are read into, or black as the highest value."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(TIFF_BITS, (16,))[0]
    if bits != 16 or tags.get(TIFF_PHOTOMETRIC) == WHITE_IS_ZERO:
        what = f"{bits} bits" if bits != 16 else "16 bits, white at 0"
        raise UnreadableImageError(f"pixels are grey of {what}; 8 or 16 bits with black at 0 are wanted")


def _array_hash(array: NDArray[Any]) -> str:
    digest = hashlib.blake2b(f"{array.dtype.str} {array.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.hexdigest()


def _size_of(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # a link to nothing: reading it will say so
        return -1


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

    def fingerprint(self) -> dict[str, dict[str, Any]]:
        """Counts and hashes of labels and images of each split: what a resumed run must find unchanged."""
        splits = {"training": self.train, "validation": self.validation}
        return {
            name: {
                "images": len(split.labels),
                "labels": _array_hash(split.labels.astype("<i8")),
                "content": split.content_hash(),
            }
            for name, split in splits.items()
            if split is not None
        }
