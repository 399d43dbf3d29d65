"""Detection as a task of the engine: schedules, scenes, losses, evaluation, and runs that cannot start."""

from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from detection_runs import OPTIONS, TINY_RESNET, tiny_recipe, train_tiny
from small_coco import content, write_set
from tiny_detectors import tiny_classifier
from torch import nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

import kernelwarehouse as kw
from kernelwarehouse.detection.data import CocoData, open_coco
from kernelwarehouse.detection.detector import Detector
from kernelwarehouse.detection.loading import SceneSample, collate_scenes, flipped
from kernelwarehouse.detection.predict import TrainedDetector, open_detector
from kernelwarehouse.detection.recipe import DetectionRecipe, load_schedule, schedule_names
from kernelwarehouse.detection.training import Detection, DetectionSettings, SummedLosses, new_detector
from kernelwarehouse.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RecipeError,
    TrainingError,
    UnreadableImageError,
)
from kernelwarehouse.training.distributed import Processes
from kernelwarehouse.training.metrics import read_metrics
from kernelwarehouse.training.optimisation import make_optimizer, make_schedule
from kernelwarehouse.training.predict import open_trained
from kernelwarehouse.training.progress import Display
from kernelwarehouse.training.run import Run
from kernelwarehouse.training.run_folder import RunFolder
from kernelwarehouse.training.trainer import Trainer


@pytest.fixture(scope="module")
def data(scenes: Path) -> CocoData:
    return open_coco(scenes)


def test_1x_is_what_the_paper_and_mmdetection_say() -> None:
    recipe = load_schedule("1x").as_dict()
    expected = {
        "epochs": 12,
        "batch_size": 16,
        "optimizer": "momentum",
        "learning_rate": 0.02,
        "momentum": 0.9,
        "weight_decay": 0.0001,
        "schedule": "step",
        "decay_at": (8, 11),
        "decay_factor": 0.1,
        "tau_epochs": 0,
        "evaluation_side": 800,
        "longest_side": 1333,
        "flip": 0.5,
    }
    assert {name: recipe[name] for name in expected} == expected
    assert (min(recipe["short_sides"]), max(recipe["short_sides"])) == (640, 800)


@pytest.mark.parametrize("name", schedule_names())
def test_every_field_is_explained_and_sourced(name: str) -> None:
    lines = (files("kernelwarehouse.detection") / "recipes" / f"{name}.toml").read_text().splitlines()
    explained = {line.split(" = ")[0] for line in lines if " = " in line and "# [" in line}
    assert explained == {field.name for field in fields(DetectionRecipe)} - {"summary", "exceptions"}


def test_rates_of_1x_rise_for_500_steps_of_coco_and_drop_when_8_and_11_epochs_are_over() -> None:
    recipe, steps = load_schedule("1x"), 7330
    optimizer = make_optimizer(nn.Linear(2, 2), recipe)
    schedule = make_schedule(optimizer, recipe, steps)

    def rate(step: int) -> float:
        schedule.step_update(step)
        return float(optimizer.param_groups[0]["lr"])

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.00002)
    assert rate(249) == pytest.approx(0.01, rel=0.01)
    assert [rate(step) for step in (498, 8 * steps - 1)] == pytest.approx([0.02, 0.02])
    assert [rate(step) for step in (8 * steps, 11 * steps - 1)] == pytest.approx([0.002, 0.002])
    assert [rate(step) for step in (11 * steps, 12 * steps - 1)] == pytest.approx([0.0002, 0.0002])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 6}, r"decay_at \(=\[8, 11\]\) must be growing numbers of epochs within the run of 6"),
        ({"decay_at": [11, 8]}, r"decay_at \(=\[11, 8\]\) must be growing"),
        ({"decay_at": 8}, r"decay_at \(=8\) must be a list of whole numbers"),
        ({"short_sides": []}, r"short_sides \(=\[\]\) must be at least 32"),
        ({"short_sides": [640, 2000]}, r"at most longest_side \(=1333\)"),
        ({"longest_side": 10000}, r"longest_side \(=10000\) must be at least 0 and at most 8192"),
        ({"norms": "none"}, r"norms \(='none'\) must be one of frozen, trained"),
        ({"frozen_stages": -2}, r"frozen_stages \(=-2\) must be at least -1"),
        ({"compile": True}, "not for detectors"),
        ({"proposals": 0}, r"proposals \(=0\) must be above 0"),
        ({"mixup": 0.5}, "recipe field 'mixup' is unknown"),
    ],
)
def test_schedules_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_schedule("1x").with_overrides(changes)


