"""One file of annotations in COCO's format, read, checked and packed.

A file of COCO's size is a million small lists and dictionaries. Worker processes would copy them page by page as
reference counts change; so all that is kept lies in a few arrays.
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from kernelwarehouse.detection.masks import Rle, check_runs, rle_of_polygons, rle_of_runs, runs_of
from kernelwarehouse.errors import DataError

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# How many an error names of those that share a mistake.
NAMED = 10

LARGEST_SIDE = 100_000
LARGEST_NUMBER = LARGEST_SIDE**2


@dataclass(frozen=True)
class Outlines:
    """Rings of polygons or compressed run lengths of every annotation, packed."""

    coordinates: Floats
    ring_starts: Integers
    """Where in `coordinates` each ring starts, and where the last one ends."""
    first_rings: Integers
    """Number of the first ring of each annotation, and that after the last."""
    text: NDArray[np.uint8]
    text_starts: Integers
    """Where in `text` the run lengths of each annotation start; an annotation of rings has none."""

    def rings(self, number: int) -> list[list[float]]:
        bounds = self.ring_starts[self.first_rings[number] : self.first_rings[number + 1] + 1].tolist()
        return [self.coordinates[start:end].tolist() for start, end in pairwise(bounds)]

    def rle(self, number: int, height: int, width: int) -> Rle:
        """The mask, whichever way it is stored."""
        start, end = self.text_starts[number : number + 2]
        if end > start:
            return {"size": [height, width], "counts": self.text[start:end].tobytes().decode("ascii")}
        return rle_of_polygons(self.rings(number), height, width)

    def as_stored(self, number: int, height: int, width: int) -> list[list[float]] | Rle:
        """Rings where there are some, run lengths else: what a file may have as `segmentation`."""
        return self.rings(number) or self.rle(number, height, width)


@dataclass(frozen=True)
class CocoFile:
    """Images in the order of the file; annotations in the order of their images, and of the file within an image."""

    path: str
    category_ids: tuple[int, ...]
    classes: tuple[str, ...]
    image_ids: Integers
    file_names: NDArray[np.str_]
    sizes: Integers
    """Height and width of each image."""
    annotation_ids: Integers
    first_annotations: Integers
    """Number of the first annotation of each image, and that after the last."""
    labels: Integers
    """From 1 on, in the order of `category_ids`: 0 is the background."""
    boxes: Floats
    """As in the file: left, top, width, height."""
    areas: Floats
    crowds: NDArray[np.bool_]
    blank: NDArray[np.bool_]
    """Whose outlines lie beyond the edges of their images, or are run lengths without a pixel inside."""
    outlines: Outlines

    def of_image(self, index: int) -> range:
        """The numbers of an image's annotations."""
        return range(*self.first_annotations[index : index + 2].tolist())


def read_coco_file(path: str | Path) -> CocoFile:
    """Read and check a file of annotations.

    Raises:
        DataError: what is wrong with which entry, and what would be right.
    """
    path = Path(path)
    content = _load(path)
    categories = _categories(path, content["categories"])
    image_ids, file_names, sizes = _images(path, content["images"])
    order = _sorted_by_image(path, content["annotations"], {image: number for number, image in enumerate(image_ids)})
    packer = _Packer(path, categories, sizes)
    for number, entry in order:
        packer.add(number, entry)
    _refuse(path, packer.unknown, "annotations of unknown categories", f"the file lists {_some(list(categories))}")
    counts = np.bincount(np.array([number for number, _ in order], np.int64), minlength=len(image_ids))
    return CocoFile(
        path=str(path),
        category_ids=tuple(categories),
        classes=tuple(categories.values()),
        image_ids=np.array(image_ids, np.int64),
        file_names=np.array(file_names),
        sizes=np.array(sizes, np.int64).reshape(-1, 2),
        annotation_ids=np.array([entry["id"] for _, entry in order], np.int64),
        first_annotations=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        labels=np.array(packer.labels, np.int64),
        boxes=np.array(packer.boxes, np.float64).reshape(-1, 4),
        areas=np.array(packer.areas, np.float64),
        crowds=np.array(packer.crowds, bool),
        blank=np.array(packer.blank, bool),
        outlines=packer.outlines(),
    )


