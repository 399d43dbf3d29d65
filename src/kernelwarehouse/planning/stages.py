"""Layers -> blocks and stages, from the network's own structure and widths."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from kernelwarehouse.planning.discover import Discovery
from kernelwarehouse.planning.spec import LayerSpec
from kernelwarehouse.planning.static import is_stem

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SHORTCUT_NAMES = ("downsample", "shortcut", "skip", "proj", "residual", "identity")


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
