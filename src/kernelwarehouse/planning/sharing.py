"""Who shares a warehouse: the groups that the settings name, or groups found from the network's stages."""

import dataclasses
from collections.abc import Sequence

from torch import nn

from kernelwarehouse.config import WarehouseConfig
from kernelwarehouse.errors import PlanError
from kernelwarehouse.planning.cells import divisors
from kernelwarehouse.planning.discover import Discovery
from kernelwarehouse.planning.patterns import Patterns
from kernelwarehouse.planning.spec import Group, LayerSpec
from kernelwarehouse.planning.stages import Block, Stage, find_stages

# An attention grows with (pieces of its layer) x (cells of its warehouse). The paper's networks stay at 32 pieces of
# the channels and 441 mixtures; beyond these bounds the attention dwarfs the kernels.
MOST_PIECES = 32
MOST_MIXTURES = 512


def share(model: nn.Module, discovery: Discovery, kept: Sequence[LayerSpec], config: WarehouseConfig) -> list[Group]:
    """Who shares a warehouse, as the settings say; `kept` are the layers to convert. In the order of first use, as the
    paper lists them."""
    place = {layer.label: index for index, layer in enumerate(kept)}
    if config.groups:
        groups = _explicit_groups(kept, config, [layer.label for layer in discovery.layers])
        for group in groups:
            _check_alike(group, discovery.frozen)
    else:
        groups = [_in_order(group, place) for group in _automatic_groups(model, discovery, set(place), config)]
    return sorted(groups, key=lambda group: place[group.layers[0].label])


def _automatic_groups(model: nn.Module, discovery: Discovery, kept: set[str], config: WarehouseConfig) -> list[Group]:
    stages = find_stages(model, discovery)
    if not kept <= discovery.frozen:
        stages = frozen_apart(stages, discovery.frozen)
    match config.sharing:
        case "stage":
            return share_by_stage(stages, kept, config.max_layers)
        case "same_shape":
            return share_same_shape(stages, kept, config.max_layers)
        case "layer" | "none":
            return share_within_layers(stages, kept, config.max_layers, config.sharing == "layer")


def _in_order(group: Group, place: dict[str, int]) -> Group:
    layers = tuple(sorted(group.layers, key=lambda layer: place[layer.label]))
    return dataclasses.replace(group, layers=layers)


def _explicit_groups(kept: Sequence[LayerSpec], config: WarehouseConfig, labels: list[str]) -> list[Group]:
    """The groups that the settings name; their patterns may also match layers that are not kept."""
    owners: dict[str, str] = {}
    groups = []
    for name, patterns in config.groups.items():
        chosen = Patterns(patterns, labels).matches
        layers = tuple(layer for layer in kept if layer.label in chosen)
        for label in sorted(layer.label for layer in layers):
            if label in owners:
                raise PlanError(f"layer {label!r} is in groups {owners[label]!r} and {name!r}")
            owners[label] = name
        if not layers:
            raise PlanError(f"group {name!r} is left without layers: all it matches are excluded")
        groups.append(Group(name, layers, layers))
    return groups


def _check_alike(group: Group, frozen: frozenset[str]) -> None:
    """A shared warehouse moves the kernels of all its layers, or of none."""
    held = next((layer.label for layer in group.layers if layer.label in frozen), None)
    trained = next((layer.label for layer in group.layers if layer.label not in frozen), None)
    if held is not None and trained is not None:
        raise PlanError(
            f"group {group.name!r} has {held!r}, which is frozen (requires_grad is False), and {trained!r}, which is "
            "trained; what they share would move both: give them groups of their own"
        )


def frozen_apart(stages: list[Stage], frozen: frozenset[str]) -> list[Stage]:
    """Every stage as two: its trained layers, and its frozen ones, which no shared cell may move."""
    apart = []
    for stage in stages:
        for name, held in ((stage.name, False), (f"{stage.name}.frozen", True)):
            parts = [[layer for layer in block.layers if (layer.label in frozen) == held] for block in stage.blocks]
            blocks = [Block(block.parent, part) for block, part in zip(stage.blocks, parts, strict=True) if part]
            if blocks:
                apart.append(Stage(name, blocks))
    return apart


