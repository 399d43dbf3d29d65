"""Every reason for a layer to stay static: what cannot be converted, and what is left alone by choice."""

from collections.abc import Sequence

from torch import nn
from torch.nn.utils import parametrize

from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.planning.patterns import Patterns
from kernelwarehouse.planning.spec import Kind, LayerSpec

_KINDS: dict[type[nn.Module], Kind] = {
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.Linear: "linear",
}
# These read the weights of their children instead of calling them.
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
IMAGE_CHANNELS = 3


def kind_of(module: nn.Module) -> Kind | None:
    """What a layer would be converted as; nothing for a module that is no such layer."""
    for base, kind in _KINDS.items():
        if isinstance(module, base):
            return kind
    return None


def why_not_convertible(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    """Why a convolution or linear layer cannot be converted, or nothing."""
    base = next(base for base in _KINDS if isinstance(module, base))
    if parametrize.is_parametrized(module) or "weight" not in module._parameters:
        return "its weight is computed (weight norm, parametrisation)"
    overridden = any(
        getattr(type(module), method, None) is not getattr(base, method, None)
        for method in ("forward", "_conv_forward")
    )
    if overridden:
        return f"{type(module).__name__} has a forward of its own"
    parent = name
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if isinstance(modules[parent], _READS_WEIGHTS):
            return f"{type(modules[parent]).__name__} reads its weights directly"
    return None


def tied_weights(model: nn.Module) -> dict[str, str]:
    """Layers whose weight is also someone else's: a warehouse would cut the tie."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            holders.setdefault(id(weight), []).append(name)
    reasons = {}
    for names in holders.values():
        for name in names if len(names) > 1 else ():
            other = next((holder for holder in names if holder != name), name)
            reasons[name] = f"its weight is tied to that of {other!r}"
    return reasons


def left_static(
    layers: Sequence[LayerSpec], others: Sequence[str], pooled: frozenset[str], config: WarehouseConfig
) -> dict[str, str]:
    """Layers that could be converted but are left static, label -> reason.

    `layers` are in forward order; `others` names layers that cannot be converted, which patterns may name as well;
    `pooled` are the names of layers that see globally pooled features.
    """
    labels = [layer.label for layer in layers]
    every_name = [*labels, *others]
    excluded = Patterns(config.exclude, every_name).matches
    static = {label: "excluded" for label in labels if label in excluded}
    if config.groups:
        grouped = Patterns([pattern for group in config.groups.values() for pattern in group], labels).matches
        return {label: "in no group" for label in labels if label not in grouped} | static
    first, last = layers[0], layers[-1]
    automatic = {}
    if config.static_stem and is_stem(first):
        automatic[first.label] = "the stem (static_stem)"
    if config.static_classifier and last.kind == "linear":
        automatic[last.label] = "the classifier (static_classifier)"
    for layer in layers:
        if layer.kind != "linear" and layer.name in pooled:
            automatic[layer.label] = "sees globally pooled features only"
    # A network of nothing else has no stem or classifier worth the name.
    if set(automatic) | set(static) >= set(labels):
        return static
    return automatic | static


def is_stem(layer: LayerSpec) -> bool:
    return layer.kind != "linear" and layer.in_channels <= IMAGE_CHANNELS
