"""Sets in COCO's format: what they open to, where they are looked for, and what is said of what is wrong in them."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from small_coco import annotation, content, write_pictures, write_set
from torch.utils.data import DataLoader

from kernelwarehouse.detection.coco_file import read_coco_file
from kernelwarehouse.detection.data import Scene, open_coco
from kernelwarehouse.detection.masks import decode_mask, rle_of_polygons
from kernelwarehouse.errors import DataError, KernelWarehouseWarning, UnreadableImageError

Change = Callable[[dict[str, Any]], Any]


def test_part_gives_what_the_file_says(tmp_path: Path) -> None:
    data = open_coco(write_set(tmp_path))
    assert data.train is not None
    assert data.classes == ("dog", "cat", "cow")
    assert data.category_ids == (3, 7, 90)
    assert len(data.train) == len(data.validation) == 3
    image, target = data.train[0]
    np.testing.assert_array_equal(image.permute(1, 2, 0), np.asarray(Image.open(tmp_path / "train" / "a.png")))
    assert image.dtype == torch.uint8
    assert target["image_id"].item() == 11
    assert target["labels"].tolist() == [2, 3, 1]
    assert target["boxes"].tolist() == [[2, 1, 6, 6], [0, 0, 12, 8], [2, 1, 5, 3]]
    assert target["area"].tolist() == [20, 96, 6]
    assert target["iscrowd"].tolist() == [0, 0, 0]
    assert {name: values.dtype for name, values in target.items()} == {
        "boxes": torch.float32,
        "labels": torch.int64,
        "masks": torch.uint8,
        "area": torch.float32,
        "iscrowd": torch.int64,
        "image_id": torch.int64,
    }


def test_masks_are_those_of_pycocotools(tmp_path: Path) -> None:
    data = open_coco(write_set(tmp_path))
    theirs = COCO(str(tmp_path / "val.json"))
    compared = 0
    for scene in (data.validation[index] for index in range(3)):
        ids = theirs.getAnnIds(imgIds=[scene.target["image_id"].item()], iscrowd=False)
        wanted = [theirs.annToMask(one) for one in theirs.loadAnns(ids)]
        assert scene.target["masks"].shape == (len(wanted), *scene.image.shape[1:])
        for mine, other in zip(scene.target["masks"], wanted, strict=True):
            np.testing.assert_array_equal(mine, other)
            compared += int(other.sum() > 0)
    assert compared == 4


def test_picture_without_objects(tmp_path: Path) -> None:
    target = open_coco(write_set(tmp_path)).validation[1].target
    assert target["boxes"].shape == (0, 4)
    assert target["masks"].shape == (0, 6, 9)
    assert target["labels"].shape == target["area"].shape == (0,)


def test_crowds_are_no_targets_but_in_the_truth(tmp_path: Path) -> None:
    part = open_coco(write_set(tmp_path)).validation
    assert part[2].target["labels"].tolist() == [3]
    truth = part.truth()
    crowd = next(one for one in truth["annotations"] if one["iscrowd"])
    assert (crowd["image_id"], crowd["category_id"], crowd["bbox"], crowd["area"]) == (30, 3, [0, 0, 6, 3], 18)
    rows = decode_mask(crowd["segmentation"]).any(1)
    assert rows.tolist() == [True] * 3 + [False] * 3
    assert len(truth["annotations"]) == 5
    assert len(truth["images"]) == 3


def test_parts_travel_to_workers(tmp_path: Path) -> None:
    part = open_coco(write_set(tmp_path)).validation
    copy = pickle.loads(pickle.dumps(part))
    loader: DataLoader[Scene] = DataLoader(copy, batch_size=None, num_workers=1)
    for mine, read in zip((part[index] for index in range(3)), loader, strict=True):
        assert torch.equal(mine.image, read.image)
        assert all(torch.equal(mine.target[name], read.target[name]) for name in mine.target)


LAYOUTS = {
    "COCO": ("annotations/instances_{}2017.json", "{}2017"),
    "COCO of another year": ("annotations/instances_{}2014.json", "{}2014"),
    "pictures below images": ("annotations/instances_{}2017.json", "images/{}2017"),
    "one folder of pictures": ("annotations/{}.json", "images"),
    "plain": ("{}.json", "{}"),
    "beside the annotations": ("{}.json", "."),
    "Roboflow": ("{}/_annotations.coco.json", "{}"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_usual_places(tmp_path: Path, layout: str) -> None:
    file, folder = LAYOUTS[layout]
    for part in ("train", "val"):
        (tmp_path / file.format(part)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file.format(part)).write_text(json.dumps(content()))
        write_pictures(tmp_path / folder.format(part), content())
    data = open_coco(str(tmp_path))
    assert data.train is not None
    assert data.train.file.path == str(tmp_path / file.format("train"))
    assert data.train.pictures.name(1) == str(tmp_path / folder.format("train") / "b.png")
    assert data.validation[1].image.shape == (3, 6, 9)


def test_2017_comes_first_and_other_years_must_be_alone(tmp_path: Path) -> None:
    folder = tmp_path / "annotations"
    folder.mkdir()
    write_pictures(tmp_path / "images", content())
    for name in ("train2014", "train2015", "val2014", "val2017"):
        (folder / f"instances_{name}.json").write_text(json.dumps(content()))
    assert open_coco(tmp_path, for_training=False).validation.file.path.endswith("val2017.json")
    with pytest.raises(DataError, match=r"has instances_train2014\.json, instances_train2015\.json; only one"):
        open_coco(tmp_path)


def test_file_to_evaluate_on_and_pictures_elsewhere(tmp_path: Path) -> None:
    write_pictures(tmp_path / "far", content())
    file = tmp_path / "some.json"
    file.write_text(json.dumps(content()))
    data = open_coco(file, images=tmp_path / "far", for_training=False)
    assert data.train is None
    assert data.validation[0].image.shape == (3, 8, 12)
    with pytest.raises(DataError, match=r"some\.json is a file, to evaluate on"):
        open_coco(file)


def test_training_annotations_are_not_read_for_evaluation(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "train.json").write_text("damaged")
    assert open_coco(tmp_path, for_training=False).train is None


def test_pictures_in_subfolders(tmp_path: Path) -> None:
    made = content()
    for image in made["images"]:
        image["file_name"] = f"deep/{image['file_name']}"
    write_pictures(tmp_path / "val", made)
    (tmp_path / "val.json").write_text(json.dumps(made))
    assert open_coco(tmp_path, for_training=False).validation[2].image.shape == (3, 6, 6)


def change_annotation(identity: int, **changes: Any) -> Change:
    def change(made: dict[str, Any]) -> None:
        entry = next(one for one in made["annotations"] if one["id"] == identity)
        for key, value in changes.items():
            entry.pop(key)
            if value is not None:
                entry[key] = value

    return change


def change_image(**changes: Any) -> Change:
    return lambda made: made["images"][1].update(changes)


def rle(counts: Any, size: Any = (6, 6)) -> dict[str, Any]:
    return {"size": list(size), "counts": counts}


WRONG: dict[str, tuple[Change, str]] = {
    "unknown category": (
        change_annotation(7, category_id=4),
        r"has 1 annotations of unknown categories: annotation 7 has category_id 4; the file lists 3, 7, 90",
    ),
    "unknown image": (
        change_annotation(7, image_id=12),
        r"has 1 annotations of unknown images: annotation 7 has image_id 12; every image_id must be the id",
    ),
    "annotation twice": (
        lambda made: made["annotations"].append(made["annotations"][0]),
        "1 ids of annotations that are there already: 100; every id may be used once",
    ),
    "image twice": (lambda made: made["images"].append(made["images"][0]), "1 ids of images .* already: 11"),
    "category twice": (lambda made: made["categories"].append({"id": 3, "name": "x"}), "ids of categories .*: 3"),
    "id of text": (
        lambda made: made["annotations"][1].update(id="7"),
        r'annotations\[1\]: id is "7"; a whole number is wanted',
    ),
    "id missing": (lambda made: made["images"][2].pop("id"), r"images\[2\]: id is null"),
    "id of a bool": (lambda made: made["images"][2].update(id=True), r"images\[2\]: id is true"),
    "huge id": (lambda made: made["images"][2].update(id=2**70), r"images\[2\]: id is 1180591"),
    "image_id of text": (change_annotation(7, image_id="11"), 'annotation 7: image_id is "11"; a whole number'),
    "category of text": (change_annotation(7, category_id="cat"), 'annotation 7: category_id is "cat"; a whole number'),
    "no category name": (lambda made: made["categories"][0].pop("name"), "category 7: name is null; text is wanted"),
    "no categories": (lambda made: made["categories"].clear(), "categories is empty"),
    "no images": (lambda made: (made["images"].clear(), made["annotations"].clear()), "images is empty"),
    "no file name": (change_image(file_name=""), 'image 5: file_name is ""; the name of a file'),
    "no height": (change_image(height=0), "image 5: height is 0; a whole number of pixels from 1 to"),
    "width of text": (change_image(width="9"), 'image 5: width is "9"; a whole number of pixels'),
    "short box": (
        change_annotation(7, bbox=[1, 2, 3]),
        r"annotation 7: bbox is \[1, 2, 3\]; left, top, width and height",
    ),
    "box with NaN": (change_annotation(7, bbox=[1, 2, 3, float("nan")]), r"bbox is \[1, 2, 3, NaN\]; .*four finite"),
    "endless box": (change_annotation(7, bbox=[1, 2, float("inf"), 3]), r"bbox is \[1, 2, Infinity, 3\]"),
    "box of text": (change_annotation(7, bbox=[1, 2, 3, "4"]), r'bbox is \[1, 2, 3, "4"\]'),
    "huge box": (change_annotation(7, bbox=[1, 2, 3, 10**400]), r"annotation 7: bbox is \[1, 2, 3, 1000"),
    "negative box": (
        change_annotation(7, bbox=[5, 5, -2, 1]),
        r"bbox is \[5, 5, -2, 1\]; .*the latter two of 0 or more",
    ),
    "no box": (change_annotation(7, bbox=None), "annotation 7: bbox is null"),
    "negative area": (change_annotation(7, area=-1), "annotation 7: area is -1; a number of pixels of 0 or more"),
    "crowd of 2": (change_annotation(7, iscrowd=2), "annotation 7: iscrowd is 2; 0 or 1 is wanted"),
    "no outline": (change_annotation(7, segmentation=None), "annotation 7: segmentation is null; an outline is wanted"),
    "empty outline": (change_annotation(7, segmentation=[]), r"segmentation is \[\]; an outline is wanted"),
    "line": (
        change_annotation(7, segmentation=[[1, 1, 5, 5]]),
        r"\[\[1, 1, 5, 5\]\]; rings .* of three points or more",
    ),
    "odd ring": (
        change_annotation(7, segmentation=[[1, 1, 5, 5, 1, 2, 3]]),
        "annotation 7: segmentation is .*rings of",
    ),
    "flat ring": (change_annotation(7, segmentation=[1, 1, 5, 5, 1, 2]), "annotation 7: segmentation is .*rings of"),
    "ring with NaN": (change_annotation(7, segmentation=[[1, 1, 5, 5, 1, float("nan")]]), "rings of x1, y1"),
    "runs of another size": (change_annotation(3, segmentation=rle("01", (5, 6))), r"its size must be \[6, 6\]"),
    "too few runs": (
        change_annotation(3, segmentation=rle([7, 2])),
        "annotation 3: .*the runs have 9 pixels; 6 x 6 = 36",
    ),
    "negative runs": (change_annotation(3, segmentation=rle([40, -4])), "annotation 3: .*the runs hold -4"),
    "runs of text": (change_annotation(3, segmentation=rle(["7"])), "its counts must be whole numbers or compressed"),
    "no runs": (change_annotation(3, segmentation=rle(None)), "its counts must be whole numbers or compressed"),
    "damaged text": (change_annotation(8, segmentation=rle("PPP`", (8, 12))), "annotation 8: .*counts end within a"),
    "short text": (change_annotation(8, segmentation=rle("11", (8, 12))), "annotation 8: .*the runs have 2 pixels"),
    "entry of text": (lambda made: made["annotations"].append("x"), r"annotations\[5\] is text; an object is wanted"),
    "images of text": (lambda made: made.update(images="x"), "images is text; a list is wanted"),
    "no annotations": (lambda made: made.pop("annotations"), "annotations is missing; a list is wanted"),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_make_no_sense(tmp_path: Path, case: str) -> None:
    change, message = WRONG[case]
    made = content()
    change(made)
    write_set(tmp_path, train=made)
    with pytest.raises(DataError, match=message) as caught:
        open_coco(tmp_path)
    assert str(tmp_path / "train.json") in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"train\.json is no JSON"),
        ("[]", r"train\.json holds a list; an object with lists images, annotations, categories is wanted"),
        ("[" * 100_000, r"train\.json is no JSON"),
        ("\udcff", r"train\.json is no JSON"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    write_set(tmp_path)
    (tmp_path / "train.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        open_coco(tmp_path)


def test_many_mistakes_are_counted_and_the_first_named(tmp_path: Path) -> None:
    made = content()
    made["annotations"] = [annotation(n, 11, 1000 + n, [0, 0, 2, 2], [[0, 0, 2, 0, 2, 2]]) for n in range(1, 31)]
    with pytest.raises(DataError, match=r"30 annotations of unknown categories: annotation 1 has .* and 20 more"):
        open_coco(write_set(tmp_path, train=made))


def test_places_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not there; a folder with annotations"):
        open_coco(tmp_path / "nowhere")
    with pytest.raises(
        DataError, match=r"has no annotations for train; expected annotations/instances_train2017\.json"
    ):
        open_coco(tmp_path)


def test_categories_of_both_parts_must_be_the_same(tmp_path: Path) -> None:
    made = content()
    made["categories"][0]["name"] = "wolf"
    with pytest.raises(DataError, match=r"differ in categories 7: 7 is 'wolf' there and 'cat' here"):
        open_coco(write_set(tmp_path, train=made))


def test_missing_pictures_of_both_parts_are_listed(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "train" / "b.png").unlink()
    (tmp_path / "val" / "c.png").unlink()
    with pytest.raises(DataError, match=r"2 of 6 pictures are missing: .*train/b\.png, .*val/c\.png; the names in"):
        open_coco(tmp_path)


def test_many_missing_pictures_are_all_in_the_notes(tmp_path: Path) -> None:
    made = content()
    made["images"] += [{"id": n, "file_name": f"{n}.png", "width": 5, "height": 5} for n in range(1000, 1040)]
    with pytest.raises(DataError, match=r"40 of 46 pictures are missing: .* and 30 more, all listed with") as caught:
        open_coco(write_set(tmp_path, train=made))
    assert sum(note.endswith(".png") for note in caught.value.__notes__) == 40


def test_picture_of_another_size_is_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    Image.new("RGB", (9, 7)).save(tmp_path / "val" / "b.png")
    with pytest.raises(UnreadableImageError, match=r"b\.png is 9 x 7, but .*val\.json says 9 x 6 of image 5"):
        _ = open_coco(tmp_path).validation[1]


BOXES = {
    "no area": ([2, 1, 0, 5], "1 boxes have no area and are left out of training (annotation 7)"),
    "outside": ([20, 1, 4, 5], "1 boxes lie outside of their images and are left out of training (annotation 7)"),
    "over the edge": ([-2, 1, 20, 5], "1 boxes reach over the edge of their images and are clipped for training"),
}


@pytest.mark.parametrize("case", BOXES)
def test_odd_boxes_are_counted(tmp_path: Path, case: str) -> None:
    box, message = BOXES[case]
    made = content()
    change_annotation(7, bbox=box)(made)
    write_set(tmp_path, validation=made)
    with pytest.warns(KernelWarehouseWarning) as caught:
        part = open_coco(tmp_path).validation
    assert len(caught) == 1
    assert message in str(caught[0].message)
    boxes = part[0].target["boxes"].tolist()
    assert boxes == ([[0, 1, 12, 6]] if case == "over the edge" else []) + [[0, 0, 12, 8], [2, 1, 5, 3]]
    assert box in [one["bbox"] for one in part.truth()["annotations"]]  # as pycocotools sees it


OUTSIDE = {
    "right and below": [[20, 20, 25, 20, 25, 25]],
    "above": [[2, -5, 6, -5, 6, 0]],
    "two rings": [[20, 2, 25, 2, 25, 5], [-3, 2, -1, 2, -1, 5]],
    "no run inside": {"size": [8, 12], "counts": [96]},
    "an empty run": {"size": [8, 12], "counts": [90, 0, 6]},
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_outlines_outside_of_the_picture_are_counted(tmp_path: Path, case: str) -> None:
    made = content()
    change_annotation(7, segmentation=OUTSIDE[case])(made)
    with pytest.warns(KernelWarehouseWarning) as caught:
        part = open_coco(write_set(tmp_path, validation=made)).validation
    assert len(caught) == 1
    wanted = "1 outlines have no pixel within their images and are left out of training (annotation 7)"
    assert wanted in str(caught[0].message)
    assert part[0].target["labels"].tolist() == [3, 1]
    assert part.targets == 3
    assert len(part.truth()["annotations"]) == 5


def test_outline_between_the_centres_of_pixels_is_no_target(tmp_path: Path) -> None:
    made = content()
    change_annotation(7, segmentation=[[2.6, 1.6, 2.7, 1.6, 2.7, 1.7]])(made)
    target = open_coco(write_set(tmp_path, validation=made)).validation[0].target
    assert target["labels"].tolist() == [3, 1]
    assert len(target["masks"]) == 2


def test_area_that_is_left_out_is_that_of_the_mask(tmp_path: Path) -> None:
    made = content()
    for identity in (7, 3, 8, 100):
        change_annotation(identity, area=None)(made)
    file = read_coco_file(write_set(tmp_path, train=made) / "train.json")
    areas = dict(zip(file.annotation_ids.tolist(), file.areas.tolist(), strict=True))
    ring = rle_of_polygons([[2, 1, 6, 1, 6, 6, 2, 6]], 8, 12)
    assert areas == {7: coco_masks.area(ring), 9: 96, 8: 6, 100: 18, 3: 4}


def test_fingerprint_changes_with_annotations_and_pictures_only(tmp_path: Path) -> None:
    first = open_coco(write_set(tmp_path / "one")).fingerprint()
    assert open_coco(write_set(tmp_path / "two")).fingerprint() == first
    assert first["training"]["images"] == 3
    moved = content()
    change_annotation(7, segmentation=[[2, 1, 6, 1, 6, 6, 2, 5]])(moved)
    changed = open_coco(write_set(tmp_path / "three", train=moved)).fingerprint()
    assert changed["training"]["labels"] != first["training"]["labels"]
    assert changed["validation"] == first["validation"]
    Image.new("RGB", (9, 6)).save(tmp_path / "two" / "val" / "b.png")
    assert open_coco(tmp_path / "two").fingerprint()["validation"]["content"] != first["validation"]["content"]
