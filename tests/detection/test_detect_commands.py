"""`kernelwarehouse detect`: a run from the command line, its numbers, its drawing; and what is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from detection_runs import CHANGES, TINY_RESNET
from PIL import ExifTags, Image

from kernelwarehouse.cli import main
from kernelwarehouse.detection import demo
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.run import RunOptions

# One epoch of two steps.
RECIPE = CHANGES | {"tau_epochs": 0.5, "ema_decay": 0.0}
SETTINGS = [
    f"--set={name}={json.dumps(value)}" for name, value in RECIPE.items() if name not in ("epochs", "batch_size")
]
MODEL = [f"--model-arg={name}={json.dumps(value)}" for name, value in TINY_RESNET.items()]
SMALL = ["--schedule", "small", "--epochs", "1", "--batch-size", "4", "--workers", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["detect", "train", "resnet18", "--coco", str(scenes), "--output", str(folder), *SMALL, *SETTINGS, *MODEL]
    assert main(words) == 0
    return folder


def test_train_leaves_a_run_with_a_report(trained: Path) -> None:
    assert [line["kind"] for line in read_metrics(trained / "metrics.jsonl")] == ["step", "epoch"]
    page = (trained / "report.html").read_text()
    assert "Mask R-CNN on resnet18: mask AP" in page
    assert page.count('<div class="drawings">') == 1
    assert "recipe: decay_at" in page


@pytest.mark.parametrize("place", ["", "last"])
def test_eval_shows_coco_s_numbers(trained: Path, scenes: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = scenes if place else scenes / "val.json"  # a file of annotations will do
    assert main(["detect", "eval", str(trained / place), "--coco", str(where), "--workers", "0"]) == 0
    shown = capsys.readouterr().out
    for word in ("AP50", "AP75", "APs", "APm", "APl", "boxes", "masks", "3 pictures"):
        assert word in shown


def test_predict_draws_what_is_found(
    trained: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, output = scenes / "val" / "000000.png", tmp_path / "out.jpg"
    words = ["detect", "predict", str(trained), str(picture), "--output", str(output), "--threshold", "0"]
    assert main(words) == 0
    with Image.open(output) as drawn:
        assert drawn.format == "JPEG"
        assert min(drawn.size) >= 480
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(f"objects, drawn in {output}")
    assert len(lines) - 1 == int(lines[-1].split()[0])


def test_predict_with_a_threshold_that_nothing_reaches(trained: Path, scenes: Path, tmp_path: Path) -> None:
    picture = scenes / "val" / "000000.png"
    words = ["detect", "predict", str(trained), str(picture), "--output", str(tmp_path / "o.png"), "--threshold", "1"]
    assert main(words) == 0
    with Image.open(picture) as given, Image.open(tmp_path / "o.png") as drawn:
        assert drawn.tobytes() == given.convert("RGB").resize(drawn.size, Image.Resampling.NEAREST).tobytes()
        assert drawn.width == 10 * given.width


@pytest.mark.parametrize("note", ["orientation", "damaged"])
def test_predict_turns_a_picture_as_its_camera_says(trained: Path, scenes: Path, tmp_path: Path, note: str) -> None:
    with Image.open(scenes / "val" / "000000.png") as whole:
        upright = whole.convert("RGB").crop((0, 0, 48, 40))
    if note == "orientation":
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6  # stored with its top at the left
        upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "given.png", exif=exif)
    else:
        upright.save(tmp_path / "given.png", exif=b"Exif\0\0no such thing")
    words = ["detect", "predict", str(trained), str(tmp_path / "given.png"), "--threshold", "1"]
    assert main([*words, "--output", str(tmp_path / "drawn.png")]) == 0
    with Image.open(tmp_path / "drawn.png") as drawn:
        assert drawn.width * upright.height == drawn.height * upright.width
        assert drawn.tobytes() == upright.resize(drawn.size, Image.Resampling.NEAREST).tobytes()


def refused(words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    assert main(["detect", *map(str, words)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_commands_that_cannot_be_done(
    trained: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    picture, out = scenes / "val" / "000000.png", tmp_path / "out.jpg"
    train = ["train", "resnet18", "--coco", scenes, "--output", tmp_path / "new"]
    for words, message in (
        ([*train, "--schedule", "3x"], "recipe '3x' is unknown; there are 1x, small"),
        (train, "resnet18 is new, and what the recipe freezes of it would never learn anything"),
        ([*train, "--epochs", "3"], "decay_at (=[8, 11]) must be growing numbers of epochs within the run of 3"),
        ([*train, "--set", "mixup=1"], "recipe field 'mixup' is unknown"),
        ([*train, "--frozen-stages", "-2", *SMALL], "frozen_stages (=-2) must be at least -1"),
        ([*train, *SMALL, "--frozen-stages", "1", "--set", "frozen_stages=1"], "frozen_stages is given twice"),
        ([*train, *SMALL, "--backbone-checkpoint", tmp_path / "no"], "has no network: neither"),
        ([*train, *SMALL, "--model-arg", "colour"], "--model-arg 'colour' must look like name=value"),
        (["train", "resnet81", "--coco", scenes, "--output", tmp_path / "new", *SMALL], "no network 'resnet81'"),
        (["train", "resnet18", "--coco", tmp_path / "no", "--output", tmp_path / "new"], "no is not there; a folder"),
        (["train", "vit_tiny_patch16_224", "--coco", scenes, "--output", tmp_path / "new", *SMALL], "feature maps"),
        (["eval", tmp_path, "--coco", scenes], "is not the folder of a run: it has no run.json"),
        (["predict", trained, picture, "--output", tmp_path / "out"], "has no known form; its name must end in .jpg"),
        (["predict", trained, picture, "--output", tmp_path / "no" / "out.jpg"], "out.jpg cannot be written: No such"),
        (["predict", trained, tmp_path / "no.png", "--output", out], "no.png"),
        (["predict", trained, picture, "--output", out, "--threshold", "2"], "--threshold (=2.0) must be from 0 to 1"),
    ):
        assert message in refused(words, capsys), words
    assert not (tmp_path / "new").exists()
    assert not out.exists()


def test_all_missing_pictures_are_listed_before_training(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "val"):
        described = json.loads((scenes / f"{part}.json").read_text())
        for image in described["images"]:
            image["file_name"] = f"no\033\n{image['file_name']}"
        (tmp_path / f"{part}.json").write_text(json.dumps(described))
    assert main(["detect", "train", "resnet18", "--coco", str(tmp_path), "--output", str(tmp_path / "run")]) == 2
    first, *listed, line = capsys.readouterr().err.splitlines()
    assert first == "Missing:"
    assert [name.rpartition("no")[2] for name in listed] == [
        rf"\x1b\n{number:06}.png" for count in (8, 3) for number in range(count)
    ]
    assert line.startswith("kernelwarehouse: 11 of 11 pictures are missing: ")
    assert "and 1 more, all listed with this error" in line
    assert not (tmp_path / "run").exists()


def test_a_detector_is_evaluated_on_its_own_classes(
    trained: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = json.loads((scenes / "val.json").read_text())
    described["categories"][0]["name"] = "Hat"
    (tmp_path / "val.json").write_text(json.dumps(described))
    capsys.readouterr()
    line = refused(
        ["eval", trained, "--coco", tmp_path / "val.json", "--images", scenes / "val", "--workers", 0], capsys
    )
    assert "has 10 classes (Hat, " in line
    assert "they must be the same, in the same order" in line


def test_the_folder_of_a_classifier_is_no_detector(
    trained: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((trained / "run.json").read_text())
    del settings["task"]
    (tmp_path / "run.json").write_text(json.dumps(settings))
    capsys.readouterr()
    line = refused(["eval", tmp_path, "--coco", scenes], capsys)
    assert "is that of a run for 'classification'; one for 'detection' is wanted here" in line


def test_the_demonstration_puts_twins_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, on a few scenes: what it teaches takes minutes."""
    monkeypatch.setattr(demo, "OPTIONS", RunOptions(workers=0, report_every=1))
    monkeypatch.setattr(demo, "PICTURED", 2)
    changes = RECIPE | {"epochs": 1}
    scenes = {"images": 4, "validation_images": 2, "size": 48}
    assert demo.run_demo(tmp_path / "demo", scenes, changes, TINY_RESNET) == 0
    shown = capsys.readouterr().out
    assert "(resnet18), " in shown
    assert "mask AP50, best epoch" in shown
    with Image.open(tmp_path / "demo" / "predictions.png") as sheet:
        assert sheet.width < sheet.height  # two scenes: the truth, and what each has found
    assert (tmp_path / "demo" / "report.html").exists()
