"""Detections on their picture: masks, boxes, names and scores, legible on small pictures too."""

import colorsys
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from kernelwarehouse.detection.evaluation import MASK_THRESHOLD
from kernelwarehouse.errors import ShapeError

Colour = tuple[int, int, int]
Frame = tuple[float, float, float, float]
"""Left, top, right, bottom."""

# Smaller pictures are enlarged, by a whole number, until their longer side has this many pixels.
LEAST_SIDE = 480
MASK_OPACITY = 0.4
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


@dataclass(frozen=True)
class _Label:
    text: str
    colour: Colour
    box: Frame


def draw_detections(
    image: Tensor,
    found: Mapping[str, Tensor],
    classes: Sequence[str],
    *,
    threshold: float = 0.5,
    least_side: int = LEAST_SIDE,
) -> Image.Image:
    """Draw what a detector has found, or the target of a scene.

    Arguments:
        image: `uint8` of `[3, height, width]`.
        found: `boxes`, `labels`, `masks` (of `[n, 1, height, width]` or without the 1) and, of detections, `scores`.
        classes: the names of labels from 1 on.
        threshold: the least score of a detection to be drawn.
        least_side: pictures whose longer side is smaller are enlarged.

    Raises:
        ShapeError: an image, masks or labels that do not fit.
    """
    if image.ndim != 3 or image.shape[0] != 3 or str(image.dtype) != "torch.uint8":
        raise ShapeError(f"an image of {image.dtype}, {tuple(image.shape)}; uint8 of (3, height, width) is wanted")
    height, width = image.shape[1:]
    boxes, labels = found["boxes"].detach().cpu().tolist(), found["labels"].cpu().tolist()
    masks = found["masks"].detach().flatten(0, -3).cpu().numpy()
    if masks.shape != (len(labels), height, width):
        raise ShapeError(f"masks of {masks.shape} for {len(labels)} objects in a picture of {width} x {height}")
    if labels and not 1 <= min(labels) <= max(labels) <= len(classes):
        raise ShapeError(f"labels run from {min(labels)} to {max(labels)}; 1 to {len(classes)} are wanted")
    scores = found["scores"].tolist() if "scores" in found else [None] * len(labels)
    drawn = [number for number, score in enumerate(scores) if score is None or score >= threshold]
    drawn.sort(key=lambda number: scores[number] or 0)  # the surest on top; a sort leaves ties in their order

    scale = max(1, math.ceil(least_side / max(height, width)))
    pixels = image.permute(1, 2, 0).cpu().numpy().repeat(scale, 0).repeat(scale, 1)
    colours = {number: class_colour(labels[number]) for number in drawn}
    for number in drawn:
        pixels = _with_mask(pixels, (masks[number] > MASK_THRESHOLD).repeat(scale, 0).repeat(scale, 1), colours[number])
    picture = Image.fromarray(pixels)
    frames = {number: _scaled(boxes[number], scale, picture.size) for number in drawn}
    pen = ImageDraw.Draw(picture)
    for number in drawn:
        pen.rectangle(frames[number], outline=colours[number], width=2)
    names = {number: _name(classes[labels[number] - 1], scores[number]) for number in drawn}
    _write_labels(pen, picture.size, [_Label(names[number], colours[number], frames[number]) for number in drawn[::-1]])
    return picture


def contact_sheet(pictures: Sequence[Image.Image], columns: int, gap: int = 6) -> Image.Image:
    """Pictures in rows on white, each in the upper left of a field as large as the largest."""
    if not pictures or columns < 1:
        raise ShapeError(f"{len(pictures)} pictures in {columns} columns make no sheet; one or more of each are wanted")
    width, height = (max(picture.size[axis] for picture in pictures) + gap for axis in (0, 1))
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (width * min(columns, len(pictures)) - gap, height * rows - gap), WHITE)
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number % columns * width, number // columns * height))
    return sheet


def class_colour(label: int) -> Colour:
    """Hues in steps of the golden ratio, so that neighbours differ, in three shades, so that later ones do too."""
    saturation, brightness = ((0.9, 1.0), (0.5, 1.0), (0.8, 0.75))[label % 3]
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, saturation, brightness)
    return round(255 * red), round(255 * green), round(255 * blue)


def _with_mask(pixels: NDArray[np.uint8], mask: NDArray[np.bool_], colour: Colour) -> NDArray[np.uint8]:
    """The picture with a tinted object, and a line of a pixel or two around it, on the inside."""
    inner = mask.copy()
    for axis in (0, 1):
        for step in (-2, -1, 1, 2):
            inner &= np.roll(mask, step, axis)
    result = pixels.copy()
    result[mask] = (pixels[mask] * (1 - MASK_OPACITY) + np.array(colour) * MASK_OPACITY).astype(np.uint8)
    result[mask & ~inner] = colour
    return result


def _scaled(box: Sequence[float], scale: int, size: tuple[int, int]) -> Frame:
    """Within the picture, whatever the detector says."""
    left, right = (min(max(value * scale, 0), size[0] - 1) for value in (box[0], box[2]))
    top, bottom = (min(max(value * scale, 0), size[1] - 1) for value in (box[1], box[3]))
    return min(left, right), min(top, bottom), max(left, right), max(top, bottom)


def _name(name: str, score: float | None) -> str:
    return name if score is None else f"{name} {100 * score:.0f}%"


def _write_labels(pen: ImageDraw.ImageDraw, size: tuple[int, int], labels: Sequence[_Label]) -> None:
    """Names on plates of their colour, at a corner of the box that no other plate covers."""
    font = ImageFont.load_default(max(13, min(size) // 34))
    taken: list[Frame] = []
    for label in labels:
        left, top, right, bottom = pen.textbbox((0, 0), label.text, font=font)
        across, down = right - left + 8, bottom - top + 6
        places = [_plate(label.box, place, across, down, size) for place in range(6)]
        plate = next((place for place in places if not any(_overlap(place, other) for other in taken)), places[0])
        taken.append(plate)
        pen.rectangle(plate, fill=label.colour)
        red, green, blue = label.colour
        ink = BLACK if 299 * red + 587 * green + 114 * blue > 110_000 else WHITE
        pen.text((plate[0] + 4 - left, plate[1] + 3 - top), label.text, fill=ink, font=font)


def _plate(box: Frame, place: int, across: float, down: float, size: tuple[int, int]) -> Frame:
    """Above the box, below it, inside at the top, inside at the bottom, above at the right, in the middle."""
    left, top, right, bottom = box
    x, y = [
        (left, top - down),
        (left, bottom),
        (left, top),
        (left, bottom - down),
        (right - across, top - down),
        ((left + right - across) / 2, (top + bottom - down) / 2),
    ][place]
    x, y = min(max(x, 0), size[0] - across - 1), min(max(y, 0), size[1] - down - 1)
    return max(x, 0), max(y, 0), max(x, 0) + across, max(y, 0) + down


def _overlap(one: Frame, other: Frame) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
