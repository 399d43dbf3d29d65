"""Mask R-CNN on every family of backbones: it computes, learns, and is saved and loaded."""

import copy
import json
from pathlib import Path

import pytest
import torch
from tiny_detectors import CLASSES, FAMILIES, TINY_RESNET, losses, scene, tiny_detector, train, two_scenes
from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn

import kernelwarehouse as kw
from kernelwarehouse.detection.backbone import build_features
from kernelwarehouse.detection.detector import build_detector
from kernelwarehouse.errors import CheckpointError, ConfigError, ShapeError, UnknownPresetError
from kernelwarehouse.layers import WarehouseLayer
from kernelwarehouse.warehouse import Warehouse

LOSSES = {"loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg"}


@pytest.mark.parametrize("backbone", FAMILIES)
def test_every_family_learns_answers_and_comes_back_from_a_file(backbone: str, tmp_path: Path) -> None:
    detector = tiny_detector(backbone).train()
    images, targets = two_scenes()
    found = losses(detector, images, targets)
    assert found.keys() == LOSSES
    sum(found.values()).backward()
    for name, parameter in detector.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    detector.eval()
    with torch.no_grad():
        answers = detector(images)
    for image, answer in zip(images, answers, strict=True):
        objects = len(answer["boxes"])
        assert answer["masks"].shape == (objects, 1, *image.shape[1:])
        assert set(answer["labels"].tolist()) <= set(range(1, CLASSES + 1))
    kw.save(detector, tmp_path / "saved")
    loaded = kw.load(tmp_path / "saved")
    with torch.no_grad():
        again = loaded(images)
    assert all(torch.equal(one[key], other[key]) for one, other in zip(answers, again, strict=True) for key in one)


def test_a_static_backbone_gives_what_torchvision_computes() -> None:
    detector = tiny_detector("resnet18")
    images, targets = two_scenes()
    for mode in (True, False):
        detector.train(mode)
        torch.manual_seed(1)  # proposals are sampled
        ours = detector(images, targets)
        torch.manual_seed(1)
        theirs = MaskRCNN.forward(detector, images, targets)
        if mode:
            assert all(torch.equal(ours[name], theirs[name]) for name in LOSSES)
        else:
            pairs = zip(ours, theirs, strict=True)
            assert all(torch.equal(one[key], other[key]) for one, other in pairs for key in one)


def test_parameters_are_those_of_torchvisions_own_detector() -> None:
    with torch.device("meta"):
        theirs = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
        ours = build_detector("resnet50", 90)
    shapes = [sorted(tuple(p.shape) for p in model.parameters()) for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("backbone", ["kw1x_resnet18", "kw1x_mobilenetv2_050", "kw1x_convnext_tiny"])
def test_a_warehouse_is_stored_once_and_shared_as_in_the_classifier(backbone: str) -> None:
    arguments = FAMILIES[backbone]
    detector, classifier = tiny_detector(backbone), kw.create_model(backbone, num_classes=4, **arguments)
    found = [module for module in detector.modules() if isinstance(module, Warehouse)]
    stored = [name for name in detector.state_dict() if name.endswith(".cells")]
    assert len(stored) == len(found) == len({module.cells.data_ptr() for module in found})
    theirs = {module.name: module.cells.shape for module in classifier.modules() if isinstance(module, Warehouse)}
    assert {module.name: module.cells.shape for module in found} == theirs
    users = [
        {name.replace("_", "."): layer.warehouse.name for name, layer in layers.items()}
        for layers in (
            {name: m for name, m in model.named_modules() if isinstance(m, WarehouseLayer)}
            for model in (detector.backbone.body, classifier)
        )
    ]
    assert users[0].items() <= users[1].items()
    assert set(users[1]) - set(users[0]) <= {"conv.head"}  # after the last level


def test_nothing_of_the_classifier_is_left() -> None:
    names = set(build_features("kw1x_resnet18", TINY_RESNET).state_dict())
    whole = set(kw.create_model("kw1x_resnet18", **TINY_RESNET).state_dict())
    assert whole - names == {"fc.weight", "fc.bias"}
    assert names < whole


def test_a_copy_shares_no_cells_with_the_original() -> None:
    detector = tiny_detector()
    twin = copy.deepcopy(detector)
    before = {name: tensor.clone() for name, tensor in detector.state_dict().items()}
    train(twin, steps=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in detector.state_dict().items())


@pytest.mark.parametrize("backbone", ["kw1x_resnet18", "kw1x_small_resnet"])
@pytest.mark.parametrize("norms", ["trained", "frozen"])
def test_the_backbone_alone_is_a_network_of_timms(norms: str, backbone: str, tmp_path: Path) -> None:
    detector = tiny_detector(backbone, norms=norms, frozen_stages=1)
    train(detector, steps=1)
    kw.save(detector.eval().backbone_network(), tmp_path / "body")
    alone = kw.load(tmp_path / "body")
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        for one, other in zip(alone(images), detector.backbone.body(images), strict=True):
            torch.testing.assert_close(one, other)
    assert all(parameter.requires_grad for parameter in alone.parameters())
    assert kw.plan_of(alone).warehouses == kw.plan_of(kw.create_model(backbone, **FAMILIES[backbone])).warehouses


def test_norms_of_the_backbone_alone_follow_their_batches_as_before(tmp_path: Path) -> None:
    """CBAM's do so slowly. Norms at another speed than the builder's would be saved with a warning, here an error."""
    arguments = {"channels": [16, 16, 16, 16], "layers": [1, 1, 1, 1]}
    alone = tiny_detector("cbam_resnet18", arguments=arguments, norms="frozen").backbone_network()
    momenta = [
        {name: norm.momentum for name, norm in model.named_modules() if isinstance(norm, torch.nn.BatchNorm2d)}
        for model in (alone, build_features("cbam_resnet18", arguments))
    ]
    assert momenta[0] == momenta[1]
    assert set(momenta[0].values()) == {0.01, 0.1}
    kw.save(alone, tmp_path)


def test_the_backbone_alone_serves_a_classifier() -> None:
    """Pooled features and a linear layer: what a classifier adds to its last map."""
    network = tiny_detector("kw1x_resnet18", norms="frozen", frozen_stages=4).backbone_network()
    head = torch.nn.Linear(network.feature_info.channels()[-1], 5)
    network.train()
    logits = head(network(torch.rand(4, 3, 64, 64))[-1].mean((2, 3)))
    torch.nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_a_loaded_detector_can_be_trained_and_saved_again(tmp_path: Path) -> None:
    kw.save(tiny_detector(), tmp_path / "first")
    loaded = kw.load(tmp_path / "first")
    train(loaded, steps=1)
    kw.save(loaded, tmp_path / "second")
    again = kw.load(tmp_path / "second").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in loaded.state_dict().items())


