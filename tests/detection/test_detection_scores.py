"""COCO's numbers are those that pycocotools gives for the same file and the same predictions."""

import json
import pickle
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from rich.console import Console
from small_coco import annotation, write_pictures
from torch import Tensor

from kernelwarehouse.detection.data import CocoPart, open_coco
from kernelwarehouse.detection.evaluation import DetectionScores, Predictions, score_table
from kernelwarehouse.errors import DataError, ShapeError
from kernelwarehouse.training.distributed import Processes

Output = dict[str, Tensor]
CATEGORIES = [{"id": identity, "name": str(identity)} for identity in (2, 17, 40, 41)]  # 41 has no objects
SIZES = [(40, 60), (220, 240), (24, 24)]


def ellipse(height: int, width: int, box: list[float]) -> np.ndarray:
    left, top, across, down = box
    rows, columns = np.mgrid[:height, :width]
    within = ((columns - left) / across - 0.5) ** 2 + ((rows - top) / down - 0.5) ** 2 <= 0.25
    return np.asfortranarray(within.astype(np.uint8))


def random_box(generator: np.random.Generator, height: int, width: int) -> list[float]:
    across, down = generator.uniform(3, width * 0.9), generator.uniform(3, height * 0.9)
    return [generator.uniform(0, width - across), generator.uniform(0, height - down), across, down]


def random_truth(generator: np.random.Generator) -> dict[str, Any]:
    images, annotations = [], []
    for number in range(30):
        height, width = SIZES[number % 3]
        image = 1000 - 7 * number
        images.append({"id": image, "file_name": f"{number}.png", "height": height, "width": width})
        for _ in range(0 if number % 6 == 5 else int(generator.integers(1, 6))):
            box = random_box(generator, height, width)
            identity, category = len(annotations), int(generator.choice([2, 17, 40]))  # the first id is 0
            crowd = int(generator.random() < 0.15)
            mask = ellipse(height, width, box)
            outline: Any = {"size": [height, width], "counts": coco_masks.encode(mask)["counts"].decode()}
            left, top, across, down = box
            if not crowd and identity % 2:
                outline = [[left, top, left + across, top, left + across / 2, top + down]]
            annotations.append(
                annotation(identity, image, category, box, outline, area=float(mask.sum()), iscrowd=crowd)
            )
    return {"images": images, "categories": CATEGORIES, "annotations": annotations}


