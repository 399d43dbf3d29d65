"""A classification network as the backbone of a detector: all that it has learnt, and no other network."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from tiny_detectors import FAMILIES, TINY_RESNET, tiny_classifier, tiny_detector
from torch import nn

import kernelwarehouse as kw
from kernelwarehouse.errors import CheckpointError


def trained_classifier(name: str, folder: Path, **arguments: Any) -> nn.Module:
    """A network whose every tensor is another than that of a new one, in a folder."""
    torch.manual_seed(7)
    model = tiny_classifier(name, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    kw.save(model, folder)
    return model.eval()


@pytest.mark.parametrize(
    "backbone", ["resnet18", "kw1x_resnet18", "od4x_resnet18", "kw1x_small_resnet", "kw1x_convnext_tiny"]
)
def test_the_backbone_computes_what_the_classifier_has_learnt(backbone: str, tmp_path: Path) -> None:
    classifier = trained_classifier(backbone, tmp_path, **FAMILIES[backbone])
    detector = tiny_detector(backbone, backbone_weights=tmp_path).eval()
    if backbone.startswith("kw"):
        assert kw.get_temperature(detector) == 0.0
        kw.set_temperature(classifier, 0.0)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        last = detector.backbone.body(images)[-1]
        wanted = classifier.forward_intermediates(images, indices=1, intermediates_only=True)[-1]
    torch.testing.assert_close(last, wanted)


def test_trained_backbones_are_frozen_as_torchvision_does(tmp_path: Path) -> None:
    trained_classifier("kw1x_resnet18", tmp_path, **TINY_RESNET)
    detector = tiny_detector("kw1x_resnet18", backbone_weights=tmp_path)
    assert (detector.backbone.frozen_stages, detector.backbone.norms) == (1, "frozen")
    free = tiny_detector("kw1x_resnet18", backbone_weights=tmp_path, frozen_stages=-1, norms="trained")
    assert all(parameter.requires_grad for parameter in free.parameters())


def test_the_best_network_of_a_run_is_taken(tmp_path: Path) -> None:
    trained_classifier("resnet18", tmp_path / "run" / "last", **TINY_RESNET)
    tiny_detector("resnet18", backbone_weights=tmp_path / "run")
    best = trained_classifier("resnet18", tmp_path / "run" / ".versions" / "best-1", **TINY_RESNET)
    with torch.no_grad():
        best.conv1.weight.fill_(0.25)
    kw.save(best, tmp_path / "run" / ".versions" / "best-1")
    (tmp_path / "run" / "best").symlink_to(Path(".versions") / "best-1")
    detector = tiny_detector("resnet18", backbone_weights=tmp_path / "run")
    assert (detector.backbone.body.get_parameter("conv1.weight") == 0.25).all()


@pytest.mark.parametrize(
    "saved, arguments, message",
    [
        ("kw1x_small_resnet", {}, "made of small_resnet, not of resnet18; train a kw1x_resnet18 first"),
        ("resnet18", TINY_RESNET, "a resnet18 without warehouses, not one with"),
        ("kw4x_resnet18", TINY_RESNET, "a resnet18 with other warehouses"),
        ("kw1x_resnet18", TINY_RESNET | {"layers": [2, 1, 1, 1]}, "or for other arguments"),
    ],
)
def test_another_network_is_refused(saved: str, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    kw.save(tiny_classifier(saved, **arguments), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        tiny_detector("kw1x_resnet18", backbone_weights=tmp_path)


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    kw.save(tiny_classifier("resnet18"), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"'layer1.0.conv1.weight' is of shape .* give the detector the arguments"
    ):
        tiny_detector("resnet18", backbone_weights=tmp_path)


def test_a_folder_without_a_network_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere has no network: neither plan.json nor best or last"):
        tiny_detector("resnet18", backbone_weights=tmp_path / "nowhere")


def test_a_network_that_is_not_timms_is_refused(tmp_path: Path) -> None:
    kw.save(torchvision.models.squeezenet1_1(num_classes=3), tmp_path)
    with pytest.raises(CheckpointError, match="holds a SqueezeNet; the backbone resnet18 wants a network of the zoo's"):
        tiny_detector("resnet18", backbone_weights=tmp_path)
