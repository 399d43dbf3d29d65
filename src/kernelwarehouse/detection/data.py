"""Pictures with outlined objects, in COCO's format: from a folder or a file to parts that a loader can read.

All that can be checked without decoding pictures is checked when a set is opened.
"""

import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kernelwarehouse.data.images import FileImages
from kernelwarehouse.detection.coco_file import NAMED, CocoFile, read_coco_file
from kernelwarehouse.detection.masks import decode_mask
from kernelwarehouse.errors import DataError, KernelWarehouseWarning, UnreadableImageError

TRAIN_NAMES = ("train",)
VALIDATION_NAMES = ("val", "validation", "valid")

# Coordinates are rounded when they are written. A box that reaches over the edge by less is not worth a word.
ROUNDING = 0.1

# By how many pictures the folder that holds them is found.
LOOKED_FOR = 20


class Scene(NamedTuple):
    """A picture, `uint8` of `[3, height, width]`, and what torchvision's detectors want to know of it."""

    image: Tensor
    target: dict[str, Tensor]


class CocoPart(Dataset[Scene]):
    """The pictures of one file of annotations.

    `part[index]` reads a picture. Its target has, of every object, `boxes` (left, top, right, bottom, within the
    picture), `labels` (from 1 on, in the order of `classes`), `masks`, `area` and `iscrowd`, and its `image_id`.
    Crowds are no targets, nor is what has no area within the picture: evaluation knows of them by `truth`. `targets` is
    how many are left.
    """

    def __init__(self, file: CocoFile, folder: Path) -> None:
        self.file = file
        self.folder = folder
        self.pictures = FileImages([folder / name for name in file.file_names.tolist()], [0] * len(file.file_names))
        self._boxes = _clipped_boxes(file)
        left, top, right, bottom = self._boxes.T
        has_area = (right > left) & (bottom > top)
        self._is_target = has_area & ~file.crowds & ~file.blank
        self._warn(has_area)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.file.classes

    @property
    def category_ids(self) -> tuple[int, ...]:
        """The ids in the file, of label 1 and on."""
        return self.file.category_ids

    @property
    def targets(self) -> int:
        return int(self._is_target.sum())

    @property
    def image_ids(self) -> NDArray[np.int64]:
        return self.file.image_ids

    def __len__(self) -> int:
        return len(self.file.image_ids)

    def __getitem__(self, index: int) -> Scene:
        return Scene(self.picture(index), self.target(index))

    def picture(self, index: int) -> Tensor:
        """The picture alone, without what is to be found in it."""
        picture = self.pictures.load(index)
        height, width = self.file.sizes[index].tolist()
        if picture.size != (width, height):
            raise UnreadableImageError(
                f"{self.pictures.name(index)} is {picture.width} x {picture.height}, but {self.file.path} says "
                f"{width} x {height} of image {self.file.image_ids[index]}; they must be the same"
            )
        pixels = torch.from_numpy(np.array(picture))
        return pixels.permute(2, 0, 1).contiguous()

    def target(self, index: int) -> dict[str, Tensor]:
        """What is to be found in a picture, which is not read for it."""
        height, width = self.file.sizes[index].tolist()
        wanted, masks = [], []
        for number in self.file.of_image(index):
            if self._is_target[number]:
                mask = decode_mask(self.file.outlines.rle(number, height, width))
                if mask.any():  # a small outline between the centres of pixels has none
                    wanted.append(number)
                    masks.append(mask)
        chosen = np.array(wanted, np.int64)
        return {
            "boxes": torch.from_numpy(self._boxes[chosen]),
            "labels": torch.from_numpy(self.file.labels[chosen]),
            "masks": torch.from_numpy(np.stack(masks) if masks else np.zeros((0, height, width), np.uint8)),
            "area": torch.from_numpy(self.file.areas[chosen].astype(np.float32)),
            "iscrowd": torch.zeros(len(wanted), dtype=torch.int64),
            "image_id": torch.tensor(int(self.file.image_ids[index])),
        }

    def truth(self) -> dict[str, Any]:
        """All images and annotations as COCO's tools take them: crowds included, and boxes and areas as in the file.

        Annotations are numbered anew from 1 on, for tools that take 0 for none.
        """
        file = self.file
        annotations = []
        for index, (height, width) in enumerate(file.sizes.tolist()):
            for number in file.of_image(index):
                annotations.append(
                    {
                        "id": number + 1,
                        "image_id": int(file.image_ids[index]),
                        "category_id": file.category_ids[file.labels[number] - 1],
                        "bbox": file.boxes[number].tolist(),
                        "area": float(file.areas[number]),
                        "iscrowd": int(file.crowds[number]),
                        "segmentation": file.outlines.as_stored(number, height, width),
                    }
                )
        sizes = zip(file.image_ids.tolist(), file.sizes.tolist(), strict=True)
        return {
            "images": [{"id": image, "height": height, "width": width} for image, (height, width) in sizes],
            "categories": [{"id": i, "name": name} for i, name in zip(file.category_ids, file.classes, strict=True)],
            "annotations": annotations,
        }

    def missing(self) -> list[str]:
        """The files of pictures that are not there. Folders are listed, so that a million files cost a few calls."""
        names: dict[str, set[str]] = {}
        missing = []
        for index in range(len(self)):
            folder, name = os.path.split(self.pictures.name(index))
            if folder not in names:
                names[folder] = _names_in(folder)
            if name not in names[folder]:
                missing.append(os.path.join(folder, name))
        return missing

    def fingerprint(self) -> dict[str, Any]:
        """Counts and hashes of annotations and pictures: what a resumed run must find unchanged."""
        file, outlines = self.file, self.file.outlines
        digest = hashlib.blake2b(repr((file.category_ids, file.classes)).encode(), digest_size=16)
        for values in (
            *(file.image_ids, file.sizes, file.first_annotations, file.labels, file.boxes, file.areas, file.crowds),
            *(outlines.coordinates, outlines.ring_starts, outlines.first_rings, outlines.text, outlines.text_starts),
        ):
            digest.update(f"{values.dtype.str} {values.shape}".encode())
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return {"images": len(self), "labels": digest.hexdigest(), "content": self.pictures.content_hash()}

    def _warn(self, has_area: NDArray[np.bool_]) -> None:
        file = self.file
        sides = np.repeat(file.sizes[:, ::-1], np.diff(file.first_annotations), axis=0)
        over = ((file.boxes[:, :2] < -ROUNDING) | (file.boxes[:, :2] + file.boxes[:, 2:] > sides + ROUNDING)).any(1)
        empty = (file.boxes[:, 2:] == 0).any(1)
        for found, what in (
            (empty & ~file.crowds, "boxes have no area and are left out of training"),
            (~has_area & ~empty & ~file.crowds, "boxes lie outside of their images and are left out of training"),
            (
                file.blank & has_area & ~file.crowds,
                "outlines have no pixel within their images and are left out of training",
            ),
            (over & has_area & ~file.blank, "boxes reach over the edge of their images and are clipped for training"),
        ):
            if found.any():
                ids = file.annotation_ids[found].tolist()
                warnings.warn(
                    f"{file.path}: {len(ids):,} {what} (annotation {_some(ids)}); evaluation takes them as they are, "
                    "as COCO's tools do",
                    KernelWarehouseWarning,
                    stacklevel=5,
                )