def test_unknown_schedules_are_named() -> None:
    with pytest.raises(RecipeError, match="recipe '3x' is unknown; there are 1x, small"):
        load_schedule("3x")


def test_a_scene_depends_on_epoch_and_index_only_and_is_seen_at_many_scales(data: CocoData) -> None:
    samples = Detection(data, tiny_recipe()).training_samples(3, "stop")
    again = Detection(data, tiny_recipe()).training_samples(3, "stop")
    seen = {}
    for epoch in range(6):
        sample = samples[epoch, 1]
        torch.rand(5)
        same = again[epoch, 1]
        assert torch.equal(sample.image, same.image)
        assert all(torch.equal(values, same.target[name]) for name, values in sample.target.items())
        seen[sample.image.shape[-1], float(sample.image[0, 0, 0])] = epoch
    assert {side for side, _ in seen} == {40, 48}
    assert len(seen) > 2  # flipped, too


def test_scenes_are_resized_as_torchvision_does_it(data: CocoData) -> None:
    samples = Detection(data, tiny_recipe(short_sides=[40], flip=0.0)).training_samples(0, "stop")
    number = next(index for index in range(len(data.train)) if len(data.train.target(index)["boxes"]))
    scene = data.train[number]
    wanted = {name: scene.target[name] for name in ("boxes", "labels", "masks")}
    theirs = GeneralizedRCNNTransform(40, 64, [0.0] * 3, [1.0] * 3)([scene.image / 255], [wanted])
    sample = samples[0, number]
    torch.testing.assert_close(sample.image, theirs[0].tensors[0, :, :40, :40], rtol=0, atol=0)
    for name, values in theirs[1][0].items():
        torch.testing.assert_close(sample.target[name], values, rtol=0, atol=0)


def test_flipped_twice_is_as_before_and_boxes_stay_around_their_masks(data: CocoData) -> None:
    number = next(index for index in range(len(data.train)) if len(data.train.target(index)["boxes"]))
    scene = data.train[number]
    image, target = flipped(scene.image, scene.target)
    for box, mask in zip(target["boxes"], target["masks"], strict=True):
        columns = mask.any(0).nonzero()
        assert (int(box[0]), int(box[2])) == (int(columns.min()), int(columns.max()) + 1)
    back_image, back = flipped(image, target)
    assert torch.equal(back_image, scene.image)
    assert torch.equal(back["boxes"], scene.target["boxes"])


def test_a_batch_gives_back_what_was_packed(data: CocoData) -> None:
    samples = Detection(data, tiny_recipe()).training_samples(0, "stop")
    chosen = [samples[epoch, number] for epoch, number in ((0, 0), (1, 1), (2, 2), (0, 3))]
    chosen.insert(2, SceneSample(None, {}, 0, ("b.png: broken",)))
    empty = {"boxes": torch.empty(0, 4), "labels": torch.empty(0).long(), "masks": torch.empty(0, 40, 48).byte()}
    chosen.append(SceneSample(torch.rand(3, 40, 48), empty, 99))
    batch = collate_scenes(chosen).to(torch.device("cpu"))
    readable = [sample for sample in chosen if sample.image is not None]
    assert batch.unreadable == ["b.png: broken"]
    assert batch.image_ids == [sample.image_id for sample in readable]
    assert sum(batch.objects) > 0
    for sample, image, target in zip(readable, batch.images, batch.targets, strict=True):
        assert torch.equal(sample.image, image)
        for name, values in sample.target.items():
            assert torch.equal(values, target[name])
            assert values.dtype == target[name].dtype


