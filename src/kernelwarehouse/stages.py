"""Layers -> the groups that share a warehouse, from the network's own structure and widths."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from kernelwarehouse.discover import Discovery
from kernelwarehouse.grouping import Group, divisors
from kernelwarehouse.spec import LayerSpec

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SHORTCUT_NAMES = ("downsample", "shortcut", "skip", "proj", "residual", "identity")
IMAGE_CHANNELS = 3
# An attention grows with (pieces of its layer) x (cells of its warehouse). The paper's networks stay at 32 pieces of
# the channels and 441 mixtures; beyond these bounds the attention dwarfs the kernels.
MOST_PIECES = 32
MOST_MIXTURES = 512


@dataclass
class Block:
    """Layers that one module of the network holds: a residual block, or a single layer."""

    parent: str
    layers: list[LayerSpec]

    @property
    def width(self) -> int:
        return self.layers[-1].out_channels

    @property
    def composite(self) -> bool:
        return len(self.layers) > 1


@dataclass
class Stage:
    """Consecutive blocks of one output width. The stem is no stage that others can lean on."""

    name: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def width(self) -> int:
        return self.blocks[-1].width

    @property
    def layers(self) -> list[LayerSpec]:
        return [layer for block in self.blocks for layer in block.layers]


def find_stages(model: nn.Module, discovery: Discovery) -> list[Stage]:
    """Cut the network into its stem and its stages, then hand each stage's entry layers to the stage before."""
    blocks = _find_blocks(model, discovery.layers)
    stages = _cut(blocks)
    return _move_entries(stages, discovery)


def is_stem(layer: LayerSpec) -> bool:
    return layer.kind != "linear" and layer.in_channels <= IMAGE_CHANNELS


def _find_blocks(model: nn.Module, layers: Sequence[LayerSpec]) -> list[Block]:
    modules = dict(model.named_modules())
    below: dict[str, int] = {}
    for layer in layers:
        for holder in _holders(layer.name):
            below[holder] = below.get(holder, 0) + 1

    def holds_blocks(name: str) -> bool:
        """Whether a module is a row of blocks rather than a block: it, or a container in it, lists composite parts."""
        module = modules[name]
        if name == "" or isinstance(module, _CONTAINERS):
            return True
        for child_name, child in module.named_children():
            if isinstance(child, _CONTAINERS):
                parts = [f"{name}.{child_name}.{part}" for part, _ in child.named_children()]
                if sum(below.get(part, 0) > 1 for part in parts) > 1:
                    return True
        return False

    rows = {name: holds_blocks(name) for name in below if name in modules}
    blocks: dict[str, Block] = {}
    for layer in layers:
        holders = _holders(layer.name)
        depth = next((index for index, name in enumerate(holders) if not rows.get(name, True)), len(holders))
        block_name = holders[depth] if depth < len(holders) else layer.name
        parent = holders[depth - 1]
        blocks.setdefault(block_name, Block(parent, [])).layers.append(layer)
    return list(blocks.values())


def _holders(name: str) -> list[str]:
    """The modules around a layer, outermost first: '' is the model."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


def _cut(blocks: list[Block]) -> list[Stage]:
    if any(block.composite for block in blocks):
        lead = next(index for index, block in enumerate(blocks) if block.composite)
    else:
        lead = int(len(blocks) > 1 and is_stem(blocks[0].layers[0]))
    stages = [Stage("stem", blocks[:lead])]
    # A parent that lists several composite blocks is a stage of the network's own making.
    rows: dict[str, int] = {}
    for block in blocks:
        rows[block.parent] = rows.get(block.parent, 0) + block.composite
    for block in blocks[lead:]:
        last = stages[-1].blocks[-1] if len(stages) > 1 else None
        other_row = last is not None and last.parent != block.parent and min(rows[last.parent], rows[block.parent]) > 1
        if last is None or last.width != block.width or other_row:
            stages.append(Stage(f"stage{len(stages)}"))
        stages[-1].blocks.append(block)
    return stages


def _move_entries(stages: list[Stage], discovery: Discovery) -> list[Stage]:
    """A layer that takes in the previous stage's width belongs to that stage; the first stage keeps its own."""
    stage_of = {layer.name: index for index, stage in enumerate(stages) for layer in stage.layers}
    feeds = discovery.trace.feeds if discovery.trace is not None else None
    moved: list[Stage] = [Stage(stage.name) for stage in stages]
    for index, stage in enumerate(stages):
        for position, block in enumerate(stage.blocks):
            stays: list[LayerSpec] = []
            goes: list[LayerSpec] = []
            for layer in block.layers:
                enters = index > 1 and layer.in_channels == stages[index - 1].width
                if enters and feeds is not None:
                    enters = bool(feeds[layer.name]) and all(stage_of.get(name) != index for name in feeds[layer.name])
                elif enters:
                    enters = position == 0 and (layer is block.layers[0] or _named_shortcut(layer, stage.width))
                (goes if enters else stays).append(layer)
            if goes:
                moved[index - 1].blocks.append(Block(block.parent, goes))
            if stays:
                moved[index].blocks.append(Block(block.parent, stays))
    return [stage for stage in moved if stage.blocks]


def _named_shortcut(layer: LayerSpec, width: int) -> bool:
    return layer.out_channels == width and any(part in layer.name.lower() for part in _SHORTCUT_NAMES)


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
