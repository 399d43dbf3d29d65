"""The parts of Mask R-CNN that are not torchvision's own: boxes in mixed precision, and the strides of levels."""

import pytest
import torch
from tiny_detectors import losses, scene, tiny_detector
from torch import Tensor, nn

from kernelwarehouse.detection.detector import Detector

LONG = (64, 1300)  # so wide that bfloat16 rounds places at its end to 8 pixels
# No proposal is left out for its place among equals, and none of the boxes to learn from is drawn.
ALL = {
    "box_score_thresh": 0.0,
    "rpn_pre_nms_top_n_train": 20000,
    "rpn_post_nms_top_n_train": 20000,
    "rpn_batch_size_per_image": 20000,
    "box_batch_size_per_image": 20000,
}
HALVES = [torch.bfloat16, torch.float16]


def detector_of_anchors() -> Detector:
    """Every box that it finds is an anchor of its own, with the same score: rounding of features plays no part."""
    detector = tiny_detector("resnet18", sizes=((64,), 1333), options=ALL)
    heads = (detector.rpn.head, detector.roi_heads.box_predictor)
    with torch.no_grad():
        for layer in (module for head in heads for module in head.modules()):
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.weight.zero_()
                layer.bias.zero_()
    return detector


def found_boxes(detector: Detector, image: Tensor) -> Tensor:
    with torch.no_grad():
        [found] = detector.eval()([image])
    boxes: Tensor = found["boxes"]
    return boxes


@pytest.mark.parametrize("dtype", HALVES)
def test_mixed_precision_does_not_round_boxes(dtype: torch.dtype) -> None:
    detector = detector_of_anchors()
    image, _ = scene(*LONG)
    wanted = found_boxes(detector, image)
    with torch.autocast("cpu", dtype):
        boxes = found_boxes(detector, image)
    assert float(wanted[:, 2].max()) > 1024
    torch.testing.assert_close(boxes, wanted)  # of the same type, too


@pytest.mark.parametrize("dtype", HALVES)
def test_mixed_precision_does_not_round_what_is_to_be_learnt(dtype: torch.dtype) -> None:
    detector = detector_of_anchors().train()
    image, target = scene(*LONG)
    target["boxes"] = torch.tensor([[1201.0, 11.0, 1232.0, 45.0]])
    wanted = losses(detector, [image], [target])
    with torch.autocast("cpu", dtype):
        found = losses(detector, [image], [target])
    for name in ("loss_rpn_box_reg", "loss_box_reg"):
        assert wanted[name] > 0
        torch.testing.assert_close(found[name], wanted[name])


def test_a_detector_of_halves_finds_the_same_boxes() -> None:
    detector = detector_of_anchors()
    image, _ = scene(*LONG)
    wanted = found_boxes(detector, image)
    torch.testing.assert_close(found_boxes(detector.half(), image.half()), wanted)
