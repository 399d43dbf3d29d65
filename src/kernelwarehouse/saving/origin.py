"""Which function built a model, so that a saved model can be rebuilt without its source or a pickle."""

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import timm
import torch
import torchvision
from timm.layers import DropPath
from torch import nn

from kernelwarehouse.builder import LIBRARIES_HERE, builder_of, makers, remember_builder
from kernelwarehouse.conversion import plan_of
from kernelwarehouse.drop_path import drop_evenly, even_rate
from kernelwarehouse.errors import CheckpointError, ConfigError
from kernelwarehouse.saving.allowed import check_builder
from kernelwarehouse.saving.placement import Placement
from kernelwarehouse.saving.structure import Structure, difference, structure


@dataclass(frozen=True)
class Architecture:
    """A registered builder of timm's, torchvision's or a room of this library, and its arguments. Nothing else can be
    written down here: see `kernelwarehouse.saving.allowed`. `even_drop_path` is the chance with which every residual
    branch is dropped in training, where that is not the builder's rule."""

    library: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    even_drop_path: float | None = None

    def __post_init__(self) -> None:
        check_builder(self.library, self.name, self.arguments)
        rate = self.even_drop_path
        if rate is not None and not (isinstance(rate, float) and 0 < rate < 1):
            raise CheckpointError(f"even_drop_path (={rate!r}) must be above 0 and below 1")

    @classmethod
    def from_dict(cls, data: Any) -> "Architecture":
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, dict) or not {"library", "name"} <= data.keys() <= known:
            raise CheckpointError(f"the architecture is none: {data!r}; library, name and arguments are wanted")
        library, arguments = data["library"], data.get("arguments", {})
        if library == "kernelwarehouse":  # format 1: the zoo's networks, which timm knows by the same names
            library = "timm"
        if isinstance(arguments, dict):
            # Formerly kept where a run had started from weights of timm's. The weights are in the file beside.
            arguments = {key: value for key, value in arguments.items() if key != "pretrained"}
        return cls(library, data["name"], arguments, data.get("even_drop_path"))

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        if self.even_drop_path is None:  # so that versions before 0.3 can read the rest
            del values["even_drop_path"]
        return values

    def build(self) -> nn.Module:
        """A new model without weights of anyone's."""
        model = self._from_library()
        if self.even_drop_path is not None:
            try:
                drop_evenly(model, self.even_drop_path)
            except ConfigError as error:
                raise CheckpointError(f"even_drop_path (={self.even_drop_path}): {error}") from error
        return model

    def _from_library(self) -> nn.Module:
        try:
            if self.library in LIBRARIES_HERE:
                return makers(self.library)[self.name].make(**self.arguments)
            if self.library == "timm":
                model = timm.create_model(self.name, pretrained=False, **self.arguments)
                if builder_of(model) is None:  # to be saved again
                    remember_builder(model, self.name, self.arguments)
                return model
            builder = torchvision.models.get_model_builder(self.name)
            # Segmentation and detection models would otherwise download weights for their backbones.
            inner = {"weights_backbone": None} if "weights_backbone" in signature(builder).parameters else {}
            return builder(weights=None, **inner, **self.arguments)
        except Exception as error:  # a builder can refuse arguments in any way
            raise CheckpointError(
                f"{self.library} cannot build {self.name!r} with {self.arguments}: {error}"
            ) from error

    def rebuild(self, placement: Placement | None) -> nn.Module:
        """A new model, converted by the plan. Networks of the compared methods come with their plan, if they have one,
        and so do those of the zoo in files of format 1."""
        model = self.build()
        part = makers(self.library)[self.name].network if self.library in LIBRARIES_HERE else ""
        own = plan_of(model.get_submodule(part))
        if placement is None or own == placement.plan:
            return model
        if own is not None:
            raise CheckpointError(f"{self.name} is planned in another way by this version than the stored plan says")
        return placement.apply(model, part)


@dataclass(frozen=True)
class Origin:
    """The builder of a model, or what `load` needs to be told: why those that came into question do not fit."""

    architecture: Architecture | None
    misfit: str | None = None


# A run saves the same network again and again; what is known of its structure need not be found out again.
_recent: OrderedDict[tuple[Structure, str], Origin] = OrderedDict()
_MOST_RECENT = 16


def identify(model: nn.Module, placement: Placement | None) -> Origin:
    """The builder that, converted by the plan, gives a model of exactly this structure."""
    known = builder_of(model), _pretrained_config(model)
    stored = None if placement is None else (placement.plan.to_dict(), placement.names)
    key = (structure(model), repr((known, stored)))
    if key not in _recent:
        _recent[key] = _search(model, placement, key[0])
        if len(_recent) > _MOST_RECENT:
            _recent.popitem(last=False)
    _recent.move_to_end(key)
    return _recent[key]


