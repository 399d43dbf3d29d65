"""Whole runs in this process: what they leave, how they stop, how they go on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import kernelwarehouse as kw
from kernelwarehouse.data import ArrayImages, DataSet, FileImages
from kernelwarehouse.errors import CheckpointError, DataError, TrainingError, UnknownPresetError, UnreadableImageError
from kernelwarehouse.training.api import train
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.recipe import Recipe, load_recipe
from kernelwarehouse.training.run import RunOptions, accumulation_parts
from kernelwarehouse.training.run_folder import RunFolder
from tiny_things import TINY_RESNET

QUICK = RunOptions(workers=0, report_every=2)


def run(
    name: str, data: DataSet, recipe: Recipe, output: Path, options: RunOptions = QUICK, **more: object
) -> RunFolder:
    return train(name, data, recipe, output, options=options, arguments=TINY_RESNET, **more)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return kw.load(path).state_dict()


def test_a_run_leaves_all_it_should(striped: DataSet, recipe: Recipe, tmp_path: Path) -> None:
    folder = run("kw1x_resnet18", striped, recipe, tmp_path / "run")
    lines = read_metrics(folder.metrics_path)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 2), ("step", 4), ("epoch", 4), ("step", 6), ("step", 8), ("epoch", 8)
    ]  # fmt: skip
    assert [line["tau"] for line in lines if line["kind"] == "step"] == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert all(line["images"] == 25 for line in lines if line["kind"] == "epoch")
    settings = json.loads((folder.path / "run.json").read_text())
    assert settings["recipe"] == recipe.as_dict()
    assert settings["image_size"] == 16
    assert kw.get_temperature(kw.load(folder.path / "last")) == 0
    assert list((folder.path / "tensorboard").iterdir())


def test_started_again_a_finished_run_changes_nothing(
    striped: DataSet, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run("resnet18", striped, recipe, tmp_path / "run")
    before, metrics = weights(folder.path / "last"), folder.metrics_path.read_text()
    run("resnet18", striped, recipe, tmp_path / "run")
    assert f"{tmp_path / 'run'} is finished: 2 epochs" in capsys.readouterr().out
    torch.testing.assert_close(weights(folder.path / "last"), before, rtol=0, atol=0)
    assert folder.metrics_path.read_text() == metrics
    with pytest.raises(TrainingError, match=r"other settings \(seed: there 0, now 1\)"):
        run("resnet18", striped, recipe, tmp_path / "run", replace(QUICK, seed=1))


def test_seeds_decide(striped: DataSet, recipe: Recipe, tmp_path: Path) -> None:
    first, again, other = (
        weights(run("resnet18", striped, recipe, tmp_path / name, replace(QUICK, seed=seed)).path / "last")["fc.weight"]
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
    striped: DataSet, plain_recipe: Recipe, tmp_path: Path
) -> None:
    # The second epoch runs at 10^30 times the learning rate of the first.
    recipe = plain_recipe.with_overrides({"schedule": "step", "decay_every": 1, "decay_factor": 1e30, "epochs": 3})
    with pytest.raises(TrainingError, match=r"the loss of step [5-8] is (nan|inf); the last good checkpoint is kept"):
        run("resnet18", striped, recipe, tmp_path / "run")
    assert RunFolder(tmp_path / "run").read_state()["trainer"]["steps_done"] == 4
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run" / "last").values())


def test_fine_tuning_takes_over_weights_for_other_classes(
    striped: DataSet, plain_recipe: Recipe, tmp_path: Path
) -> None:
    first = run("kw1x_resnet18", striped, plain_recipe, tmp_path / "first")
    two = DataSet(
        "two",
        ("left", "right"),
        ArrayImages(striped.train.pixels, striped.train.labels % 2, "train"),
        ArrayImages(striped.validation.pixels, striped.validation.labels % 2, "validation"),
    )
    recipe = load_recipe("finetune").with_overrides(
        {
            "epochs": 1,
            "batch_size": 16,
            "image_size": 16,
            "learning_rate": 1e-12,
            "warmup_epochs": 0.0,
            "ema_decay": 0.0,
        }
    )
    second = run("kw1x_resnet18", two, recipe, tmp_path / "second", weights=first.path / "last")
    old, new = weights(first.path / "last"), weights(second.path / "last")
    assert new["fc.weight"].shape == (2, 16)
    torch.testing.assert_close(new["layer1.0.conv1.warehouse.cells"], old["layer1.0.conv1.warehouse.cells"])
    assert read_metrics(second.metrics_path)[0]["tau"] == 0
    with pytest.raises(CheckpointError, match="holds another network than the one to train"):
        run("resnet18", two, recipe, tmp_path / "third", weights=first.path / "last")


def test_unreadable_images_are_named_counted_and_skipped_or_fatal(
    plain_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for number in range(40):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(np.full((16, 16, 3), number * 6, dtype=np.uint8)).save(paths[-1])
    paths[3].write_bytes(b"broken")
    paths[35].write_bytes(b"broken")
    labels = [number % 2 for number in range(40)]
    data = DataSet("files", ("a", "b"), FileImages(paths[:32], labels[:32]), FileImages(paths[32:], labels[32:]))
    recipe = plain_recipe.with_overrides({"epochs": 1})
    with pytest.raises(UnreadableImageError, match=r"3\.png"):
        run("resnet18", data, recipe, tmp_path / "stop")
    folder = run("resnet18", data, recipe, tmp_path / "skip", replace(QUICK, unreadable="skip"))
    last = read_metrics(folder.metrics_path)[-1]
    assert (last["images"], last["unreadable"]) == (7, 2)
    shown = capsys.readouterr().out
    assert "3.png" in shown
    assert "35.png" in shown


def test_runs_that_cannot_start(striped: DataSet, plain_recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UnknownPresetError, match=r"no network 'kw1x_resnet81'; did you mean.*kw1x_resnet18"):
        run("kw1x_resnet81", striped, plain_recipe, tmp_path)
    with pytest.raises(TrainingError, match="batch size 128 is larger than the 64 training images"):
        run("resnet18", striped, plain_recipe.with_overrides({"batch_size": 128}), tmp_path)
    with pytest.raises(DataError, match="striped has no training images"):
        run("resnet18", replace(striped, train=None), plain_recipe, tmp_path)
    with pytest.raises(TrainingError, match=r"does not take the arguments.*colour"):
        train("resnet18", striped, plain_recipe, tmp_path, arguments={"colour": 1})


def test_parts_of_a_batch() -> None:
    recipe = load_recipe("advanced")
    eight = Processes(world_size=8)
    assert accumulation_parts(recipe, RunOptions(), eight) == 1
    assert accumulation_parts(recipe, RunOptions(device_batch_size=128), eight) == 4
    assert accumulation_parts(recipe, RunOptions(device_batch_size=64), Processes()) == 64
    with pytest.raises(TrainingError, match="4096 over 8 processes, 100 images at a time, does not come out even"):
        accumulation_parts(recipe, RunOptions(device_batch_size=100), eight)
    with pytest.raises(TrainingError, match="1 images at a time cannot be paired"):
        accumulation_parts(recipe, RunOptions(device_batch_size=1), Processes())