def test_bytes_are_images_too() -> None:
    detector = tiny_detector("resnet18").eval()
    image = (scene(64, 96)[0] * 255).byte()
    with torch.no_grad():
        [one], [other] = detector([image]), detector([image / 255])
    assert torch.equal(one["scores"], other["scores"])


def test_images_without_objects_can_be_learnt_from() -> None:
    image, target = scene(64, 64)
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    nothing["masks"] = torch.zeros(0, 64, 64, dtype=torch.uint8)
    found = losses(tiny_detector("resnet18").train(), [image, image], [target, nothing])
    assert all(loss.isfinite() for loss in found.values())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"backbone": "kw1x_deit_tiny", "arguments": {}}, r"strides \[16, 16, 16\]"),
        (
            {"backbone": "swin_tiny_patch4_window7_224", "arguments": {}},
            r"cannot take images of 160 x 224 \(AssertionError: Input height \(160\)",
        ),
        ({"backbone": "maxvit_tiny_rw_224", "arguments": {}}, r"cannot take images of 160 x 224 .* any size"),
        (
            {"backbone": "swin_tiny_patch4_window7_224", "arguments": {"strict_img_size": False}},
            r"gives a feature map of shape \(1, 40, 56, 96\); a pyramid is made of maps of batch, channels",
        ),
        ({"arguments": {"num_classes": 3}}, r"num_classes \(=3\) is for the detector to decide"),
        ({"arguments": {"nonsense": 3}}, "nonsense"),
        ({"frozen_stages": 5}, "frozen_stages is 5; a whole number from -1"),
        ({"norms": "odd"}, "norms is 'odd'"),
        ({"sizes": ((800,), 640)}, r"sizes is \(\(800,\), 640\)"),
        ({"sizes": 800}, "sizes is 800"),
        ({"width": 0}, "width is 0"),
        ({"options": {"box_colour": 1}}, "no option 'box_colour'"),
        ({"options": {"box_nms_thresh": "low"}}, "box_nms_thresh is 'low'"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_detector(**{"backbone": "resnet18"} | changes)


def test_unknown_backbones_are_named() -> None:
    with pytest.raises(UnknownPresetError, match="kw1x_resnet19"):
        tiny_detector("kw1x_resnet19")


def test_images_too_narrow_to_be_resized_are_named() -> None:
    detector = tiny_detector("resnet18").eval()  # its longest side is 96
    with torch.no_grad():
        assert len(detector([torch.rand(3, 2, 192)])) == 1
        with pytest.raises(
            ShapeError, match=r"image 1 is 1 x 97 pixels, and nothing is left .*; sides of at most 96 to 1"
        ):
            detector([torch.rand(3, 96, 1), torch.rand(3, 97, 1)])


def test_bad_images_and_targets_are_named() -> None:
    detector = tiny_detector("resnet18").train()
    image, target = scene(64, 96)
    empty = torch.tensor([[3.0, 3.0, 3.0, 9.0]])
    for images, targets, message in (
        ([image], None, "no targets for 1 images"),
        ([image], [target] * 2, "2 targets for 1 images"),
        ([], [], "given none"),
        (image, [target], r"given a tensor of shape \(3, 64, 96\)"),
        ([image[:1]], [target], r"image 0 is of shape \(1, 64, 96\)"),
        ([image.long()], [target], "image 0 holds torch.int64"),
        ([image], [{"boxes": target["boxes"], "labels": target["labels"]}], "target 0 has no masks"),
        ([image], [target | {"boxes": empty}], r"box \[3.0, 3.0, 3.0, 9.0\] of target 0 has no area"),
        ([image], [target | {"masks": target["masks"][:, 1:]}], r"masks of target 0 are of shape \(1, 63, 96\)"),
        ([image], [target | {"labels": torch.tensor([4])}], r"labels of target 0 are \[4\]; numbers from 1 to 3"),
    ):
        with pytest.raises(ShapeError, match=message):
            detector(images, targets)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"arguments": {"pretrained": True}}, "'pretrained'"),
        ({"arguments": {"checkpoint_path": "somewhere"}}, "'checkpoint_path'"),
        ({"backbone": "hf-hub:someone/thing"}, "hf-hub"),
        ({"options": {"box_nms_thresh": {"a": 1}}}, "'options'"),
        ({"weights": "here"}, "are wanted"),
    ],
)
def test_a_file_cannot_ask_for_more_than_a_detector(change: dict[str, object], message: str, tmp_path: Path) -> None:
    kw.save(tiny_detector("resnet18"), tmp_path)
    path = tmp_path / "plan.json"
    description = json.loads(path.read_text())
    description["architecture"]["arguments"] |= change
    path.write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=message):
        kw.load(tmp_path)
