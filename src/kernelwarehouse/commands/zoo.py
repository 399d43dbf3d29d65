"""`kernelwarehouse zoo`: the presets and the paper's ablations, with their counts."""

import argparse

from rich.table import Table

from kernelwarehouse import paper
from kernelwarehouse._terminal import console
from kernelwarehouse.zoo import PEERS, PRESETS, PeerPreset, Preset, preset_plan
from kernelwarehouse.zoo.ablations import ablation_table

RECIPE_NOTE = (
    "recipes: those of the tables in which the paper prints accuracies. The ..._published ones are the released "
    "code's, which has no configuration of kw3d4x_convnext_tiny, of KW*, of DeiT, of the compared methods (below the "
    "line), and of the tables with 100 epochs; the paper says that the networks of a table were all trained alike."
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "zoo",
        help="list the presets with their parameters and the paper's",
        description="List the networks of the paper and those of the methods it compares with: what they count here, "
        "what the paper prints, and the recipes of 'train' for the tables in which it prints accuracies.",
    )
    parser.add_argument("--ablations", action="store_true", help="the paper's ablations instead, with its accuracies")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.ablations:
        console().print(ablation_table())
        return 0
    table = Table(title="Presets (1000 classes)", title_justify="left")
    for heading in ("preset", "backbone", "warehouses", "parameters", "paper", "recipes of its tables"):
        number = heading in ("warehouses", "parameters", "paper")
        table.add_column(heading, justify="right" if number else "left", no_wrap=True, overflow="fold")
    for preset in PRESETS.values():
        made = preset_plan(preset)
        table.add_row(*_row(preset, str(len(made.warehouses)), made.parameters_after))
    table.add_section()
    for peer in PEERS.values():
        table.add_row(*_row(peer, "-", peer.parameters))
    out = console()
    out.print(table)
    out.print(RECIPE_NOTE, soft_wrap=True)
    listed: list[Preset | PeerPreset] = [*PRESETS.values(), *PEERS.values()]
    for noted in listed:
        if noted.note:
            out.print(f"{noted.name}: {noted.note}", soft_wrap=True)
    return 0


def _row(preset: Preset | PeerPreset, warehouses: str, parameters: int) -> tuple[str, ...]:
    recipes = "\n".join(paper.recipes(preset.name)) or "-"
    return preset.name, preset.backbone, warehouses, f"{parameters:,}", preset.paper or "-", recipes
