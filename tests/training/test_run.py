"""Whole runs in this process: what they leave, how they stop, how they go on."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kernelwarehouse as kw
from kernelwarehouse.data import ArrayImages, DataSet, FileImages
from kernelwarehouse.drop_path import even_rate
from kernelwarehouse.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    TrainingError,
    UnknownPresetError,
    UnreadableImageError,
)
from kernelwarehouse.report.run import write_run_report
from kernelwarehouse.training.api import own_image_size, train
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.loading import Batch
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.recipe import Recipe, load_recipe
from kernelwarehouse.training.run import RunOptions, accumulation_parts
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.trainer import Trainer
from tiny_things import TINY_RESNET

QUICK = RunOptions(workers=0, report_every=2)


def run(
    name: str, data: DataSet, recipe: Recipe, output: Path, options: RunOptions = QUICK, **more: object
) -> RunFolder:
    return train(name, data, recipe, output, options=options, arguments=TINY_RESNET, **more)


@pytest.fixture(scope="module")
def finished(striped: DataSet, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, DataSet, Recipe]:
    """A run that is through, for tests that damage copies of it."""
    changes = {"epochs": 2, "batch_size": 16, "tau_epochs": 0.0, "warmup_epochs": 0.0}
    recipe = load_recipe("small").with_overrides(changes)
    return run("resnet18", striped, recipe, tmp_path_factory.mktemp("runs") / "run"), striped, recipe


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
    with pytest.raises(DivergedError, match=r"the loss of step [5-8] is (nan|inf); the last good checkpoint is kept"):
        run("resnet18", striped, recipe, tmp_path / "run")
    assert RunFolder(tmp_path / "run").read_state()["trainer"]["steps_done"] == 4
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run" / "last").values())


def test_loss_that_is_not_finite_before_any_checkpoint_says_so(
    striped: DataSet, plain_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = plain_recipe.with_overrides({"learning_rate": 1e30})
    with pytest.raises(DivergedError, match=r"the loss of step [1-4] is (nan|inf); there is no checkpoint yet"):
        run("resnet18", striped, recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "last").exists()


def test_spoiled_weights_do_not_replace_a_checkpoint(
    striped: DataSet, plain_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil_after(last: int) -> None:
        step = Trainer.step

        def spoiling(trainer: Trainer, parts: list[Batch]) -> torch.Tensor:
            loss = step(trainer, parts)
            if trainer.steps_done == last:
                with torch.no_grad():
                    trainer.model.fc.weight[0, 0] = float("nan")
            return loss

        monkeypatch.setattr(Trainer, "step", spoiling)

    spoil_after(8)
    with pytest.raises(
        DivergedError, match=r"after step 8, fc\.weight is not finite; the last good checkpoint is kept"
    ):
        run("resnet18", striped, plain_recipe, tmp_path / "run")
    spoil_after(4)
    with pytest.raises(DivergedError, match=r"after step 4, fc\.weight is not finite; there is no checkpoint yet"):
        run("resnet18", striped, plain_recipe, tmp_path / "other")


def test_changed_data_are_not_trained_on(striped: DataSet, plain_recipe: Recipe, tmp_path: Path) -> None:
    run("resnet18", striped, plain_recipe, tmp_path / "run")
    before = json.loads((tmp_path / "run" / "run.json").read_text())
    train, validation = striped.train, striped.validation
    assert isinstance(train, ArrayImages)
    assert isinstance(validation, ArrayImages)
    fewer = ArrayImages(train.pixels[:48], train.labels[:48], "train")
    swapped = ArrayImages(validation.pixels[::-1], validation.labels, "validation")
    for changed, message in (
        (replace(striped, train=fewer), r"training images: there 64, now 48"),
        (replace(striped, validation=swapped), r"validation images differ"),
    ):
        with pytest.raises(TrainingError, match=rf"other data, of the same name striped \({message}\)"):
            run("resnet18", changed, plain_recipe, tmp_path / "run")
    # A run from before there were fingerprints goes on.
    del before["format"], before["fingerprint"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(before))
    run("resnet18", replace(striped, validation=swapped), plain_recipe, tmp_path / "run")
    with pytest.raises(CheckpointError, match="is at step 8, but the run has 6 steps"):
        run("resnet18", replace(striped, train=fewer), plain_recipe, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: [state], "does not hold the state of a run"),
        (lambda state: state | {"trainer": 5}, "does not say its step"),
        (lambda state: state | {"trainer": {}}, "does not say its step"),
        (
            lambda state: state | {"trainer": state["trainer"] | {"steps_done": 99}},
            "is at step 99, but the run has 8 steps",
        ),
        (
            lambda state: state | {"trainer": state["trainer"] | {"optimizer": {"state": 3}}},
            "does not fit this network",
        ),
        (lambda state: state | {"loss_sum": None}, "is not the state of a run"),
        (lambda state: {"trainer": state["trainer"]}, "is not the state of a run"),
        (lambda state: state | {"losses": ["a"]}, "is not the state of a run"),
    ],
)
def test_checkpoints_that_are_none_are_named(
    finished: tuple[RunFolder, DataSet, Recipe], tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    done, data, recipe = finished
    shutil.copytree(done.path, tmp_path / "run", symlinks=True)
    path = tmp_path / "run" / "last" / "training.pt"
    torch.save(change(torch.load(path, weights_only=True)), path)
    with pytest.raises(CheckpointError, match=message):
        run("resnet18", data, recipe, tmp_path / "run")


def test_missing_state_stops_a_run_instead_of_starting_it_anew(
    finished: tuple[RunFolder, DataSet, Recipe], tmp_path: Path
) -> None:
    done, data, recipe = finished
    shutil.copytree(done.path, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "last" / "training.pt").unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"training\.pt is missing, and without it the run cannot go on"):
        run("resnet18", data, recipe, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"metrics\.jsonl is damaged or missing: it has no step reports"),
        ('{"kind": "step", "step": 4}\n', "the step report at step 4 has no loss"),
        ("junk\n", "line 1 of .*is damaged"),
    ],
)
def test_report_of_damaged_metrics(
    finished: tuple[RunFolder, DataSet, Recipe], tmp_path: Path, content: str | None, message: str
) -> None:
    done, data, _ = finished
    shutil.copytree(done.path, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    if content is not None:
        (tmp_path / "run" / "metrics.jsonl").write_text(content)
    with pytest.raises(TrainingError, match=message):
        write_run_report(RunFolder(tmp_path / "run"), data)


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


def test_size_is_that_of_the_first_image_that_can_be_read(plain_recipe: Recipe, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(20)]
    for number, path in enumerate(paths):
        Image.fromarray(np.full((16, 16, 3), number * 6, dtype=np.uint8)).save(path)
    paths[16].write_bytes(b"broken")
    labels = [number % 2 for number in range(20)]
    data = DataSet("files", ("a", "b"), FileImages(paths[:16], labels[:16]), FileImages(paths[16:], labels[16:]))
    assert own_image_size(data, "skip") == 16
    with pytest.raises(UnreadableImageError, match=r"16\.png"):
        own_image_size(data)
    recipe = plain_recipe.with_overrides({"epochs": 1})
    folder = run("resnet18", data, recipe, tmp_path / "run", replace(QUICK, unreadable="skip"))
    assert read_metrics(folder.metrics_path)[-1]["images"] == 3
    for path in paths[16:]:
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match="files: none of the 4 validation images can be read"):
        own_image_size(data, "skip")


def test_runs_that_cannot_start(striped: DataSet, plain_recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UnknownPresetError, match=r"no network 'kw1x_resnet81'; did you mean.*kw1x_resnet18"):
        run("kw1x_resnet81", striped, plain_recipe, tmp_path)
    with pytest.raises(TrainingError, match="batch size 128 is larger than the 64 training images"):
        run("resnet18", striped, plain_recipe.with_overrides({"batch_size": 128}), tmp_path)
    with pytest.raises(DataError, match="striped has no training images"):
        run("resnet18", replace(striped, train=None), plain_recipe, tmp_path)
    with pytest.raises(kw.ConfigError, match=r"cannot be built with.*colour"):
        train("resnet18", striped, plain_recipe, tmp_path, arguments={"colour": 1})


def test_a_network_is_trained_with_its_exceptions(striped: DataSet, recipe: Recipe, tmp_path: Path) -> None:
    changes = {"epochs": 1, "tau_epochs": 0.5, "drop_path_rule": "even"}
    exceptions = {"kw1x_*": {"drop_path": 0.25}, "resnet*": {"drop_path": 0.5}}
    general = replace(recipe.with_overrides(changes), exceptions=exceptions)
    folder = run("kw1x_resnet18", striped, general, tmp_path / "run")
    stored = folder.read_settings().recipe
    assert stored.drop_path == 0.25
    assert stored.exceptions == {}
    assert even_rate(kw.load(folder.path / "last")) == 0.25
    run("kw1x_resnet18", striped, general, tmp_path / "run")  # the same, and finished
    with pytest.raises(TrainingError, match=r"recipe\.drop_path: there 0\.25, now 0\.1"):
        run("kw1x_resnet18", striped, general.with_overrides({"drop_path": 0.1}), tmp_path / "run")


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
