"""Frozen stages and norms: what stays as it is, bit for bit, and what still learns."""

from pathlib import Path

import pytest
import torch
from tiny_detectors import tiny_detector, train
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d

import kernelwarehouse as kw
from kernelwarehouse.detection.detector import Detector
from kernelwarehouse.errors import ConfigError
from kernelwarehouse.layers import WarehouseLayer

BACKBONES = ["resnet18", "kw1x_resnet18", "od4x_resnet18", "kw1x_convnext_tiny"]


def stage_maps(detector: Detector, images: Tensor) -> list[Tensor]:
    """The levels that the pyramid takes, in the mode that the detector is in."""
    with torch.no_grad():
        maps: list[Tensor] = detector.backbone.body(images)
    return maps


@pytest.mark.parametrize("backbone", BACKBONES)
def test_frozen_stages_give_the_same_after_training(backbone: str) -> None:
    detector = tiny_detector(backbone, frozen_stages=1, norms="trained")
    if backbone.startswith("kw"):
        kw.set_temperature(detector, 0.0)  # at 1, attentions have no say
    images = torch.rand(2, 3, 64, 64)
    before = stage_maps(detector.train(), images)
    train(detector)
    after = stage_maps(detector.train(), images)
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


def test_without_the_freezing_the_first_stage_would_move() -> None:
    detector = tiny_detector("kw1x_resnet18", frozen_stages=-1)
    images = torch.rand(2, 3, 64, 64)
    before = stage_maps(detector.eval(), images)
    train(detector)
    assert not torch.allclose(before[0], stage_maps(detector.eval(), images)[0])


def test_all_parts_of_a_frozen_stage_are_frozen_and_shared_cells_with_them() -> None:
    detector = tiny_detector("kw1x_resnet18", frozen_stages=1)
    body = detector.backbone.body
    assert not any(parameter.requires_grad for parameter in body.get_submodule("layer1").parameters())
    shared = body.get_submodule("layer2.0.conv1")
    assert isinstance(shared, WarehouseLayer)
    assert shared.warehouse is body.get_submodule("layer1.0.conv2").warehouse
    assert not shared.warehouse.cells.requires_grad
    assert all(parameter.requires_grad for parameter in shared.attention.parameters())
    assert body.get_submodule("layer2.0.conv2").warehouse.cells.requires_grad

    kw.set_temperature(detector, 0.0)
    cells, logits = shared.warehouse.cells.clone(), shared.attention.fc2.weight.clone()
    train(detector)
    assert torch.equal(cells, shared.warehouse.cells)
    assert not torch.equal(logits, shared.attention.fc2.weight)


@pytest.mark.parametrize(
    "frozen_stages, first_trained",
    [(-1, "conv1.weight"), (0, "layer1.0"), (1, "layer2.0"), (3, "layer4.0"), (4, None)],
)
def test_stages_are_counted_after_the_stem(frozen_stages: int, first_trained: str | None) -> None:
    body = tiny_detector("resnet18", frozen_stages=frozen_stages).backbone.body
    trained = [name for name, parameter in body.named_parameters() if parameter.requires_grad]
    assert first_trained is None if not trained else trained[0].startswith(str(first_trained))


@pytest.mark.parametrize(
    "backbone, stages",
    [
        ("resnet18", [["conv1", "bn1", "act1", "maxpool"], ["layer1"], ["layer2"], ["layer3"], ["layer4"]]),
        (
            "kw1x_mobilenetv2_050",
            [["conv_stem", "bn1", "blocks.0"], ["blocks.1"], ["blocks.2"]]
            + [[f"blocks.{a}", f"blocks.{b}"] for a, b in ((3, 4), (5, 6))],
        ),
        ("kw1x_convnext_tiny", [["stem_0", "stem_1"], *([f"stages_{stage}"] for stage in range(4))]),
        ("kw1x_small_resnet", [["stem", "stages_0"], ["stages_1"], ["stages_2", "final_conv"]]),
    ],
)
def test_stages_end_where_the_pyramid_takes_its_levels(backbone: str, stages: list[list[str]]) -> None:
    detector = tiny_detector(backbone)
    names = {id(module): name for name, module in detector.backbone.body.named_modules()}
    assert [[names[id(unit)] for unit in stage] for stage in detector.backbone.stages()] == stages


