"""Masks as COCO stores them: polygons, and run lengths (RLE) as lists or as compressed text."""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelwarehouse._extras import require

Rle = dict[str, Any]
"""`size`, height and width, and `counts`, compressed text: what JSON, pickles and COCO's tools all take."""


def encode_mask(mask: NDArray[np.bool_] | NDArray[np.uint8]) -> Rle:
    """A mask of zeros and others, `[height, width]`, as compressed run lengths."""
    return _as_text(_tools().encode(np.asfortranarray(mask != 0, dtype=np.uint8)))


def encode_masks(masks: NDArray[np.bool_] | NDArray[np.uint8]) -> list[Rle]:
    """As `encode_mask`, of `[number, height, width]`."""
    return [encode_mask(mask) for mask in masks]


def decode_mask(rle: Rle) -> NDArray[np.uint8]:
    """Zeros and ones, `[height, width]`."""
    return np.ascontiguousarray(_tools().decode(rle))


def rle_of_polygons(rings: Sequence[Sequence[float]], height: int, width: int) -> Rle:
    """What lies inside of any ring, each `x1, y1, x2, y2, ...`, by COCO's rule of which pixels are inside."""
    return _as_text(_tools().merge(_tools().frPyObjects([list(ring) for ring in rings], height, width)))


def rle_of_counts(counts: Sequence[int], height: int, width: int) -> Rle:
    """Lengths of runs, column by column, that begin with zeros."""
    return _as_text(_tools().frPyObjects({"size": [height, width], "counts": list(counts)}, height, width))


@cache
def _tools() -> ModuleType:
    """Not imported before it is needed: the command line must start without it."""
    require("detection", "work with masks")
    from faster_coco_eval import mask

    return mask


def _as_text(rle: dict[str, Any]) -> Rle:
    counts = rle["counts"]
    return {
        "size": [int(length) for length in rle["size"]],
        "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts,
    }
