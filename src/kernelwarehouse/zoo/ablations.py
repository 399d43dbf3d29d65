"""The paper's ablations: the same mechanism under other settings, each a preset of its own."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kernelwarehouse import paper
from kernelwarehouse.zoo import compared, resnet
from kernelwarehouse.zoo._preset import PeerPreset, Preset
from kernelwarehouse.zoo._registry import register
from kernelwarehouse.zoo.compared import CAF_PRESETS

_ONE_X, _TWO_HALVES, _FOUR_X, _DEEP = "kw1x_resnet18", "kw1d2x_resnet18", "kw4x_resnet18", "kw1x_resnet50"
_BASES = {preset.name: preset for preset in resnet.PRESETS}


def _variant(base: str, suffix: str, parameters: int, printed: str, **changes: Any) -> Preset:
    preset = _BASES[base]
    config = dataclasses.replace(preset.config, **changes)
    return Preset(
        f"{base}_{suffix}", preset.backbone, config, parameters, printed, released_cells=preset.released_cells
    )


PRESETS: tuple[Preset | PeerPreset, ...] = (
    _variant(_ONE_X, "no_partition", 11_776_974, "11.78M", sharing="layer", spatial_partition=False),
    _variant(_ONE_X, "share_in_layer", 11_805_134, "11.81M", sharing="layer"),
    _variant(_ONE_X, "no_sharing", 11_783_114, "11.78M", sharing="none"),
    _variant(_DEEP, "same_shape", 26_949_052, "26.95M", sharing="same_shape"),
    _variant(_ONE_X, "softmax", 11_932_148, "11.93M", attention="softmax"),
    _variant(_ONE_X, "sigmoid", 11_932_148, "11.93M", attention="sigmoid"),
    _variant(_ONE_X, "relu", 11_932_148, "11.93M", attention="relu"),
    _variant(_FOUR_X, "softmax", 45_862_085, "45.86M", attention="softmax"),
    _variant(_ONE_X, "all_to_one", 11_932_148, "11.93M", start="all_to_one"),
    _variant(_ONE_X, "no_start", 11_932_148, "11.93M", start="none"),
    _variant(_FOUR_X, "four_to_one", 45_862_085, "45.86M", start="many_to_one"),
    _variant(_TWO_HALVES, "one_to_two", 7_431_044, "7.43M", start="one_to_many"),
    *CAF_PRESETS,
)

register(*PRESETS, ablations=True)

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("ablation_partition", "with kernel partition", _ONE_X),
    ("ablation_partition", "without kernel partition", f"{_ONE_X}_no_partition"),
    ("ablation_sharingscale", "Within each stage", _ONE_X),
    ("ablation_sharingscale", "Within each layer", f"{_ONE_X}_share_in_layer"),
    ("ablation_sharingscale", "Without sharing", f"{_ONE_X}_no_sharing"),
    ("ablation_sharingshape", "Different dimensioned kernels", _DEEP),
    ("ablation_sharingshape", "Same dimensioned kernels", f"{_DEEP}_same_shape"),
    ("ablation_function", "z_ij / sum_p |z_ip| (ours)", _ONE_X),
    ("ablation_function", "Softmax", f"{_ONE_X}_softmax"),
    ("ablation_function", "Sigmoid", f"{_ONE_X}_sigmoid"),
    ("ablation_function", "max(z_ij, 0) / sum_p |z_ip|", f"{_ONE_X}_relu"),
    ("ablation_temperature", "with attentions initialization", _ONE_X),
    ("ablation_temperature", "without attentions initialization", f"{_ONE_X}_no_start"),
    ("ablation_initialization", "1 kernel cell to 1 linear mixture", _ONE_X),
    ("ablation_initialization", "all the kernel cells to 1 linear mixture", f"{_ONE_X}_all_to_one"),
    ("ablation_initialization", "without attentions initialization", f"{_ONE_X}_no_start"),
    ("ablation_initialization", "1 kernel cell to 1 linear mixture", _FOUR_X),
    ("ablation_initialization", "4 kernel cells to 1 linear mixture", f"{_FOUR_X}_four_to_one"),
    ("ablation_initialization", "1 kernel cell to 1 linear mixture", _TWO_HALVES),
    ("ablation_initialization", "1 kernel cell to 2 linear mixtures", f"{_TWO_HALVES}_one_to_two"),
    ("attention_function", "Softmax", "dy4x_resnet18"),
    ("attention_function", "Our CAF", "dy4x_resnet18_caf"),
    ("attention_function", "Softmax", "od4x_resnet18"),
    ("attention_function", "Our CAF", "od4x_resnet18_caf"),
    ("attention_function", "Softmax", f"{_ONE_X}_softmax"),
    ("attention_function", "Our CAF", _ONE_X),
    ("attention_function", "Softmax", f"{_FOUR_X}_softmax"),
    ("attention_function", "Our CAF", _FOUR_X),
)


@dataclass(frozen=True)
class Ablation:
    """A row of an ablation table of the paper and the preset that it speaks of."""

    preset: str
    published: paper.Result


def ablations() -> list[Ablation]:
    """Every row of the paper's ablation tables but the static backbones, in the paper's order."""
    found = []
    for table, setting, preset in _ROWS:
        for row in paper.results(f"table:{table}"):
            # A preset's name begins with that of the network which its row speaks of.
            if row.setting == setting and (f"{preset}_").startswith(f"{paper.preset_name(row)}_"):
                found.append(Ablation(preset, row))
    return found


def ablation_table() -> Table:
    """What `kernelwarehouse zoo --ablations` shows: our counts beside the paper's, and the accuracies it reports."""
    counts = {preset.name: preset.parameters for preset in (*resnet.PRESETS, *compared.PRESETS, *PRESETS)}
    table = Table(title="The paper's ablations (ImageNet, 300 epochs, recipe advanced_published)", title_justify="left")
    for heading in ("preset", "setting in the paper", "parameters", "paper", "top-1 of the paper", "gain"):
        words = heading in ("preset", "setting in the paper")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading == "preset")
    label = None
    for ablation in ablations():
        row, metrics = ablation.published, ablation.published.metrics
        if row.table != label:
            label = row.table
            table.add_section()
        printed = f"{metrics['params_millions']:.2f}M"
        accuracy, gain = f"{metrics['top1']:.2f}", f"+{metrics['top1_gain']:.2f}"
        table.add_row(ablation.preset, row.setting, f"{counts[ablation.preset]:,}", printed, accuracy, gain)
    return table