def _search(model: nn.Module, placement: Placement | None, wanted: Structure) -> Origin:
    misfit: str | None = None
    for library, name, arguments, rate in _with_drop_paths(model, _candidates(model)):
        try:
            stored = json.dumps(Architecture(library, name, arguments, rate).to_dict())
            architecture = Architecture.from_dict(json.loads(stored))  # as `load` will read it
            twin = _without_memory(architecture, placement)
        except Exception as error:  # a wrong guess can fail in any way
            misfit = misfit or f"{library} cannot rebuild {name!r}: {error}"
            continue
        different = difference(wanted, structure(twin))
        if different is None:
            return Origin(architecture)
        misfit = misfit or f"it is not {library}'s {name!r} (any more): {different}"
    if misfit is None and type(model).__module__.split(".")[0] in ("timm", "torchvision"):
        misfit = f"{type(model).__name__} was not made by timm's or torchvision's function for a name"
    return Origin(None, misfit)


def _without_memory(architecture: Architecture, placement: Placement | None) -> nn.Module:
    # Builders draw first weights; saving must not move the random numbers of a run.
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return architecture.rebuild(placement)
        except Exception:  # some builders compute with tensors; they need memory
            with torch.device("cpu"):
                return architecture.rebuild(placement)


def _candidates(model: nn.Module) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Library, name and arguments of builders, the likeliest first."""
    remembered, config = builder_of(model), _pretrained_config(model)
    if remembered is not None and remembered.library != "timm":
        yield remembered.library, remembered.name, remembered.arguments
        return
    of_timm = [] if remembered is None else [(remembered.name, remembered.arguments)]
    if config.get("architecture"):
        of_timm.append((config["architecture"], _timm_arguments(model)))
    classes = _classifier_width(model)
    for name, arguments in of_timm:
        yield "timm", name, arguments
        if classes is not None and arguments.get("num_classes") != classes:  # the classifier was replaced
            yield "timm", name, arguments | {"num_classes": classes}
    if type(model).__module__.startswith("torchvision.models"):
        layers = [module for name, module in model.named_modules() if ".attention." not in name]
        widths = [getattr(module, "out_features", getattr(module, "out_channels", None)) for module in layers]
        known = [width for width in widths if isinstance(width, int)]
        for name in torchvision.models.list_models():
            builder = torchvision.models.get_model_builder(name)
            if builder.__module__ == type(model).__module__:
                yield "torchvision", name, {"num_classes": known[-1]} if known else {}


def _with_drop_paths(
    model: nn.Module, candidates: Iterator[tuple[str, str, dict[str, Any]]]
) -> Iterator[tuple[str, str, dict[str, Any], float | None]]:
    """Each builder with its own rule for dropping branches first, then with the rate that all of the model's share."""
    rate = even_rate(model)
    for candidate in candidates:
        yield *candidate, None
        if rate is not None:
            yield *candidate, rate


def _pretrained_config(model: nn.Module) -> Mapping[str, Any]:
    config = getattr(model, "pretrained_cfg", None)
    return config if isinstance(config, dict) else {}


def _classifier_width(model: nn.Module) -> int | None:
    get_classifier = getattr(model, "get_classifier", None)
    if get_classifier is None:
        return None
    try:
        classifier = get_classifier()
    except Exception:  # timm's function reads attributes that a user may have removed
        return None
    width = getattr(classifier, "out_features", getattr(classifier, "out_channels", None))
    return width if isinstance(width, int) else None


def _timm_arguments(model: nn.Module) -> dict[str, Any]:
    """The arguments that people commonly give, read off the model; those at their defaults are left out."""
    arguments: dict[str, Any] = {}
    config = _pretrained_config(model)
    classes = getattr(model, "num_classes", None)
    if classes is not None and classes != config.get("num_classes"):
        arguments["num_classes"] = classes
    stem = next((module for module in model.modules() if isinstance(getattr(module, "in_channels", None), int)), None)
    if stem is not None and stem.in_channels != 3:
        arguments["in_chans"] = stem.in_channels
    rate = getattr(model, "drop_rate", 0.0)
    if isinstance(rate, float) and rate:
        arguments["drop_rate"] = rate
    paths = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    if paths:
        arguments["drop_path_rate"] = max(paths)
    patches = getattr(model, "patch_embed", None)
    size = getattr(patches, "img_size", None)
    if size is not None and tuple(size) != tuple(config.get("input_size", (3, *size))[1:]):
        arguments["img_size"] = tuple(size)
    return arguments