def test_the_loss_is_the_sum_of_all_and_images_are_not_resized_again(data: CocoData) -> None:
    recipe = tiny_recipe()
    detector = new_detector("resnet18", recipe, len(data.classes), seed=0, arguments=TINY_RESNET).train()
    samples = Detection(data, recipe).training_samples(0, "stop")
    batch = collate_scenes([samples[0, number] for number in range(2)])
    sizes = detector.transform(list(batch.images), [dict(target) for target in batch.targets])[0].image_sizes
    assert sizes == [tuple(image.shape[-2:]) for image in batch.images]
    torch.manual_seed(0)
    loss = SummedLosses().loss(detector, batch).detach()
    torch.manual_seed(0)
    losses = {name: part.detach() for name, part in detector(batch.images, batch.targets).items()}
    assert len(losses) == 5
    assert float(loss) == pytest.approx(sum(float(part) for part in losses.values()), rel=1e-6)


def test_detectors_are_the_same_for_the_same_seed() -> None:
    one, same, other = (
        new_detector("kw1x_resnet18", tiny_recipe(), 3, seed=seed, arguments=TINY_RESNET).state_dict()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "changes", [{"precision": "bfloat16"}, {"precision": "float16"}, {"channels_last": True, "optimizer": "momentum"}]
)
def test_variants_learn(data: CocoData, changes: dict[str, Any]) -> None:
    """On one batch in two parts, as often as it takes to see it in the loss."""
    recipe = tiny_recipe(tau_epochs=0.0, warmup_epochs=0.0, learning_rate=0.002, flip=0.0, **changes)
    task = Detection(data, recipe)
    samples = task.training_samples(0, "stop")
    parts = [collate_scenes([samples[0, number]]) for number in range(2)]
    detector = new_detector("kw1x_resnet18", recipe, len(data.classes), seed=0, arguments=TINY_RESNET)
    trainer = Trainer(detector, recipe, objective=task.objective(), steps_per_epoch=100)
    losses = [float(trainer.step(parts)) for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    assert all(parameter.dtype == torch.float32 for parameter in detector.parameters())


class Oracle(nn.Module):
    """Finds what there is to find."""

    def __init__(self, data: CocoData) -> None:
        super().__init__()
        self.part = data.validation
        self.number = 0

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        found = []
        for image in images:
            target = self.part.target(self.number)
            assert image.shape[-2:] == target["masks"].shape[-2:]
            scores = torch.ones(len(target["labels"]))
            found.append({**target, "scores": scores, "masks": target["masks"][:, None].float()})
            self.number += 1
        return found


def test_evaluation_of_an_oracle_is_perfect_and_told_in_words(data: CocoData) -> None:
    task = Detection(data, tiny_recipe())
    samples = task.validation_samples("stop")
    batches = [collate_scenes([samples[number]]) for number in range(task.validation_count)]
    empty = collate_scenes([SceneSample(None, {}, 1, ("a.png: broken",))])
    network = Oracle(data).train()
    scores = task.evaluate(network, [*batches, empty], Processes(), "float32")
    values = scores.as_dict()
    assert (values[task.best_by], values["box_ap50"]) == pytest.approx((1, 1))
    assert scores.unreadable == ("a.png: broken",)
    assert network.training
    told = task.told(values | {"training_loss": 1.5})
    assert told == ["mask AP 100.0% (AP50 100.0%)", "box AP 100.0% (AP50 100.0%)", "training loss 1.5000"]


def test_what_is_found_does_not_depend_on_the_size_of_batches(tmp_path: Path) -> None:
    """On pictures of three shapes, which padding would change; in training, and as `detect eval` does it."""
    data = open_coco(write_set(tmp_path / "set"))
    found = []
    for size in (1, 3, None):
        recipe = tiny_recipe(tau_epochs=0.0, ema_decay=0.0, batch_size=size or 1)
        detector = new_detector("kw1x_resnet18", recipe, 3, seed=0, arguments=TINY_RESNET)
        answers: list[dict[str, torch.Tensor]] = []
        detector.register_forward_hook(lambda _, __, answer, answers=answers: answers.extend(answer))
        settings = DetectionSettings(
            model="kw1x_resnet18", data="set", classes=data.classes, image_size=48, seed=0, recipe=recipe
        )
        run = Run(
            *(detector, Detection(data, recipe), settings, RunFolder(tmp_path / "run")),
            options=OPTIONS,
            processes=Processes(),
            display=Display(silent=True),
        )
        if size is not None:
            run.evaluate()
        else:
            TrainedDetector(detector, data.classes).evaluate(data, Processes(), workers=0, unreadable="stop")
        found.append(answers)
    assert any(len(answer["boxes"]) for answer in found[0])
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one[name], other[name]) for other in others for name in one)


