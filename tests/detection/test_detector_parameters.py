"""The paper's rows, counted; the documentation has what the command prints."""

from pathlib import Path

import pytest
import timm
import torch

from kernelwarehouse.detection.detector import build_detector
from kernelwarehouse.detection.parameters import HEADER, count, rows
from kernelwarehouse.paper import preset_name
from kernelwarehouse.zoo import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "detection.md").read_text(encoding="utf-8")
CLASSIFIER = 2048 * 1000 + 1000  # of ResNet50
CONVOLUTION = 256 * 256 * 9 + 256
PYRAMID = (256 + 512 + 1024 + 2048) * 256 + 4 * 256 + 4 * CONVOLUTION
PROPOSALS = CONVOLUTION + (3 + 3 * 4) * 257  # three anchors a position
BOXES = (256 * 49 + 1) * 1024 + 1025 * 1024 + 1025 * 81 * 5
MASKS = 4 * CONVOLUTION + 256 * 256 * 4 + 256 + 257 * 81


@pytest.mark.parametrize("preset", ["resnet50", "kw1x_resnet50", "kw4x_resnet50"])
def test_a_detector_is_its_backbone_without_the_classifier_and_the_same_heads(preset: str) -> None:
    found = count(next(row for row in rows() if preset_name(row) == preset))
    with torch.device("meta"):
        static = timm.create_model("resnet50")
    whole = PRESETS[preset].parameters if preset in PRESETS else sum(p.numel() for p in static.parameters())
    assert found.backbone == whole - CLASSIFIER
    assert found.whole - found.backbone == PYRAMID + PROPOSALS + BOXES + MASKS
    assert found.markdown() in PAGE


def test_the_page_has_every_row_of_the_table() -> None:
    start = PAGE.index(HEADER) + len(HEADER)
    lines = PAGE[start:].strip().split("\n\n")[0].splitlines()
    assert [line.split("`")[1] for line in lines] == [preset_name(row) for row in rows()]


def test_heads_have_outputs_for_the_background_that_mmdetections_have_not() -> None:
    """What the page says: 4 box offsets and a mask for a class that is never drawn."""
    with torch.device("meta"):
        heads = build_detector("resnet18", 80).roi_heads
    background = (
        4 * (heads.box_predictor.bbox_pred.in_features + 1) + heads.mask_predictor.mask_fcn_logits.in_channels + 1
    )
    assert heads.box_predictor.bbox_pred.out_features == 4 * 81
    assert heads.mask_predictor.mask_fcn_logits.out_channels == 81
    assert background == 4357
    assert "4,357" in PAGE
