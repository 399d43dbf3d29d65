"""Mask R-CNN, torchvision's, on any convolutional network of the zoo's or timm's."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

from kernelwarehouse.builder import WEIGHT_ARGUMENTS, Maker, builder_of, remember_builder
from kernelwarehouse.detection.backbone import Norms, PyramidBackbone, build_features
from kernelwarehouse.detection.heads import Anchors, BoxPredictor, ProposalHead, RoiAlign
from kernelwarehouse.detection.weights import load_backbone
from kernelwarehouse.errors import ConfigError, ShapeError

Sizes = tuple[Sequence[int], int]
COCO_SIZES: Sizes = ((800,), 1333)
"""Shorter sides, of which training takes any and evaluation the last, and the longest side."""
ANCHOR_PER_STRIDE = 8
"""Side of the square anchors of a level, in strides."""
ANCHOR_RATIOS = (0.5, 1.0, 2.0)
WIDTH = 256
_OPTIONS = frozenset(
    name for name in inspect.signature(MaskRCNN.__init__).parameters if name.startswith(("rpn_", "box_"))
) - {"rpn_anchor_generator", "rpn_head", "box_roi_pool", "box_head", "box_predictor"}


class Detector(MaskRCNN):
    """Mask R-CNN over a network for features; `build_detector` makes one by name.

    It is called as torchvision's: `detector(images, targets)` gives losses by name in training, `detector(images)` a
    dictionary of `boxes`, `labels`, `scores` and `masks` for every image in evaluation. Images are `[3, height, width]`
    in RGB, floats from 0 to 1 or bytes, of any size.
    """

    def __init__(
        self,
        features: nn.Module,
        classes: int,
        *,
        norms: Norms,
        frozen_stages: int,
        sizes: Sizes = COCO_SIZES,
        width: int = WIDTH,
        options: Mapping[str, float] | None = None,
    ) -> None:
        for name, number in (("classes", classes), ("width", width)):
            if type(number) is not int or number < 1:
                raise ConfigError(f"{name} is {number!r}; a whole number of at least 1 is wanted")
        _check_sizes(sizes)
        _check_options(options or {})
        backbone = PyramidBackbone(features, width, norms=norms, frozen_stages=frozen_stages)
        strides = [*backbone.strides, 2 * backbone.strides[-1]]  # the last is the pyramid's own
        labels = classes + 1  # 0 is the background
        super().__init__(
            backbone,
            min_size=tuple(sizes[0]),
            max_size=sizes[1],
            image_mean=list(IMAGENET_DEFAULT_MEAN),
            image_std=list(IMAGENET_DEFAULT_STD),
            rpn_anchor_generator=Anchors(
                tuple((ANCHOR_PER_STRIDE * stride,) for stride in strides), (ANCHOR_RATIOS,) * len(strides)
            ),
            rpn_head=ProposalHead(width, len(ANCHOR_RATIOS)),
            box_roi_pool=RoiAlign(backbone.strides, output_size=7),
            box_head=TwoMLPHead(width * 7**2, 4 * width),
            box_predictor=BoxPredictor(4 * width, labels),
            mask_roi_pool=RoiAlign(backbone.strides, output_size=14),
            mask_head=MaskRCNNHeads(width, (width,) * 4, 1),
            mask_predictor=MaskRCNNPredictor(width, width, labels),
            **(options or {}),
        )
        self.classes = classes
        self.train(self.training)

    @property
    def sizes(self) -> Sizes:
        return self.transform.min_size, self.transform.max_size

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """torchvision's, but the backbone is told what is image and what is padding."""
        come_resized = self.training and self.transform._skip_resize
        _check_images(images, None if come_resized else self.sizes)
        if self.training:
            _check_targets(images, targets, self.classes)
        floats = [image if image.is_floating_point() else image / 255 for image in images]
        given = [(image.shape[-2], image.shape[-1]) for image in images]
        batch, resized = self.transform(floats, None if targets is None else [dict(target) for target in targets])
        maps = self.backbone(batch.tensors, batch.image_sizes)
        proposals, proposal_losses = self.rpn(batch, maps, resized)
        found, losses = self.roi_heads(maps, proposals, batch.image_sizes, resized)
        if self.training:
            return {**losses, **proposal_losses}
        return self.transform.postprocess(found, batch.image_sizes, given)

    def backbone_network(self) -> nn.Module:
        """A copy of the backbone without pyramid and heads: timm's network for features, which gives a list of maps,
        with batch norms and nothing frozen. `kernelwarehouse.save` and `load` know it as any other network."""
        return self.backbone.unfrozen_body()