def test_a_run_leaves_all_it_should_and_its_backbone_comes_from_a_classifier(data: CocoData, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = tiny_classifier("kw1x_resnet18", **TINY_RESNET)
    kw.save(classifier, tmp_path / "classifier")
    recipe = tiny_recipe(tau_epochs=0.0, frozen_stages=1, norms="frozen", ema_decay=0.0, epochs=1)
    folder = train_tiny(data, tmp_path / "run", recipe=recipe, weights=tmp_path / "classifier")
    lines = read_metrics(folder.metrics_path)
    assert [(line["kind"], line["step"]) for line in lines] == [("step", 1), ("step", 2), ("epoch", 2)]
    assert {line["tau"] for line in lines} == {0}
    assert lines[-1]["images"] == 3
    assert '"task": "detection"' in folder.settings_path.read_text()
    detector = open_detector(folder.path).network
    assert isinstance(detector, Detector)
    learnt, before = detector.backbone_network().state_dict(), classifier.state_dict()
    assert torch.equal(learnt["layer1.0.conv1.attention.fc1.weight"], before["layer1.0.conv1.attention.fc1.weight"])
    assert not torch.equal(learnt["layer4.0.conv1.attention.fc1.weight"], before["layer4.0.conv1.attention.fc1.weight"])
    # It is no run for classification, and the one for classification is none for detection.
    with pytest.raises(TrainingError, match="is that of a run for 'detection'; one for 'classification' is wanted"):
        open_trained(folder.path)
    with pytest.raises(TrainingError, match=r"other settings \(recipe\.flip: there 0\.5, now 0\.0\)"):
        train_tiny(data, tmp_path / "run", recipe=recipe.with_overrides({"flip": 0.0}), weights=tmp_path / "classifier")


def test_what_has_learnt_nothing_is_not_frozen(data: CocoData, tmp_path: Path) -> None:
    recipe = tiny_recipe(frozen_stages=0, norms="frozen")
    with pytest.raises(ConfigError, match=r"set frozen_stages \(=0\) to -1 and norms \(='frozen'\) to 'trained'"):
        train_tiny(data, tmp_path / "run", recipe=recipe)
    assert not (tmp_path / "run").exists()


def test_trained_backbones_are_not_started_again(data: CocoData, tmp_path: Path) -> None:
    for name in ("kw1x_resnet18", "resnet18"):
        kw.save(tiny_classifier(name, **TINY_RESNET), tmp_path / name)
    with pytest.raises(ConfigError, match=r"tau_epochs \(=1\.5\) .* use --set tau_epochs=0"):
        train_tiny(data, tmp_path / "run", weights=tmp_path / "kw1x_resnet18")
    assert not (tmp_path / "run").exists()
    # A static network has no temperature that the recipe could raise.
    assert new_detector("resnet18", tiny_recipe(), 3, seed=0, arguments=TINY_RESNET, weights=tmp_path / "resnet18")


def test_the_classifier_of_another_backbone_is_refused(data: CocoData, tmp_path: Path) -> None:
    kw.save(tiny_classifier("resnet18", **TINY_RESNET), tmp_path / "classifier")
    with pytest.raises(CheckpointError, match="holds another network than the backbone kw1x_resnet18"):
        train_tiny(data, tmp_path / "run", weights=tmp_path / "classifier")


def test_a_folder_that_cannot_be_gone_on_with_is_refused_without_the_option_of_classifiers(
    data: CocoData, tmp_path: Path
) -> None:
    (tmp_path / "last").mkdir()
    with pytest.raises(TrainingError, match=r"last is no symbolic link; .*: use another --output$"):
        train_tiny(data, tmp_path)


def test_data_that_cannot_be_trained_on(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set")
    data = open_coco(root)
    with pytest.raises(DataError, match="has no training images, only some to evaluate on"):
        Detection(replace(data, train=None), tiny_recipe())
    nothing = {**content(), "annotations": []}
    empty = open_coco(write_set(tmp_path / "empty", train=nothing, validation=nothing))
    with pytest.raises(DataError, match=r"train\.json has no objects to learn from: it has no annotations"):
        Detection(empty, tiny_recipe())
    crowds = content()
    crowds["annotations"] = [one for one in crowds["annotations"] if one["iscrowd"]]
    only_crowds = open_coco(write_set(tmp_path / "crowds", train=crowds))
    with pytest.raises(DataError, match=r"learn from: all of its 1 annotations are crowds or have no area"):
        Detection(only_crowds, tiny_recipe())
    with pytest.raises(DataError, match=r"val\.json shows no objects"):
        Detection(replace(data, validation=empty.validation), tiny_recipe())


def test_pictures_too_narrow_to_be_resized_are_named_before_training_and_evaluation(tmp_path: Path) -> None:
    """torch would only say that sizes should be greater than 0."""
    narrow = content()
    narrow["images"][1] |= {"width": 65, "height": 1}  # at most 64 to 1 is possible
    fit = content()
    fit["images"][1] |= {"width": 64, "height": 1}
    message = r"val/b\.png is 65 x 1 pixels, and nothing is left of it at a longest side of 64; .* out of .*val\.json"
    Detection(open_coco(write_set(tmp_path / "fit", train=fit, validation=fit)), tiny_recipe())
    in_training = open_coco(write_set(tmp_path / "one", train=narrow))
    with pytest.raises(DataError, match=message.replace("val", "train")):
        Detection(in_training, tiny_recipe())
    in_validation = open_coco(write_set(tmp_path / "other", validation=narrow))
    with pytest.raises(DataError, match=message):
        Detection(in_validation, tiny_recipe())
    detector = new_detector("resnet18", tiny_recipe(), 3, seed=0, arguments=TINY_RESNET)
    with pytest.raises(DataError, match=message):
        TrainedDetector(detector, in_validation.classes).evaluate(
            in_validation, Processes(), workers=0, unreadable="stop"
        )


def test_unreadable_pictures_stop_a_run_or_are_counted(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "set"
    for source in scenes.rglob("*.*"):
        (copied / source.relative_to(scenes)).parent.mkdir(parents=True, exist_ok=True)
        (copied / source.relative_to(scenes)).write_bytes(source.read_bytes())
    (copied / "train" / "000002.png").write_bytes(b"broken")
    (copied / "val" / "000001.png").write_bytes(b"broken")
    recipe = tiny_recipe(epochs=1, tau_epochs=0.0)
    data = open_coco(copied)
    with pytest.raises(UnreadableImageError, match=r"000002\.png"):
        train_tiny(data, tmp_path / "stop", "resnet18", recipe=recipe)
    folder = train_tiny(data, tmp_path / "skip", "resnet18", recipe=recipe, options=replace(OPTIONS, unreadable="skip"))
    last = read_metrics(RunFolder(folder.path).metrics_path)[-1]
    assert (last["images"], last["unreadable"]) == (2, 2)
    assert "000002.png" in capsys.readouterr().out