def random_outputs(generator: np.random.Generator, truth: dict[str, Any]) -> dict[int, Output]:
    """The truth moved about, some of it twice or as another class, and things that are not there; scores have ties."""
    outputs = {}
    for image in truth["images"]:
        height, width = image["height"], image["width"]
        found: list[tuple[int, list[float]]] = []
        for one in truth["annotations"]:
            if one["image_id"] == image["id"]:
                for _ in range(int(generator.integers(0, 3))):
                    label = [2, 17, 40].index(one["category_id"]) + 1 if generator.random() < 0.8 else 4
                    moved = np.array(one["bbox"]) + generator.normal(0, 1, 4) * generator.choice([0.1, 1, 5])
                    found.append((label, [*moved[:2], *np.maximum(moved[2:], 1)]))
        for _ in range(int(generator.integers(0, 4))):
            found.append((int(generator.integers(1, 5)), random_box(generator, height, width)))
        boxes = torch.tensor([box for _, box in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        soft = [torch.from_numpy(ellipse(height, width, box) * 0.8 + 0.1) for _, box in found]
        outputs[image["id"]] = {
            "boxes": boxes,
            "labels": torch.tensor([label for label, _ in found], dtype=torch.int64),
            "scores": torch.tensor(generator.choice(np.linspace(0.1, 1, 12), len(found)), dtype=torch.float32),
            "masks": torch.stack(soft)[:, None].float() if soft else torch.zeros(0, 1, height, width),
        }
    return outputs


def part_of(folder: Path, truth: dict[str, Any]) -> CocoPart:
    write_pictures(folder / "val", truth)
    (folder / "val.json").write_text(json.dumps(truth))
    return open_coco(folder, for_training=False).validation


def numbers_of_pycocotools(file: Path, outputs: dict[int, Output], kind: str, images: list[int]) -> list[float]:
    rows = []
    for image, output in outputs.items():
        for number, (left, top, right, bottom) in enumerate(output["boxes"].tolist()):
            mask = np.asfortranarray(output["masks"][number, 0].numpy() > 0.5, dtype=np.uint8)
            place = (
                {"bbox": [left, top, right - left, bottom - top]}
                if kind == "bbox"
                else {"segmentation": coco_masks.encode(mask)}
            )
            label, score = int(output["labels"][number]), float(output["scores"][number])
            rows.append({"image_id": image, "category_id": CATEGORIES[label - 1]["id"], "score": score} | place)
    known = COCO(str(file))
    for entry in known.dataset["annotations"]:
        entry["id"] += 1  # they take an id of 0 for none
    known.createIndex()
    evaluator = COCOeval(known, known.loadRes(rows), kind)
    evaluator.params.imgIds = images
    evaluator.evaluate()
    evaluator.accumulate()
    evaluator.summarize()
    return evaluator.stats.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_all_twelve_numbers_of_boxes_and_masks(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    truth = random_truth(generator)
    assert any(one["iscrowd"] for one in truth["annotations"])
    outputs = random_outputs(generator, truth)
    predictions = Predictions(part_of(tmp_path, truth))
    predictions.add(outputs)
    scores = predictions.score()
    assert scores.images == 30
    for kind, mine in (("bbox", scores.boxes), ("segm", scores.masks)):
        theirs = numbers_of_pycocotools(tmp_path / "val.json", outputs, kind, sorted(outputs))
        assert min(theirs) > 0  # of every size there are objects, and some are found
        np.testing.assert_allclose(astuple(mine), theirs, rtol=0, atol=1e-12)


def test_pictures_that_were_not_looked_at_do_not_count(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    truth = random_truth(generator)
    outputs = {image: output for image, output in random_outputs(generator, truth).items() if image % 2}
    predictions = Predictions(part_of(tmp_path, truth))
    predictions.add(outputs)
    scores = predictions.score(unreadable=["one.png"])
    assert scores.images == 15
    assert scores.unreadable == ("one.png",)
    theirs = numbers_of_pycocotools(tmp_path / "val.json", outputs, "segm", sorted(outputs))
    np.testing.assert_allclose(astuple(scores.masks), theirs, rtol=0, atol=1e-12)


class Together(Processes):
    """The first of two processes, with the share of the second at hand, as it would come through the network."""

    other: Any

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, tuple):
            return [value, pickle.loads(pickle.dumps(self.other))]
        return [value, None]


def test_shares_of_processes_are_brought_together(tmp_path: Path) -> None:
    generator = np.random.default_rng(6)
    truth = random_truth(generator)
    outputs = random_outputs(generator, truth)
    part = part_of(tmp_path, truth)
    alone = Predictions(part)
    alone.add(outputs)
    first, second = Predictions(part), Predictions(part)
    for number, (image, output) in enumerate(outputs.items()):
        (first, second)[number % 2].add({image: output})
    processes = Together(world_size=2)
    object.__setattr__(processes, "other", (second._found, ("b.png",)))
    scores = first.score(processes, ["c.png", "b.png"])
    assert scores.unreadable == ("b.png", "c.png")
    assert (scores.boxes, scores.masks) == (alone.score().boxes, alone.score().masks)
    assert len(pickle.dumps(second._found)) < 100_000  # no masks, which would have a megabyte


def perfect(part: CocoPart) -> dict[int, Output]:
    outputs = {}
    for index in range(len(part)):
        target = part.target(index)
        outputs[int(target["image_id"])] = {
            "boxes": target["boxes"],
            "labels": target["labels"],
            "scores": torch.ones(len(target["labels"])),
            "masks": target["masks"][:, None].float(),
        }
    return outputs


def test_the_truth_itself_is_perfect_and_nothing_is_nothing(tmp_path: Path) -> None:
    truth = random_truth(np.random.default_rng(7))
    for one in truth["annotations"]:
        one["bbox"] = [round(value) for value in one["bbox"]]  # torch keeps them exactly
        one["bbox"][2:] = [max(1, value) for value in one["bbox"][2:]]
    part = part_of(tmp_path, truth)
    predictions = Predictions(part)
    predictions.add(perfect(part))
    scores = predictions.score()
    assert scores.boxes.ap == scores.masks.ap == scores.masks.ap_large == pytest.approx(1)
    nothing = Predictions(part)
    nothing.add(
        {image: {name: values[:0] for name, values in output.items()} for image, output in perfect(part).items()}
    )
    assert set(astuple(nothing.score().boxes)) == {0}


def test_sizes_without_objects_are_marked(tmp_path: Path) -> None:
    image = {"id": 1, "file_name": "a.png", "width": 40, "height": 40}
    small = annotation(1, 1, 2, [4, 4, 8, 8], [[4, 4, 12, 4, 12, 12, 4, 12]])
    part = part_of(tmp_path, {"images": [image], "categories": CATEGORIES, "annotations": [small]})
    predictions = Predictions(part)
    predictions.add(perfect(part))
    scores = predictions.score()
    assert scores.masks.ap_large == -1
    assert scores.as_dict()["mask_ap_small"] == pytest.approx(1)
    console = Console(width=100)
    with console.capture() as capture:
        console.print(score_table(scores))
    assert [word for word in capture.get().split() if word in ("100.0", "-")] == (["100.0"] * 4 + ["-"] * 2) * 2
    assert isinstance(scores, DetectionScores)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    part = part_of(tmp_path, random_truth(np.random.default_rng(0)))
    predictions = Predictions(part)
    with pytest.raises(DataError, match="no picture was evaluated, 0 cannot be read"):
        predictions.score()
    with pytest.raises(DataError, match=r"no picture was evaluated, 1 cannot be read; the first: a\.png"):
        predictions.score(unreadable=["a.png"])
    image, output = next(iter(perfect(part).items()))
    with pytest.raises(DataError, match=r"image 999999 is none of .*val\.json"):
        predictions.add({999999: output})
    with pytest.raises(ShapeError, match=r"the masks for image 1000 have shape .*a picture of 60 x 40"):
        predictions.add({image: output | {"masks": torch.zeros(len(output["labels"]), 1, 41, 60)}})
    with pytest.raises(ShapeError, match=r"labels for image 1000 run from 0 to 0; 1 to 4 are wanted"):
        predictions.add({image: output | {"labels": torch.zeros_like(output["labels"])}})
