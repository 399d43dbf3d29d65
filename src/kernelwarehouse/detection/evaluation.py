"""How well objects are found and outlined: COCO's twelve numbers, for boxes and for masks.

`Predictions` keeps what a detector says of each picture, small enough for all pictures at once: masks become run
lengths as soon as they come. Those of several processes are brought together before they are compared with the truth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from kernelwarehouse._extras import require
from kernelwarehouse.detection.data import CocoPart
from kernelwarehouse.detection.masks import Rle, encode_mask
from kernelwarehouse.errors import DataError, ShapeError
from kernelwarehouse.training.distributed import Processes

# A pixel belongs to an object if the detector finds that likelier than not.
MASK_THRESHOLD = 0.5


@dataclass(frozen=True)
class Precisions:
    """Mean average precisions and recalls from 0 to 1, or -1 where there are no objects of a size.

    Over overlaps (IoU) from 0.5 to 0.95 unless the name has one; small objects have less than 32^2 pixels, large ones
    more than 96^2; recalls are those of the 1, 10 or 100 surest detections of a picture.
    """

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    ar1: float
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float


@dataclass(frozen=True)
class DetectionScores:
    """Of boxes and masks over this many pictures."""

    boxes: Precisions
    masks: Precisions
    images: int
    unreadable: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """`box_ap`, `mask_ap50` and so on, and the counts of pictures."""
        named = {
            f"{kind}_{name}": value
            for kind, precisions in (("box", self.boxes), ("mask", self.masks))
            for name, value in asdict(precisions).items()
        }
        return named | {"images": self.images, "unreadable": len(self.unreadable)}


@dataclass(frozen=True)
class _Found:
    """The detections in one picture, the surest first or not."""

    boxes: NDArray[np.float32]
    """Left, top, right, bottom."""
    labels: NDArray[np.int64]
    scores: NDArray[np.float32]
    counts: tuple[str, ...]
    """Compressed run lengths of the masks."""


class Predictions:
    """What a detector finds in the pictures of a part, as far as this process looks at them."""

    def __init__(self, part: CocoPart) -> None:
        self.part = part
        self._found: dict[int, _Found] = {}
        self._sizes = dict(zip(part.image_ids.tolist(), part.file.sizes.tolist(), strict=True))

    def add(self, outputs: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take what torchvision's detectors give, by the id of the picture; also where nothing was found in it.

        Raises:
            DataError: a picture that the part does not have.
            ShapeError: masks of another size than their picture's, or labels of no category.
        """
        for image, output in outputs.items():
            if image not in self._sizes:
                raise DataError(f"image {image} is none of {self.part.file.path}; its ids are wanted")
            masks, labels = output["masks"], output["labels"].cpu().numpy()
            size = self._sizes[image]
            if list(masks.shape) != [len(labels), 1, *size]:
                raise ShapeError(
                    f"the masks for image {image} have shape {tuple(masks.shape)}; {len(labels)} labels and a picture "
                    f"of {size[1]} x {size[0]} want {(len(labels), 1, *size)}"
                )
            if len(labels) and not 1 <= labels.min() <= labels.max() <= len(self.part.classes):
                raise ShapeError(
                    f"labels for image {image} run from {labels.min()} to {labels.max()}; 1 to "
                    f"{len(self.part.classes)} are wanted, for the classes of the data"
                )
            inside = (masks[:, 0] > MASK_THRESHOLD).cpu().numpy()
            self._found[image] = _Found(
                output["boxes"].float().cpu().numpy(),
                labels.astype(np.int64),
                output["scores"].float().cpu().numpy(),
                tuple(encode_mask(mask)["counts"] for mask in inside),
            )

    def score(self, processes: Processes | None = None, unreadable: Sequence[str] = ()) -> DetectionScores:
        """Compare what all processes have found with the truth, over the pictures that any of them has looked at.

        Arguments:
            processes: those of the run; each must call this, and each gets the same scores.
            unreadable: pictures that this process could not read, which are left out.

        Raises:
            DataError: no picture was looked at.
        """
        processes = Processes() if processes is None else processes
        shares = processes.gather((self._found, tuple(unreadable)))
        names = tuple(sorted({name for _, share in shares for name in share}))
        found = {image: detections for share, _ in shares for image, detections in share.items()}
        if not found:
            first = f"; the first: {names[0]}" if names else ""
            raise DataError(f"{self.part.file.path}: no picture was evaluated, {len(names)} cannot be read{first}")
        result = processes.in_main(lambda: self._compare(found, names))
        return processes.gather(result)[0]

    def _compare(self, found: Mapping[int, _Found], unreadable: tuple[str, ...]) -> DetectionScores:
        boxes, masks = [], []
        for image in sorted(found):
            detections = found[image]
            corners = detections.boxes.astype(np.float64)
            extents = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
            labels, scores = detections.labels.tolist(), detections.scores.astype(np.float64).tolist()
            for box, label, score, counts in zip(extents, labels, scores, detections.counts, strict=True):
                common = {"image_id": image, "category_id": self.part.category_ids[label - 1], "score": score}
                outline: Rle = {"size": self._sizes[image], "counts": counts}
                # Apart, since the tools take the size of an object from its box if there is one.
                boxes.append(common | {"bbox": box})
                masks.append(common | {"segmentation": outline})
        return DetectionScores(
            _precisions(self.part.truth(), boxes, "bbox", sorted(found)),
            _precisions(self.part.truth(), masks, "segm", sorted(found)),
            len(found),
            unreadable,
        )


def _precisions(truth: dict[str, Any], rows: list[dict[str, Any]], kind: str, images: list[int]) -> Precisions:
    require("detection", "evaluating detectors")
    from faster_coco_eval import COCO, COCOeval_faster

    known = COCO(truth)
    evaluator = COCOeval_faster(known, known.loadRes(rows), kind)
    evaluator.params.imgIds = images
    evaluator.run()
    return Precisions(*(float(value) for value in evaluator.stats[:12]))


def score_table(scores: DetectionScores) -> Table:
    """For the terminal: a row for boxes and one for masks, in per cent as papers have them."""
    table = Table("", "AP", "AP50", "AP75", "APs", "APm", "APl", title=f"{scores.images:,} pictures")
    for name, values in (("boxes", scores.boxes), ("masks", scores.masks)):
        shown = (values.ap, values.ap50, values.ap75, values.ap_small, values.ap_medium, values.ap_large)
        table.add_row(name, *("-" if value < 0 else f"{100 * value:.1f}" for value in shown))
    return table
