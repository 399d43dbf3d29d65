"""Generated scenes: the same for the same seed, and masks that say of every pixel whose it is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kernelwarehouse.cli import main
from kernelwarehouse.data import ArrayImages, open_dataset
from kernelwarehouse.detection import scenes
from kernelwarehouse.detection.masks import decode_mask
from kernelwarehouse.detection.scenes import compose, make_scenes, visible_garments
from kernelwarehouse.errors import DataError

SIZE = 64


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenes(tmp_path_factory.mktemp("scenes") / "made", images=40, validation_images=5, seed=3, size=SIZE)


@pytest.fixture(scope="module")
def content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "train.json").read_text())


def test_same_seed_same_bytes_and_more_images_begin_with_the_same(folder: Path, tmp_path: Path) -> None:
    again = files_of(make_scenes(tmp_path / "again", images=40, validation_images=5, seed=3, size=SIZE))
    assert again == files_of(folder)
    fewer = files_of(make_scenes(tmp_path / "fewer", images=2, validation_images=5, seed=3, size=SIZE))
    assert fewer["train/000001.png"] == again["train/000001.png"]
    assert fewer["val.json"] == again["val.json"]
    other = files_of(make_scenes(tmp_path / "other", images=2, validation_images=5, seed=4, size=SIZE))
    assert all(other[f"train/00000{number}.png"] != again[f"train/00000{number}.png"] for number in (0, 1))


def test_parts_have_garments_of_their_own(folder: Path) -> None:
    """The first scenes of both parts are composed from training and validation images, and nowhere else."""
    garments = open_dataset("embedded")
    for part, source in (("train", garments.train), ("val", garments.validation)):
        assert isinstance(source, ArrayImages)
        for number in range(5):
            drawn = np.asarray(Image.open(folder / part / f"{number:06d}.png"))
            np.testing.assert_array_equal(drawn, compose(source, number, seed=3, part=part, size=SIZE).pixels)


def test_boxes_areas_and_labels_are_those_of_the_masks(content: dict[str, Any], folder: Path) -> None:
    assert [category["name"] for category in content["categories"]] == list(open_dataset("embedded").classes)
    images = {image["id"]: image for image in content["images"]}
    assert all((folder / "train" / image["file_name"]).exists() for image in images.values())
    for annotation in content["annotations"]:
        mask = decode_mask(annotation["segmentation"])
        assert mask.shape == (images[annotation["image_id"]]["height"], images[annotation["image_id"]]["width"])
        rows, columns = np.nonzero(mask)
        left, top, width, height = annotation["bbox"]
        assert (left, top) == (columns.min(), rows.min())
        assert (left + width, top + height) == (columns.max() + 1, rows.max() + 1)
        assert annotation["area"] == mask.sum() > 0
        assert 1 <= annotation["category_id"] <= 10


def test_no_pixel_belongs_to_two_and_some_garments_hide_others(content: dict[str, Any]) -> None:
    per_image: dict[int, list[Any]] = {image["id"]: [] for image in content["images"]}
    for annotation in content["annotations"]:
        per_image[annotation["image_id"]].append(decode_mask(annotation["segmentation"]))
    assert max(sum(masks).max() for masks in per_image.values() if masks) == 1
    assert any(not masks for masks in per_image.values())  # a canvas only
    assert max(map(len, per_image.values())) > 2


def test_outside_of_the_masks_is_the_canvas_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a black canvas, exactly the masks are not black: nothing is drawn that is not annotated."""
    monkeypatch.setattr(scenes, "_texture", lambda random, size: np.zeros((size, size, 3), np.uint8))
    garments = open_dataset("embedded").train
    assert isinstance(garments, ArrayImages)
    found = 0
    for number in range(30):
        scene = compose(garments, number, seed=0, part="train", size=SIZE)
        owned = np.zeros((SIZE, SIZE), bool)
        for mask in scene.masks:
            owned |= mask
        np.testing.assert_array_equal(owned, scene.pixels.any(2))
        found += len(scene.masks)
    assert found > 30


def square(left: int, right: int) -> np.ndarray:
    mask = np.zeros((10, 10), bool)
    mask[:, left:right] = True
    return mask


def test_what_lies_on_top_is_cut_out_of_what_lies_beneath() -> None:
    visible = visible_garments([square(0, 6), square(4, 10)], [60, 60])
    np.testing.assert_array_equal(visible[0], square(0, 4))
    np.testing.assert_array_equal(visible[1], square(4, 10))


def test_hidden_garments_are_left_out_and_no_longer_hide_others() -> None:
    # The middle one is hidden by the top one, and hides most of the lowest, which is to be seen without it.
    lowest, middle, top = square(0, 5), square(1, 8), square(2, 10)
    visible = visible_garments([lowest, middle, top], [50, 70, 80])
    assert list(visible) == [0, 2]
    np.testing.assert_array_equal(visible[0], square(0, 2))
    wholly = visible_garments([square(2, 4), square(0, 10)], [20, 100])
    assert list(wholly) == [1]


def test_what_lies_beyond_the_edge_counts_as_hidden() -> None:
    assert visible_garments([square(8, 10)], [200]) == {}
    assert list(visible_garments([square(0, 10)], [200])) == [0]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "scenes"
    assert main(["detect", "scenes", str(out), "--images", "3", "--seed", "1", "--size", "32"]) == 0
    assert str(out) in capsys.readouterr().out
    assert len(list((out / "train").glob("*.png"))) == 3
    assert len(list((out / "val").glob("*.png"))) == 1
    assert [entry.name for entry in out.parent.iterdir()] == ["scenes"]  # nothing is left beside it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{full}", "full is there already; a new folder for the scenes is wanted"),
        ("{file}", "file is there already"),
        ("{file}/below", "Not a directory"),
        ("{new} --images 0", "images (=0) must be from 1 to 1000000"),
        ("{new} --validation-images 0", "validation_images (=0) must be from 1"),
        ("{new} --size 31", "size (=31) must be from 32 to 4096"),
        ("{new} --seed=-1", "seed (=-1) must be from 0"),
        ("{new} --seed x", "argument --seed: invalid int value: 'x'"),
        ("''", "argument OUT: it is empty"),
    ],
)
def test_commands_that_cannot_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("")
    (tmp_path / "file").write_text("")
    places = {name: str(tmp_path / name) for name in ("full", "file", "new")}
    given = [word.format(**places).replace("''", "") for word in arguments.split()]
    assert main(["detect", "scenes", *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_interrupted_scenes_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full_disk)
    with pytest.raises(DataError, match="No space left on device"):
        make_scenes(tmp_path / "scenes", images=1, size=32)
    assert list(tmp_path.iterdir()) == []
