"""Pictures to learn detection from where nothing can be downloaded: embedded garments on textured canvases.

Garments are scaled, turned and tinted, and lie on top of each other. Every pixel belongs to the topmost garment or to
the canvas, without blending, so the masks are exact. A scene depends on the seed, its part and its number alone.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from kernelwarehouse._extras import require
from kernelwarehouse._files import new_folder
from kernelwarehouse.data import ArrayImages, open_dataset
from kernelwarehouse.data.seeds import derive_seed
from kernelwarehouse.detection.masks import encode_mask
from kernelwarehouse.errors import DataError

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]

# Sides of a garment's frame as shares of the canvas. The garment itself fills most of the frame.
SMALLEST, LARGEST = 0.25, 0.6
MOST_GARMENTS = 5
EMPTY_SHARE = 0.05  # of scenes show a canvas only, as some images of real sets show no object
TURN = 40  # degrees to either side: things that hang or lie about, not upside down

# A garment of which less is to be seen, behind others or beyond the edge, is taken out of the scene.
LEAST_VISIBLE = 0.35

# Fashion-MNIST has black around the garments, with single grey pixels as noise.
SUPPORT_THRESHOLD = 24

SMALLEST_SIZE, LARGEST_SIZE = 32, 4096
MOST_IMAGES = 1_000_000


@dataclass(frozen=True)
class Composition:
    """A scene in memory: its picture, and the visible part of each garment with its class, the lowest first."""

    pixels: Pixels
    masks: tuple[Mask, ...]
    labels: tuple[int, ...]


def make_scenes(
    folder: str | Path, *, images: int = 500, validation_images: int | None = None, seed: int = 0, size: int = 128
) -> Path:
    """Write `train.json`, `val.json` and the folders of their pictures. The same arguments give the same bytes.

    Arguments:
        folder: where to; nothing may be there but an empty folder. It appears when all is written.
        images: how many scenes to train on, with garments from the embedded training images.
        validation_images: how many scenes with garments from the validation images; a fifth of `images` unless given.
        seed: which scenes. Those of another number of images begin with the same ones.
        size: side of the square pictures in pixels.

    Raises:
        DataError: numbers that make no scenes, or a folder that holds something or cannot be written.
    """
    require("detection", "making scenes")
    if validation_images is None:
        validation_images = max(1, images // 5)
    for name, value, least, most in (
        ("images", images, 1, MOST_IMAGES),
        ("validation_images", validation_images, 1, MOST_IMAGES),
        ("seed", seed, 0, 2**63 - 1),
        ("size", size, SMALLEST_SIZE, LARGEST_SIZE),
    ):
        if not least <= value <= most:
            raise DataError(f"{name} (={value}) must be from {least} to {most}")
    folder = Path(folder)
    _refuse_occupied(folder)
    garments = open_dataset("embedded")
    parts = (("train", garments.train, images), ("val", garments.validation, validation_images))
    try:
        with new_folder(folder) as aside:
            for part, source, count in parts:
                if not isinstance(source, ArrayImages):  # for the type checker: embedded images are arrays
                    raise DataError(f"the embedded images for {part} are missing")
                (aside / part).mkdir()
                compositions = map(partial(compose, source, seed=seed, part=part, size=size), range(count))
                content = _coco_of(compositions, garments.classes, aside / part, seed)
                (aside / f"{part}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error
    return folder


def compose(garments: ArrayImages, number: int, *, seed: int, part: str, size: int) -> Composition:
    """The scene of this number."""
    random = np.random.default_rng(derive_seed(f"scene {part}", seed, number))
    canvas = _texture(random, size)
    count = 0 if random.random() < EMPTY_SHARE else int(random.integers(1, MOST_GARMENTS, endpoint=True))
    chosen = random.integers(len(garments.labels), size=count)
    placed = [_place(garments.pixels[index], random, size) for index in chosen]
    visible = visible_garments([full for _, full, _ in placed], [area for _, _, area in placed])
    for index, mask in visible.items():
        canvas[mask] = placed[index][0][mask]
    labels = tuple(int(garments.labels[chosen[index]]) for index in visible)
    return Composition(canvas, tuple(visible.values()), labels)


def visible_garments(full: Sequence[Mask], areas: Sequence[int]) -> dict[int, Mask]:
    """What is to be seen of each garment, given their masks from the lowest to the topmost.

    Those of which too little is to be seen are left out: not drawn, so that nothing shows that is not annotated.

    Arguments:
        full: masks on the canvas as if each lay there alone.
        areas: how many pixels each has, those beyond the canvas included.
    """
    left = list(range(len(full)))
    while left:
        covered = np.zeros_like(full[0])
        visible = {}
        for index in reversed(left):
            visible[index] = full[index] & ~covered
            covered |= full[index]
        shares = {index: visible[index].sum() / max(areas[index], 1) for index in left}
        hidden_most = min(left, key=lambda index: shares[index])
        if shares[hidden_most] >= LEAST_VISIBLE:
            return {index: visible[index] for index in left}
        left.remove(hidden_most)  # one at a time: the others may be seen better without it
    return {}


def _place(garment: Pixels, random: np.random.Generator, size: int) -> tuple[Pixels, Mask, int]:
    """A garment on a canvas of its own: tinted pixels, its mask, and its area beyond the canvas included."""
    side = round(random.uniform(SMALLEST, LARGEST) * size)
    angle = float(random.uniform(-TURN, TURN))
    mirrored = bool(random.random() < 0.5)
    tint = random.integers(90, 256, size=3)

    def resized(picture: Image.Image) -> NDArray[np.int64]:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else picture
        picture = picture.resize((side, side), Image.Resampling.BICUBIC)
        return np.asarray(picture.rotate(angle, Image.Resampling.BICUBIC, expand=True), dtype=np.int64)

    support = _support(garment)
    # Blurred, so that the steps of 28 pixels a side do not become those of an enlarged outline.
    shape = resized(support.filter(ImageFilter.GaussianBlur(0.7))) >= 128
    grey = resized(Image.fromarray(_without_dark_edge(garment, support)))
    colours = ((40 + grey * 215 // 255)[..., None] * tint // 255).astype(np.uint8)
    # The frame's centre lies anywhere on the canvas but its outermost eighth.
    top, left = (round(random.uniform(0.125, 0.875) * size - length / 2) for length in shape.shape)
    pixels, mask = np.zeros((size, size, 3), np.uint8), np.zeros((size, size), bool)
    rows, columns = slice(max(top, 0), top + shape.shape[0]), slice(max(left, 0), left + shape.shape[1])
    height, width = mask[rows, columns].shape
    inner = (
        slice(rows.start - top, rows.start - top + height),
        slice(columns.start - left, columns.start - left + width),
    )
    pixels[rows, columns], mask[rows, columns] = colours[inner], shape[inner]
    return pixels, mask, int(shape.sum())


def _support(garment: Pixels) -> Image.Image:
    """255 inside of the garment and 0 outside: what is not black, with cracks of a pixel or two closed."""
    bright = Image.fromarray(np.where(np.pad(garment, 2) >= SUPPORT_THRESHOLD, 255, 0).astype(np.uint8))
    closed = bright.filter(ImageFilter.MaxFilter(3)).filter(ImageFilter.MinFilter(3))
    return closed.crop((2, 2, closed.width - 2, closed.height - 2))


def _without_dark_edge(garment: Pixels, support: Image.Image) -> Pixels:
    """The outermost pixels of a garment are mixed with the black around it: they take the brightness beside them, and
    carry it outward, where resizing looks too."""
    inside = np.asarray(support.filter(ImageFilter.MinFilter(3))) > 0
    spread = np.asarray(Image.fromarray(garment).filter(ImageFilter.MaxFilter(5)))
    return np.where(inside, garment, spread).astype(np.uint8)


def _texture(random: np.random.Generator, size: int) -> Pixels:
    """Two colours mixed by clouds of several sizes, with stripes or checks on some, and grain."""
    low, high = random.integers(0, 256, size=(2, 3))
    mixture = np.zeros((size, size), np.int64)
    for cells, weight in ((3, 4), (7, 3), (17, 2), (41, 1)):
        mixture += weight * _cloud(random, cells, size)
    mixture //= 10
    pattern = int(random.integers(4))
    if pattern < 3:  # rows, columns or checks
        period = int(random.integers(4, max(5, size // 6)))
        lines = np.arange(size) // period % 2
        chosen = (lines[:, None] + 0 * lines, lines + 0 * lines[:, None], lines[:, None] ^ lines)[pattern]
        mixture = (3 * mixture + 255 * chosen) // 4
    canvas = (low * (255 - mixture[..., None]) + high * mixture[..., None]) // 255
    canvas += random.integers(-12, 13, size=(size, size, 1))
    return np.clip(canvas, 0, 255).astype(np.uint8)


def _cloud(random: np.random.Generator, cells: int, size: int) -> NDArray[np.int64]:
    values = random.integers(0, 256, size=(cells, cells)).astype(np.uint8)
    return np.asarray(Image.fromarray(values).resize((size, size), Image.Resampling.BICUBIC), dtype=np.int64)


def _coco_of(compositions: Iterable[Composition], classes: Sequence[str], folder: Path, seed: int) -> dict[str, Any]:
    """Save the pictures, and describe them as COCO does."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, scene in enumerate(compositions):
        name = f"{number:06d}.png"
        Image.fromarray(scene.pixels).save(folder / name)
        height, width = scene.pixels.shape[:2]
        images.append({"id": number + 1, "file_name": name, "width": width, "height": height})
        for mask, label in zip(scene.masks, scene.labels, strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            left, top = int(columns[0]), int(rows[0])
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number + 1,
                    "category_id": label + 1,
                    "bbox": [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                    "segmentation": encode_mask(mask),
                }
            )
    return {
        "info": {"description": f"Fashion-MNIST garments on textured canvases, {folder.name}, seed {seed}"},
        "licenses": [{"id": 1, "name": "MIT (Fashion-MNIST, Zalando SE)"}],
        "categories": [{"id": number, "name": name} for number, name in enumerate(classes, 1)],
        "images": images,
        "annotations": annotations,
    }


def _refuse_occupied(folder: Path) -> None:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} is there already; a new folder for the scenes is wanted, or an empty one")
    except OSError as error:
        raise DataError(f"{folder} cannot be made a folder for scenes: {error.strerror or error}") from error