@dataclass(frozen=True)
class CocoData:
    """What `--coco` opens to. `train` is missing where only pictures to evaluate on were asked for."""

    name: str
    train: CocoPart | None
    validation: CocoPart

    @property
    def classes(self) -> tuple[str, ...]:
        return self.validation.classes

    @property
    def category_ids(self) -> tuple[int, ...]:
        return self.validation.category_ids

    def fingerprint(self) -> dict[str, dict[str, Any]]:
        """As `DataSet.fingerprint` of images with labels."""
        parts = {"training": self.train, "validation": self.validation}
        return {name: part.fingerprint() for name, part in parts.items() if part is not None}


def open_coco(where: str | Path, *, images: str | Path | None = None, for_training: bool = True) -> CocoData:
    """Open a set in COCO's format, and check all of it but the pixels.

    Arguments:
        where: a folder with `annotations/instances_train2017.json`, `annotations/instances_val2017.json` and the
            pictures in `train2017` and `val2017`, as COCO has them, or with `train.json`, `val.json` and folders
            `train` and `val`; or a file of annotations to evaluate on.
        images: the folder that the names of pictures are relative to, where it is another than these.
        for_training: whether annotations for training are needed too. If not, they are not even read.

    Raises:
        DataError: annotations that are not there, that make no sense, or whose pictures are not there.
    """
    where = Path(where)
    if os.path.isfile(where):
        if for_training:
            raise DataError(f"{where} is a file, to evaluate on; for training, a folder with train and val is wanted")
        train_file, validation_file = None, where
    elif os.path.isdir(where):
        train_file = _annotation_file(where, TRAIN_NAMES) if for_training else None
        validation_file = _annotation_file(where, VALIDATION_NAMES)
    else:
        raise DataError(f"{where} is not there; a folder with annotations in COCO's format is wanted, or such a file")
    folder = None if images is None else Path(images)
    train = None if train_file is None else _open_part(train_file, folder)
    validation = _open_part(validation_file, folder)
    if train is not None:
        _refuse_other_categories(train, validation)
    _refuse_missing([part for part in (train, validation) if part is not None])
    return CocoData(str(where), train, validation)


