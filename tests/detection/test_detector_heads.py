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


def test_levels_are_sampled_by_their_strides_whatever_came_first() -> None:
    """Of 100 x 500 pixels, 38 x 192 are left: torchvision would take the first map, of 16 rows, for one of stride 2."""
    used, fresh = (tiny_detector("resnet18", sizes=((96,), 192)).eval() for _ in range(2))
    low, square = (scene(*size)[0] for size in ((100, 500), (100, 100)))
    used.load_state_dict(fresh.state_dict())
    with torch.no_grad():
        used([low])
        [[one], [other]] = (detector([square]) for detector in (used, fresh))
    assert all(torch.equal(one[name], other[name]) for name in ("boxes", "scores", "masks"))


def test_strides_are_those_of_the_backbone() -> None:
    detector = tiny_detector("kw1x_small_resnet")
    for pool in (detector.roi_heads.box_roi_pool, detector.roi_heads.mask_roi_pool):
        assert [1 / scale for scale in pool.scales] == detector.backbone.strides
    sides = [8.0, 112.0, 300.0]
    levels = detector.roi_heads.box_roi_pool.map_levels([torch.tensor([[0, 0, side, side] for side in sides])])
    assert levels.tolist() == [0, 1, len(detector.backbone.strides) - 1]