def build_detector(
    backbone: str,
    classes: int,
    *,
    arguments: Mapping[str, Any] | None = None,
    backbone_weights: Path | str | None = None,
    frozen_stages: int | None = None,
    norms: Norms | None = None,
    sizes: Sizes = COCO_SIZES,
    width: int = WIDTH,
    options: Mapping[str, float] | None = None,
) -> Detector:
    """A new Mask R-CNN on a network of the zoo's or timm's, which `kernelwarehouse.save` and `load` know.

    Arguments:
        backbone: a preset or a network of timm's whose feature maps halve from one to the next.
        classes: of objects; labels are 1 to `classes`, and 0 is the background.
        arguments: go to the backbone, such as `drop_path_rate`.
        backbone_weights: a classification network of the same name to start from, as `kernelwarehouse.save` or
            `kernelwarehouse train` wrote it. The temperature is then 0: the attention start strategy would disturb
            what the network has learnt about its cells.
        frozen_stages: stages that are not trained, after the stem; 0 is the stem alone, -1 nothing. As torchvision has
            it, 1 for trained backbones and -1 for new ones. The cells that a frozen layer draws on are frozen, for all
            layers that share them.
        norms: "frozen" uses the backbone's batch norms as they are, the default for trained ones; "trained" trains
            them.
        sizes: shorter sides, of which training takes any and evaluation the last, and the longest side.
        width: channels of the pyramid and of the heads.
        options: numbers for torchvision's `rpn_...` and `box_...` arguments, such as `box_detections_per_img`.

    Raises:
        UnknownPresetError: for a backbone that there is not.
        ConfigError: for one that gives no pyramid, and for values that make no sense.
        CheckpointError: for weights that are not there, or are those of another network.
    """
    given = dict(arguments or {})
    features = build_features(backbone, given)
    if backbone_weights is not None:
        load_backbone(features, Path(backbone_weights), backbone)
    trained = backbone_weights is not None or any(given.get(key) for key in WEIGHT_ARGUMENTS)
    if frozen_stages is None:
        frozen_stages = 1 if trained else -1
    if norms is None:
        norms = "frozen" if trained else "trained"
    detector = Detector(
        features, classes, norms=norms, frozen_stages=frozen_stages, sizes=sizes, width=width, options=options
    )
    network = builder_of(features)
    if network is None:
        raise ConfigError(f"{backbone} does not say how it was built")
    remembered = {
        "backbone": network.name,
        "arguments": network.arguments,
        "classes": classes,
        "norms": norms,
        "frozen_stages": frozen_stages,
        "min_sizes": list(sizes[0]),
        "max_size": sizes[1],
        "width": width,
        "options": dict(options or {}),
    }
    remember_builder(detector, "mask_rcnn", remembered, library="detection")
    return detector


def _mask_rcnn(
    backbone: str,
    arguments: Mapping[str, Any],
    classes: int,
    norms: Norms,
    frozen_stages: int,
    min_sizes: Sequence[int],
    max_size: int,
    width: int,
    options: Mapping[str, float],
) -> Detector:
    """`build_detector` by what a file says."""
    own = {key: value for key, value in arguments.items() if key not in ("features_only", "out_indices")}
    return build_detector(
        backbone,
        classes,
        arguments=own,
        frozen_stages=frozen_stages,
        norms=norms,
        sizes=(tuple(min_sizes), max_size),
        width=width,
        options=options,
    )