def _load(path: Path) -> dict[str, list[Any]]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON ({error}); a file of annotations in COCO's format is wanted") from error
    wanted = ("images", "annotations", "categories")
    if not isinstance(content, dict):
        raise DataError(f"{path} holds {_kind(content)}; an object with lists {', '.join(wanted)} is wanted")
    for key in wanted:
        if not isinstance(content.get(key), list):
            found = f"is {_kind(content[key])}" if key in content else "is missing"
            raise DataError(f"{path}: {key} {found}; a list is wanted, as COCO's files of instances have it")
    for key in wanted:
        for number, entry in enumerate(content[key]):
            if not isinstance(entry, dict):
                raise DataError(f"{path}: {key}[{number}] is {_kind(entry)}; an object is wanted")
    return content


def _categories(path: Path, entries: list[dict[str, Any]]) -> dict[int, str]:
    """Names by id, in the order of ids."""
    ids = _unique_ids(path, "categories", entries)
    if not ids:
        raise DataError(f"{path}: categories is empty; objects with an id and a name are wanted")
    names = {}
    for identity, entry in zip(ids, entries, strict=True):
        if not isinstance(entry.get("name"), str) or not entry["name"]:
            raise DataError(f"{path}: category {identity}: name is {_shown(entry.get('name'))}; text is wanted")
        names[identity] = entry["name"]
    return dict(sorted(names.items()))


def _images(path: Path, entries: list[dict[str, Any]]) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    ids = _unique_ids(path, "images", entries)
    if not ids:
        raise DataError(f"{path}: images is empty; there is nothing to learn from")
    names, sizes = [], []
    for identity, entry in zip(ids, entries, strict=True):
        name, height, width = entry.get("file_name"), entry.get("height"), entry.get("width")
        if not isinstance(name, str) or not name or "\0" in name:
            raise DataError(f"{path}: image {identity}: file_name is {_shown(name)}; the name of a file is wanted")
        for side, length in (("height", height), ("width", width)):
            if not _is_whole(length) or not 0 < length <= LARGEST_SIDE:
                raise DataError(
                    f"{path}: image {identity}: {side} is {_shown(length)}; a whole number of pixels from 1 to "
                    f"{LARGEST_SIDE} is wanted"
                )
        names.append(name)
        sizes.append((entry["height"], entry["width"]))
    return ids, names, sizes


def _sorted_by_image(path: Path, entries: list[dict[str, Any]], known: dict[int, int]) -> list[tuple[int, Any]]:
    ids = _unique_ids(path, "annotations", entries)
    unknown, found = [], []
    for identity, entry in zip(ids, entries, strict=True):
        image = entry.get("image_id")
        if not _is_whole(image):
            raise DataError(f"{path}: annotation {identity}: image_id is {_shown(image)}; a whole number is wanted")
        if image in known:
            found.append((known[image], entry))
        else:
            unknown.append(f"annotation {identity} has image_id {image}")
    _refuse(path, unknown, "annotations of unknown images", "every image_id must be the id of an entry of images")
    return sorted(found, key=lambda pair: pair[0])


