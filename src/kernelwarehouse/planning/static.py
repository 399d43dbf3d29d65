"""Every reason for a layer to stay static: what cannot be converted, and what is left alone by choice."""

from collections.abc import Sequence
from itertools import chain

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
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
IMAGE_CHANNELS = 3

NEVER_CALLED = "its forward is never called; its weights are used directly"
READ = "its weight is read by the model beside its own call"
QUERY_AND_KEY = "query and key stay static; the value part is a layer of its own"
NO_TWIN = "only Conv1d, Conv2d, Conv3d and Linear can be converted"


def kind_of(module: nn.Module) -> Kind | None:
    """What a layer would be converted as; nothing for a module that is no such layer."""
    for base, kind in _KINDS.items():
        if isinstance(module, base):
            return kind
    return None


def why_not_convertible(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    """Why a convolution or linear layer cannot be converted, or nothing."""
    weight = module._parameters.get("weight")
    if parametrize.is_parametrized(module) or weight is None:
        return "its weight is computed (weight norm, parametrisation)"
    own = _own_behaviour(module) or _own_contents(module) or _unusual_weight(module, weight)
    if own is not None:
        return own
    parent = name
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if isinstance(modules[parent], _READS_WEIGHTS):
            return f"{type(modules[parent]).__name__} reads its weights directly"
    return None


def _own_behaviour(module: nn.Module) -> str | None:
    """What a layer does that its converted twin would not."""
    kind = type(module)
    base = next(base for base in _KINDS if isinstance(module, base))
    methods = ("forward", "_conv_forward", "__call__")
    if any(method in vars(module) for method in methods):
        return "a forward of its own was set on it"
    if any(getattr(kind, method, None) is not getattr(base, method, None) for method in methods):
        return f"{kind.__name__} has a forward of its own"
    if any(getattr(module, hooks) for hooks in _STATE_HOOKS):
        return "hooks change what it writes to or reads from a state dict"
    return None


def _own_contents(module: nn.Module) -> str | None:
    """What a layer holds that its converted twin would not."""
    extra = sorted(chain(set(module._parameters) - {"weight", "bias"}, module._buffers, module._modules))
    if extra:
        return f"it holds more than a weight and a bias: {', '.join(extra)}"
    return None


def _unusual_weight(module: nn.Module, weight: nn.Parameter) -> str | None:
    """A weight that is no plain tensor of real numbers in the shape that the layer's settings say."""
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, not a plain parameter"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}; real floating-point numbers are wanted"
    said: tuple[int, ...] = tuple(weight.shape)
    if isinstance(module, nn.Linear):
        said = (module.out_features, module.in_features)
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        said = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
        # Other paddings than of zeros are kept from construction, last axis first and twice for each.
        kept, now = module._reversed_padding_repeated_twice, module.padding
        if module.padding_mode != "zeros" and isinstance(now, tuple) and list(kept)[::-2] != list(now):
            return f"its padding was set to {now} later, which torch does not follow for {module.padding_mode!r}"
    if tuple(weight.shape) != said:
        return f"its weight has the shape {tuple(weight.shape)}, its settings say {said}"
    return None


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Layers with a parameter that is also someone else's, where conversion would cut the tie."""
    modules = dict(model.named_modules())
    holders: dict[int, list[tuple[str, str]]] = {}
    for owner, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((owner, name))
    reasons: dict[str, str] = {}
    for places in holders.values():
        for owner, name in places if len(places) > 1 else ():
            # A bias goes to the converted layer as it is, unless it has to be split.
            if kind_of(modules[owner]) and (name == "weight" or is_fused(owner, modules[owner])):
                other, others_name = next(place for place in places if place != (owner, name))
                whose = f"that of {other!r}" if others_name == name else repr(f"{other}.{others_name}".lstrip("."))
                reasons.setdefault(owner, f"its {name} is tied to {whose}")
    return reasons


def is_fused(name: str, module: nn.Module) -> bool:
    """Whether a layer computes queries, keys and values at once."""
    return (
        isinstance(module, nn.Linear) and name.split(".")[-1] == "qkv" and module.out_features == 3 * module.in_features
    )


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