MAKERS = {"mask_rcnn": Maker(_mask_rcnn, network="backbone.body")}


def _check_sizes(sizes: Any) -> None:
    shorter, longest = sizes if isinstance(sizes, (tuple, list)) and len(sizes) == 2 else ((), 0)
    numbers: list[Any] = [*shorter, longest] if isinstance(shorter, (tuple, list)) else []
    if len(numbers) < 2 or not all(type(number) is int and 0 < number <= longest for number in numbers):
        raise ConfigError(
            f"sizes is {sizes!r}; shorter sides and the longest side are wanted, in pixels, such as {COCO_SIZES}"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConfigError(f"there is no option {name!r} (={value!r}); there are {', '.join(sorted(_OPTIONS))}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise ConfigError(f"option {name} is {value!r}; a number of 0 or more is wanted")


def vanishes(height: int, width: int, sizes: Sizes) -> bool:
    """Whether an image is so narrow that the longest side leaves it no pixel. Computed as torchvision resizes."""
    shorter, longer = sorted((height, width))
    return any(int(shorter * min(side / shorter, sizes[1] / longer)) < 1 for side in sizes[0])


def _check_images(images: Sequence[Tensor], sizes: Sizes | None) -> None:
    """`sizes` are those that the images are to be resized to, unless they are already."""
    if isinstance(images, Tensor) or not images:
        what = f"a tensor of shape {tuple(images.shape)}" if isinstance(images, Tensor) else "none"
        raise ShapeError(f"a detector takes a list of images, and was given {what}")
    for index, image in enumerate(images):
        if image.dim() != 3 or image.shape[0] != 3 or not image.numel():
            raise ShapeError(f"image {index} is of shape {tuple(image.shape)}; [3, height, width] is wanted")
        if not image.is_floating_point() and image.dtype != torch.uint8:
            raise ShapeError(f"image {index} holds {image.dtype}; floats from 0 to 1, or torch.uint8, are wanted")
        height, width = image.shape[1:]
        if sizes is not None and vanishes(height, width, sizes):
            raise ShapeError(
                f"image {index} is {width} x {height} pixels, and nothing is left of it at a longest side of "
                f"{sizes[1]}; sides of at most {sizes[1]} to 1 are wanted"
            )


def _check_targets(images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None, classes: int) -> None:
    if targets is None or len(targets) != len(images):
        count = "no targets" if targets is None else f"{len(targets)} targets"
        raise ShapeError(
            f"{count} for {len(images)} images; training wants one for each, empty where nothing is to see"
        )
    for index, (image, target) in enumerate(zip(images, targets, strict=True)):
        missing = [name for name in ("boxes", "labels", "masks") if name not in target]
        if missing:
            raise ShapeError(f"target {index} has no {' and no '.join(missing)}")
        objects = len(target["labels"])
        wanted = {"boxes": (objects, 4), "labels": (objects,), "masks": (objects, *image.shape[-2:])}
        for name, shape in wanted.items():
            if tuple(target[name].shape) != shape:
                found = tuple(target[name].shape)
                raise ShapeError(
                    f"{name} of target {index} are of shape {found}; {shape} is wanted for {objects} objects"
                )
        boxes = target["boxes"]
        empty = (boxes[:, 2:] <= boxes[:, :2]).any(1)
        if empty.any():
            raise ShapeError(
                f"box {boxes[empty][0].tolist()} of target {index} has no area; x1 < x2 and y1 < y2 are wanted"
            )
        labels = target["labels"]
        if objects and not (int(labels.min()) >= 1 and int(labels.max()) <= classes):
            raise ShapeError(f"labels of target {index} are {labels.tolist()}; numbers from 1 to {classes} are wanted")