class _Packer:
    """Checks annotations one by one and puts them where `CocoFile` keeps them."""

    def __init__(self, path: Path, categories: dict[int, str], sizes: Sequence[tuple[int, int]]) -> None:
        self.path = path
        self.label_of = {identity: label for label, identity in enumerate(categories, 1)}
        self.sizes = sizes
        self.unknown: list[str] = []
        self.labels, self.crowds, self.blank = array("q"), array("b"), array("b")
        self.boxes, self.areas, self.coordinates = array("d"), array("d"), array("d")
        self.ring_starts, self.first_rings, self.text_starts = array("q", [0]), array("q", [0]), array("q", [0])
        self.text = bytearray()

    def add(self, image: int, entry: dict[str, Any]) -> None:
        category = entry.get("category_id")
        if not _is_whole(category):
            raise self._wrong(entry, "category_id", "a whole number is wanted")
        if category not in self.label_of:
            self.unknown.append(f"annotation {entry['id']} has category_id {category}")
        crowd = entry.get("iscrowd", 0)
        if not isinstance(crowd, int) or crowd not in (0, 1):
            raise self._wrong(entry, "iscrowd", "0 or 1 is wanted")
        box = entry.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not _are_numbers(box):
            raise self._wrong(entry, "bbox", "left, top, width and height are wanted, four finite numbers")
        if box[2] < 0 or box[3] < 0:
            raise self._wrong(entry, "bbox", "left, top, width and height are wanted, the latter two of 0 or more")
        self.labels.append(self.label_of.get(category, 0))
        self.crowds.append(crowd)
        self.boxes.extend(box)
        height, width = self.sizes[image]
        self._add_outline(entry, height, width)
        self._add_area(entry, height, width)

    def _add_outline(self, entry: dict[str, Any], height: int, width: int) -> None:
        outline = entry.get("segmentation")
        if isinstance(outline, dict):
            counts = self._counts(entry, outline, height, width)
            self.text += counts.encode("ascii")
            self.blank.append(not any(runs_of(counts)[1::2]))
        elif isinstance(outline, list) and outline:
            for ring in outline:
                if not isinstance(ring, list) or len(ring) < 6 or len(ring) % 2 or not _are_numbers(ring):
                    raise self._wrong(
                        entry, "segmentation", "rings of x1, y1, x2, y2, ... of three points or more are wanted"
                    )
                self.coordinates.extend(ring)
                self.ring_starts.append(len(self.coordinates))
            self.blank.append(all(_is_beyond(ring, height, width) for ring in outline))
        else:
            raise self._wrong(entry, "segmentation", "an outline is wanted, a list of polygons or run lengths (RLE)")
        self.first_rings.append(len(self.ring_starts) - 1)
        self.text_starts.append(len(self.text))

    def _counts(self, entry: dict[str, Any], outline: dict[str, Any], height: int, width: int) -> str:
        """Run lengths as compressed text, checked."""
        if outline.get("size") != [height, width]:
            raise self._wrong(entry, "segmentation", f"its size must be [{height}, {width}], that of the image")
        counts = outline.get("counts")
        try:
            if isinstance(counts, str):
                check_runs(runs_of(counts), height, width)
                return counts
            if isinstance(counts, list) and all(map(_is_whole, counts)):
                check_runs(counts, height, width)
                return str(rle_of_runs(counts, height, width)["counts"])
        except DataError as error:
            raise self._wrong(entry, "segmentation", str(error)) from error
        raise self._wrong(entry, "segmentation", "its counts must be whole numbers or compressed text")

    def _add_area(self, entry: dict[str, Any], height: int, width: int) -> None:
        """By which objects are small, medium or large. Some sets leave it out."""
        area = entry.get("area")
        if area is None:
            counts = self.text[self.text_starts[-2] :].decode("ascii")
            counts = counts or rle_of_polygons(entry["segmentation"], height, width)["counts"]
            area = sum(runs_of(counts)[1::2])
        elif not _is_number(area) or area < 0:
            raise self._wrong(entry, "area", "a number of pixels of 0 or more is wanted")
        self.areas.append(area)

    def outlines(self) -> Outlines:
        return Outlines(
            np.array(self.coordinates, np.float64),
            np.array(self.ring_starts, np.int64),
            np.array(self.first_rings, np.int64),
            np.frombuffer(bytes(self.text), np.uint8),
            np.array(self.text_starts, np.int64),
        )

    def _wrong(self, entry: dict[str, Any], key: str, right: str) -> DataError:
        return DataError(f"{self.path}: annotation {entry['id']}: {key} is {_shown(entry.get(key))}; {right}")


def _is_beyond(ring: Sequence[float], height: int, width: int) -> bool:
    across, down = ring[0::2], ring[1::2]
    return max(across) <= 0 or min(across) >= width or max(down) <= 0 or min(down) >= height


def _unique_ids(path: Path, key: str, entries: list[dict[str, Any]]) -> list[int]:
    seen: set[int] = set()
    twice = []
    for number, entry in enumerate(entries):
        identity = entry.get("id")
        if not _is_whole(identity):
            raise DataError(f"{path}: {key}[{number}]: id is {_shown(identity)}; a whole number is wanted")
        if identity in seen:
            twice.append(str(identity))
        seen.add(identity)
    _refuse(path, twice, f"ids of {key} that are there already", "every id may be used once")
    return [entry["id"] for entry in entries]


def _refuse(path: Path, found: Sequence[str], what: str, right: str) -> None:
    if found:
        raise DataError(f"{path} has {len(found):,} {what}: {_some(found)}; {right}")


def _some(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:NAMED])) + (f" and {len(values) - NAMED:,} more" if len(values) > NAMED else "")


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    """Not NaN, not infinite, and nothing that no picture has pixels for."""
    return type(value) in (int, float) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER


def _are_numbers(values: list[Any]) -> bool:
    return all(map(_is_number, values))


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