def share_by_stage(stages: list[Stage], kept: set[str], max_layers: int | None) -> list[Group]:
    """One group per stage and family of layers, cut where divisors or sheer numbers would make it costly."""
    groups: list[Group] = []
    for stage in stages:
        families = _families([layer for layer in stage.layers if layer.label in kept])
        for family, layers in families.items():
            name = stage.name if len(families) == 1 else f"{stage.name}.{family}"
            alike = _split_by_divisors(layers)
            parts = [part for some in alike for part in _split_by_count(some, max_layers)]
            for number, part in enumerate(parts, 1):
                groups.append(Group(name if len(parts) == 1 else f"{name}.{number}", tuple(part), tuple(part)))
    return groups


def _split_by_divisors(layers: list[LayerSpec]) -> list[list[LayerSpec]]:
    """Layers whose common divisor would cut any of them into too many pieces do not share.

    Each layer joins the first group that stays within bounds, so that one odd width (a head of three classes, say)
    does not drag down the cells of all others.
    """
    groups: list[list[LayerSpec]] = []
    for layer in layers:
        for group in groups:
            if _affordable([*group, layer]):
                group.append(layer)
                break
        else:
            groups.append([layer])
    return groups


def _affordable(layers: list[LayerSpec]) -> bool:
    out, into = divisors(layers)
    return all(layer.kernel_shape[0] // out * (layer.kernel_shape[1] // into) <= MOST_PIECES for layer in layers)


def _split_by_count(layers: list[LayerSpec], max_layers: int | None) -> list[list[LayerSpec]]:
    """Equal parts of at most `max_layers` layers and, unless that is off, about `MOST_MIXTURES` mixtures."""
    if max_layers is None:
        return [layers]
    out, into = divisors(layers)
    mixtures = sum(layer.parameters for layer in layers) // (out * into)
    parts = min(max(-(-len(layers) // max_layers), -(-mixtures // MOST_MIXTURES)), len(layers))
    return [layers[part * len(layers) // parts : (part + 1) * len(layers) // parts] for part in range(parts)]


def share_same_shape(stages: list[Stage], kept: set[str], max_layers: int | None) -> list[Group]:
    """Within a stage, only kernels of the same spatial size and input width share: a bottleneck's first convolutions
    and shortcuts, its second ones, its third ones."""
    groups = []
    for group in share_by_stage(stages, kept, max_layers):
        alike: dict[tuple[object, ...], list[LayerSpec]] = {}
        for layer in group.layers:
            alike.setdefault((layer.kernel_shape[1:], layer.groups), []).append(layer)
        for number, layers in enumerate(alike.values(), 1):
            name = group.name if len(alike) == 1 else f"{group.name}.shape{number}"
            groups.append(Group(name, tuple(layers), tuple(layers)))
    return groups


def share_within_layers(stages: list[Stage], kept: set[str], max_layers: int | None, own_divisors: bool) -> list[Group]:
    """Every layer has its own warehouse, with cells by its own divisors or by those of its stage."""
    groups = []
    for group in share_by_stage(stages, kept, max_layers):
        groups += [Group(layer.label, (layer,), (layer,) if own_divisors else group.layers) for layer in group.layers]
    return groups


def _families(layers: list[LayerSpec]) -> dict[str, list[LayerSpec]]:
    """Depth-wise, dense, point-wise and linear layers apart, unless sharing leaves the cells' input width alone.

    Dense and point-wise layers share where their divisors have the same input width and one's output width divides
    the other's, as in ResNets. Depth-wise layers never do: their input width is 1.
    """
    families: dict[str, list[LayerSpec]] = {}
    for layer in layers:
        families.setdefault(_family(layer), []).append(layer)
    names = [name for name in families if name != "depthwise"]
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            if name in families and other in families and _shares(families[name], families[other]):
                merged = set(families[name]) | set(families.pop(other))
                families[name] = [layer for layer in layers if layer in merged]
    return families


def _family(layer: LayerSpec) -> str:
    if layer.kind == "linear":
        return "linear"
    if layer.depthwise:
        return "depthwise"
    if layer.groups > 1:
        return "grouped"
    return "pointwise" if layer.pointwise else "dense"


def _shares(some: list[LayerSpec], others: list[LayerSpec]) -> bool:
    if some[0].kind != others[0].kind:
        return False
    (some_out, some_in), (others_out, others_in) = divisors(some), divisors(others)
    return some_in == others_in and (some_out % others_out == 0 or others_out % some_out == 0)
