"""A small set in COCO's format, with all that such sets have: crowds, pictures without objects, gaps in the ids."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco_masks

CATEGORIES = [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}, {"id": 90, "name": "cow"}]


def content() -> dict[str, Any]:
    """Image 11 has polygons and compressed run lengths, 5 has no objects, 30 has a crowd and listed run lengths."""
    return {
        "categories": [dict(category) for category in CATEGORIES],
        "images": [
            {"id": 11, "file_name": "a.png", "width": 12, "height": 8},
            {"id": 5, "file_name": "b.png", "width": 9, "height": 6},
            {"id": 30, "file_name": "c.png", "width": 6, "height": 6},
        ],
        "annotations": [
            annotation(100, 30, 3, [0, 0, 6, 3], {"size": [6, 6], "counts": [0, 3] + [3, 3] * 5 + [3]}, iscrowd=1),
            annotation(7, 11, 7, [2, 1, 4, 5], [[2, 1, 6, 1, 6, 6, 2, 6]]),
            annotation(3, 30, 90, [1, 1, 2, 2], {"size": [6, 6], "counts": [7, 2, 4, 2, 21]}),
            annotation(9, 11, 90, [0, 0, 12, 8], [[0, 0, 3, 0, 3, 3, 0, 3], [8, 4, 12, 4, 12, 8, 8, 8]]),
            annotation(8, 11, 3, [2, 1, 3, 2], compressed(8, 12, 2, 1, 3, 2)),
        ],
    }


def compressed(height: int, width: int, left: int, top: int, columns: int, rows: int) -> dict[str, Any]:
    mask = np.zeros((height, width), np.uint8, order="F")
    mask[top : top + rows, left : left + columns] = 1
    return {"size": [height, width], "counts": coco_masks.encode(mask)["counts"].decode()}


def annotation(identity: int, image: int, category: int, box: list[float], outline: Any, **more: Any) -> dict[str, Any]:
    area = box[2] * box[3]
    made = {"id": identity, "image_id": image, "category_id": category, "bbox": box, "area": area, "iscrowd": 0}
    return made | {"segmentation": outline} | more


def write_pictures(folder: Path, described: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    for image in described["images"]:
        pixels = generator.integers(0, 256, (image["height"], image["width"], 3), dtype=np.uint8)
        (folder / image["file_name"]).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / image["file_name"])


def write_set(root: Path, train: Any = None, validation: Any = None) -> Path:
    """`train.json` and `val.json`, of what is given or `content()`, and the pictures of `content()`."""
    for name, described in (("train", train), ("val", validation)):
        write_pictures(root / name, content())
        (root / f"{name}.json").write_text(json.dumps(content() if described is None else described))
    return root