def _annotation_file(root: Path, names: Sequence[str]) -> Path:
    """The file of annotations of a part. Of COCO's years, 2017 comes first; others must be alone."""
    folders = (root / "annotations", root)
    exact = [
        *(folder / f"{stem}.json" for folder in folders for name in names for stem in _stems(name)),
        *(root / name / "_annotations.coco.json" for name in names),
    ]
    for path in exact:
        if path.is_file():
            return path
    for folder in folders:
        found = sorted({path for name in names for path in folder.glob(f"instances_{name}*.json")})
        if len(found) > 1:
            raise DataError(
                f"{folder} has {', '.join(path.name for path in found)}; only one of them can be for {names[0]}: "
                f"name it instances_{names[0]}.json"
            )
        if found:
            return found[0]
    shown = (f"annotations/instances_{names[0]}2017.json", f"annotations/{names[0]}.json", f"{names[0]}.json")
    raise DataError(f"{root} has no annotations for {names[0]}; expected {', '.join(shown)} or the like")


def _stems(name: str) -> tuple[str, ...]:
    return f"instances_{name}2017", f"instances_{name}", name, f"{name}2017"


def _open_part(path: Path, folder: Path | None) -> CocoPart:
    file = read_coco_file(path)
    return CocoPart(file, _picture_folder(path, file.file_names.tolist()) if folder is None else folder)


def _picture_folder(path: Path, names: Sequence[str]) -> Path:
    """Of the places where pictures are usually kept, the first that has most of some of them."""
    root = path.parent.parent if path.parent.name == "annotations" else path.parent
    part = path.stem.removeprefix("instances_")
    places = [root / part, root / "images" / part, root / "images", path.parent, root]
    some = names[:: max(1, len(names) // LOOKED_FOR)]
    return max(
        (place for place in places if place.is_dir()),
        key=lambda place: sum(os.path.isfile(place / name) for name in some),
    )


def _refuse_other_categories(train: CocoPart, validation: CocoPart) -> None:
    one, other = (dict(zip(part.category_ids, part.classes, strict=True)) for part in (train, validation))
    odd = sorted(identity for identity in one.keys() | other.keys() if one.get(identity) != other.get(identity))
    if odd:
        first = odd[0]
        raise DataError(
            f"{train.file.path} and {validation.file.path} differ in categories {_some(odd)}: {first} is "
            f"{one.get(first, 'unknown')!r} there and {other.get(first, 'unknown')!r} here; they must be the same"
        )


def _refuse_missing(parts: Sequence[CocoPart]) -> None:
    missing = [file for part in parts for file in part.missing()]
    if not missing:
        return
    pictures = sum(map(len, parts))
    many = len(missing) > NAMED
    error = DataError(
        f"{len(missing):,} of {pictures:,} pictures are missing: {', '.join(missing[:NAMED])}"
        + (f" and {len(missing) - NAMED:,} more, all listed with this error" if many else "")
        + f"; the names in {' and '.join(part.file.path for part in parts)} are taken relative to "
        + " and ".join(str(part.folder) for part in parts)
    )
    if many:
        for note in ("Missing:", *missing):  # one each, since names may hold line breaks
            error.add_note(note)
    raise error


def _names_in(folder: str) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except OSError:
        return set()


def _clipped_boxes(file: CocoFile) -> NDArray[np.float32]:
    """Left, top, right and bottom within the image of each annotation."""
    sides = np.repeat(file.sizes[:, ::-1], np.diff(file.first_annotations), axis=0).astype(np.float64)
    corners = np.stack([file.boxes[:, :2], file.boxes[:, :2] + file.boxes[:, 2:]], 1)
    return np.clip(corners, 0, sides[:, None]).reshape(-1, 4).astype(np.float32)


def _some(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:NAMED])) + (f" and {len(values) - NAMED:,} more" if len(values) > NAMED else "")
