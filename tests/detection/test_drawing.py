"""Drawn detections: on the right pixels, within the picture, and only those that are sure enough."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kernelwarehouse.detection.drawing import LEAST_SIDE, class_colour, contact_sheet, draw_detections
from kernelwarehouse.errors import ShapeError

CLASSES = ("apple", "bear")


def scene() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Grey, 600 x 500, with one object of each class."""
    masks = torch.zeros(2, 500, 600, dtype=torch.uint8)
    masks[0, 100:200, 100:200] = 1
    masks[1, 300:450, 350:550] = 1
    boxes = torch.tensor([[100.0, 100, 200, 200], [350, 300, 550, 450]])
    return torch.full((3, 500, 600), 100, dtype=torch.uint8), {
        "boxes": boxes,
        "labels": torch.tensor([1, 2]),
        "masks": masks,
    }


def detections(scores: list[float]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    image, target = scene()
    return image, target | {"masks": target["masks"][:, None] * 0.9, "scores": torch.tensor(scores)}


def pixel(picture: Image.Image, x: int, y: int) -> tuple[int, ...]:
    found = picture.getpixel((x, y))
    assert isinstance(found, tuple)
    return found


def test_masks_are_tinted_boxes_framed_and_the_rest_left_alone() -> None:
    image, target = scene()
    picture = draw_detections(image, target, CLASSES)
    assert picture.size == (600, 500)
    for label, (inside, frame) in enumerate([((150, 150), (200, 150)), ((450, 400), (550, 400))], 1):
        colour = np.array(class_colour(label))
        np.testing.assert_allclose(pixel(picture, *inside), 100 * 0.6 + colour * 0.4, atol=1)
        assert pixel(picture, *frame) == tuple(colour)
    assert pixel(picture, 300, 250) == (100, 100, 100)
    plate = np.asarray(picture)[82:99, 100:140]
    assert (plate == class_colour(1)).all(-1).mean() > 0.3  # the name's plate lies on the box
    assert len(np.unique(plate.reshape(-1, 3), axis=0)) > 3  # with something written on it


def test_a_target_and_sure_detections_differ_by_the_scores_alone() -> None:
    drawn = np.asarray(draw_detections(*detections([0.9, 0.8]), CLASSES), dtype=int)
    target = np.asarray(draw_detections(*scene(), CLASSES), dtype=int)
    rows, _ = np.nonzero((drawn != target).any(-1))
    assert set(rows) <= {*range(70, 100), *range(270, 300)}
    assert len(rows)


@pytest.mark.parametrize(("scores", "threshold", "seen"), [([0.9, 0.4], 0.5, [1, 0]), ([0.1, 0.2], 0.15, [0, 1])])
def test_unsure_detections_are_not_drawn(scores: list[float], threshold: float, seen: list[int]) -> None:
    picture = draw_detections(*detections(scores), CLASSES, threshold=threshold)
    found = [pixel(picture, x, y) != (100, 100, 100) for x, y in ((150, 150), (450, 400))]
    assert found == [bool(one) for one in seen]


def test_the_surest_lies_on_top() -> None:
    image, target = scene()
    same = {"masks": torch.ones(2, 1, 500, 600), "boxes": target["boxes"][:1].repeat(2, 1), "labels": target["labels"]}
    for scores in ([0.9, 0.6], [0.6, 0.9]):
        picture = draw_detections(image, same | {"scores": torch.tensor(scores)}, CLASSES)
        assert pixel(picture, 200, 150) == class_colour(1 + int(np.argmax(scores)))


def test_small_pictures_are_enlarged_and_all_kept_within() -> None:
    image = torch.arange(3 * 20 * 30, dtype=torch.int32).remainder(256).to(torch.uint8).reshape(3, 20, 30)
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "masks": torch.zeros(0, 20, 30)}
    plain = draw_detections(image, nothing, CLASSES)
    assert plain.size == (480, 320)
    assert max(plain.size) >= LEAST_SIDE
    np.testing.assert_array_equal(np.asarray(plain)[8::16, 8::16], image.permute(1, 2, 0))
    beyond = {
        "boxes": torch.tensor([[-50.0, -50, 900, 900], [28, 18, 30, 20], [5, 5, 5, 5]]),
        "labels": torch.tensor([1, 2, 2]),
        "masks": torch.ones(3, 20, 30),
    }
    assert draw_detections(image, beyond, ("a very long name " * 5, "b")).size == (480, 320)


def test_neighbouring_classes_have_colours_of_their_own() -> None:
    colours = np.array([class_colour(label) for label in range(1, 81)])
    assert len(np.unique(colours, axis=0)) == 80
    distances = np.abs(colours[:10, None] - colours[None, :10]).sum(-1)
    assert distances[~np.eye(10, dtype=bool)].min() > 60


def test_contact_sheet() -> None:
    pictures = [Image.new("RGB", (10, 8), (value, 0, 0)) for value in (10, 20, 30)]
    sheet = contact_sheet(pictures, 2, gap=4)
    assert sheet.size == (24, 20)
    assert [pixel(sheet, *place)[0] for place in ((0, 0), (14, 0), (0, 12), (14, 12))] == [10, 20, 30, 255]
    with pytest.raises(ShapeError, match="0 pictures in 2 columns"):
        contact_sheet([], 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"masks": torch.zeros(2, 500, 601)}, r"masks of \(2, 500, 601\) for 2 objects in a picture of 600 x 500"),
        ({"labels": torch.tensor([1, 3])}, "labels run from 1 to 3; 1 to 2 are wanted"),
        ({"labels": torch.tensor([0, 1])}, "labels run from 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    image, target = scene()
    with pytest.raises(ShapeError, match=message):
        draw_detections(image, target | changes, CLASSES)
    with pytest.raises(ShapeError, match=r"an image of torch\.float32, \(3, 500, 600\); uint8"):
        draw_detections(image.float(), target, CLASSES)