@pytest.mark.parametrize("backbone", ["xception41", "hrnet_w18_small"])
def test_stages_that_cannot_be_told_apart_are_not_frozen(backbone: str) -> None:
    """Levels end deep inside of a block, or several of them in one part."""
    with torch.device("meta"):
        with pytest.raises(ConfigError, match=r"cannot be told apart: .*; only frozen_stages=-1"):
            tiny_detector(backbone, arguments={}, frozen_stages=1)
        whole = tiny_detector(backbone, arguments={}, frozen_stages=-1, norms="trained").train()
    assert all(parameter.requires_grad for parameter in whole.parameters())


@pytest.mark.parametrize("backbone", ["kw1x_resnet18", "od4x_resnet18"])
def test_frozen_norms_are_constants_and_attentions_keep_their_statistics(backbone: str) -> None:
    detector = tiny_detector(backbone, norms="frozen")
    if backbone.startswith("kw"):
        kw.set_temperature(detector, 0.0)
    body = detector.backbone.body
    assert not any(isinstance(module, nn.BatchNorm2d) for module in body.modules())
    assert any("Frozen" in type(module).__name__ for module in body.modules())
    running = {name: buffer.clone() for name, buffer in body.named_buffers()}
    affine = [
        (module, parameter, parameter.clone())
        for module in body.modules()
        if isinstance(module, nn.BatchNorm1d)
        for parameter in module.parameters()
    ]
    assert any(name.endswith("norm.running_mean") for name in running)
    train(detector)
    assert all(torch.equal(buffer, running[name]) for name, buffer in body.named_buffers())
    assert any(not torch.equal(parameter, before) for _, parameter, before in affine)


def test_frozen_norms_give_what_trained_norms_give_in_evaluation() -> None:
    trained, frozen = (tiny_detector("kw1x_resnet18", norms=norms) for norms in ("trained", "frozen"))
    train(trained)
    frozen.load_state_dict(trained.state_dict(), strict=False)  # constants do not count batches
    images = torch.rand(2, 3, 64, 64)
    for one, other in zip(stage_maps(trained.eval(), images), stage_maps(frozen.eval(), images), strict=True):
        torch.testing.assert_close(one, other)
    assert isinstance(frozen.backbone.body.get_submodule("bn1"), FrozenBatchNorm2d)


def test_trained_norms_learn_outside_of_frozen_stages_only() -> None:
    detector = tiny_detector("kw1x_resnet18", norms="trained", frozen_stages=1)
    train(detector)
    body = detector.backbone.body
    counts = {name: int(buffer) for name, buffer in body.named_buffers() if name.endswith("num_batches_tracked")}
    for name, count in counts.items():
        assert count == (0 if name.startswith(("bn1", "layer1")) else 2), name


def test_a_loaded_detector_is_frozen_as_it_was(tmp_path: Path) -> None:
    detector = tiny_detector("kw1x_resnet18", frozen_stages=2, norms="frozen")
    kw.save(detector, tmp_path)
    loaded = kw.load(tmp_path)
    frozen = [{name for name, p in model.named_parameters() if not p.requires_grad} for model in (detector, loaded)]
    assert frozen[0] == frozen[1]
    assert any(name.endswith(".warehouse.cells") for name in frozen[0])
    assert any(".attention." in name for name in frozen[0])


def test_new_backbones_are_trained_whole_by_default() -> None:
    detector = tiny_detector("kw1x_resnet18")
    assert all(parameter.requires_grad for parameter in detector.parameters())
    assert any(isinstance(module, nn.BatchNorm2d) for module in detector.modules())
    assert kw.get_temperature(detector) == 1.0
