"""The backbone of a detector: timm's network for features, a pyramid over it, and what of it stays as it is.

The network comes from timm's `features_only`, so there is no classifier, and its warehouses have the size that they
have in the whole network: what a classification run has learnt fits. A warehouse is held by every layer that draws on
it and stored once, wherever timm puts these layers.
"""

import copy
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast, get_args

import torch
from timm.layers import freeze_batch_norm_2d, unfreeze_batch_norm_2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from kernelwarehouse.builder import WEIGHT_ARGUMENTS, builder_of, remember_builder
from kernelwarehouse.errors import ConfigError, PlanError
from kernelwarehouse.padding import padded_batch
from kernelwarehouse.zoo import build_by_name, common_name

Norms = Literal["frozen", "trained"]
FINEST, COARSEST = 4, 32
"""Strides of the levels that a pyramid is made of, where the network has them."""
TRIED = (160, 224)
"""Height and width that a network is tried with: whole numbers of the coarsest strides, and of no usual window."""
_DECIDED = ("features_only", "out_indices", "feature_cls", "num_classes", "in_chans")


def build_features(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A network of the zoo's or timm's, new, that gives a list of feature maps with strides of 4, 8, 16 and 32."""
    for argument in _DECIDED:
        if argument in arguments:
            raise ConfigError(f"{argument} (={arguments[argument]!r}) is for the detector to decide; leave it out")
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        whole = _features(name, {key: value for key, value in arguments.items() if key not in WEIGHT_ARGUMENTS})
    info = whole.feature_info
    strides = dict(zip(info.out_indices, info.reduction(), strict=True))
    levels = [index for index, stride in strides.items() if FINEST <= stride <= COARSEST]
    if not levels or any(2 * strides[one] != strides[other] for one, other in itertools.pairwise(levels)):
        raise ConfigError(
            f"{name} gives feature maps of strides {list(strides.values())}; a pyramid is made of maps whose strides "
            f"double, from {FINEST} to {COARSEST} pixels: choose a convolutional network such as resnet18"
        )
    _try_out(name, whole)
    features = _features(name, {**arguments, "out_indices": levels})
    if builder_of(features) is None:
        remember_builder(features, name, {**arguments, "features_only": True, "out_indices": levels})
    return features


def _features(name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        features: Any = build_by_name(name, features_only=True, **arguments)
    except ConfigError:
        raise
    except PlanError as error:
        raise ConfigError(f"{name} cannot be taken apart for feature maps: {error}") from error
    return features


@torch.no_grad()
def _try_out(name: str, network: Any) -> None:
    """Refuse a network that is for images of one size, or whose maps are not channels x height x width, before a
    detector is built on it. On the meta device, so that it costs no arithmetic."""
    try:
        maps = network.eval()(torch.zeros(1, 3, *TRIED, device="meta"))
    except Exception as error:  # a network can refuse an image in any way
        raise ConfigError(
            f"{name} cannot take images of {TRIED[0]} x {TRIED[1]} ({type(error).__name__}: {error}), and images of a "
            "detector are of any size: choose a convolutional network such as resnet18"
        ) from error
    channels = network.feature_info.channels()
    odd = [tuple(one.shape) for one, wanted in zip(maps, channels, strict=True) if one.shape[1:-2] != (wanted,)]
    if odd:
        raise ConfigError(
            f"{name} gives a feature map of shape {odd[0]}; a pyramid is made of maps of batch, channels, height and "
            "width: choose a convolutional network such as resnet18"
        )


class PyramidBackbone(nn.Module):
    """Images -> feature maps of one width by level, as torchvision's detectors want them.

    `body` is timm's network, `fpn` torchvision's pyramid, with one more level from a max pool.

    With `norms` frozen, as torchvision has them for trained networks, the batch norms of the body are constants:
    statistics and affine parameters. The one-dimensional ones, of attention branches, keep their statistics as well,
    since batches of two images say nothing about them; their affine parameters are trained, as the rest of the branch.

    The stem and the first `frozen_stages` stages are frozen, from 0 on; with -1, nothing is. All of their parameters
    are: kernels, norms, attention branches and the cells that they draw on. A warehouse that a frozen layer shares with
    a trained one is frozen, too: otherwise the frozen layer would change with every step. The trained layer still
    learns which cells to mix.
    """

    def __init__(self, body: nn.Module, width: int, *, norms: Norms, frozen_stages: int) -> None:
        super().__init__()
        if norms not in get_args(Norms):
            raise ConfigError(f"norms is {norms!r}; {' or '.join(map(repr, get_args(Norms)))} is wanted")
        info: Any = body.feature_info
        # Frozen norms do not know theirs, and those of CBAM are not torch's default.
        self._momenta = {name: norm.momentum for name, norm in body.named_modules() if isinstance(norm, _BatchNorm)}
        self.body: nn.Module = freeze_batch_norm_2d(body) if norms == "frozen" else body
        self.fpn = FeaturePyramidNetwork(info.channels(), width, extra_blocks=LastLevelMaxPool())
        self.out_channels = width
        self.strides = [int(stride) for stride in info.reduction()]
        self.norms, self.frozen_stages = norms, frozen_stages
        if type(frozen_stages) is not int or not -1 <= frozen_stages <= len(self.strides):
            raise ConfigError(
                f"frozen_stages is {frozen_stages!r}; a whole number from -1 (nothing) and 0 (the stem) to "
                f"{len(self.strides)} (the stem and all stages) is wanted"
            )
        self._keep_frozen()

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> dict[str, Tensor]:
        """`sizes` are those of the images before they were padded; without them, all of the batch counts as image."""
        height, width = images.shape[-2:]
        with padded_batch(sizes or [(height, width)] * len(images), (height, width)):
            maps = self.body(images)
        return self.fpn(OrderedDict((str(level), features) for level, features in enumerate(maps)))

    def stages(self) -> list[list[nn.Module]]:
        """The modules of the stem, and of every stage: a stage ends where the pyramid takes a level.

        Raises:
            ConfigError: where levels end inside of parts, or are made side by side.
        """
        info: Any = self.body.feature_info
        ends = {common_name(name) for name in info.module_name()}
        units = [(common_name(name), unit) for name, unit in _units(self.body, ends)]
        last = [index for index, (name, _) in enumerate(units) if name in ends]
        if len(last) != len(ends):
            raise ConfigError(
                f"the stages of this network cannot be told apart: levels end at {', '.join(sorted(ends))}, its parts "
                f"are {', '.join(name for name, _ in units)}; only frozen_stages=-1, nothing frozen, is possible"
            )
        firsts = [0, last[0], *(index + 1 for index in last[:-1])]
        stops = [last[0], *(index + 1 for index in last)]
        return [[unit for _, unit in units[first:stop]] for first, stop in zip(firsts, stops, strict=True)]

    def unfrozen_body(self) -> nn.Module:
        """A copy of the body, all of which can be trained, with batch norms as before they were frozen."""
        body: nn.Module = unfreeze_batch_norm_2d(copy.deepcopy(self.body))
        for name, momentum in self._momenta.items():
            cast(_BatchNorm, body.get_submodule(name)).momentum = momentum
        return body.requires_grad_(True).train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self._keep_frozen()
        return self

    def _keep_frozen(self) -> None:
        if self.norms == "frozen":
            for module in self.body.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        if self.frozen_stages >= 0:
            for unit in itertools.chain.from_iterable(self.stages()[: self.frozen_stages + 1]):
                unit.eval().requires_grad_(False)


def _units(body: nn.Module, ends: set[str]) -> list[tuple[str, nn.Module]]:
    """The parts of a network in the order of their use: its children, or theirs where a level ends inside a child."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in body.named_children():
        if any(end.startswith(f"{common_name(name)}.") for end in ends):
            found += [(f"{name}.{inner}", unit) for inner, unit in child.named_children()]
        else:
            found.append((name, child))
    return found
