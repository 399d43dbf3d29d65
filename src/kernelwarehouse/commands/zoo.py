"""`kernelwarehouse zoo`: the presets and the paper's ablations, with their counts."""

import argparse

from rich.table import Table

from kernelwarehouse._terminal import console
from kernelwarehouse.zoo import PEERS, PRESETS, preset_plan
from kernelwarehouse.zoo.ablations import ablation_table


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "zoo",
        help="list the presets with their parameters and the paper's",
        description="List the networks of the paper and those of the methods it compares with: what they count here, "
        "and what the paper prints.",
    )
    parser.add_argument("--ablations", action="store_true", help="the paper's ablations instead, with its accuracies")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.ablations:
        console().print(ablation_table())
        return 0
    table = Table(title="Presets (1000 classes)", title_justify="left")
    for heading in ("preset", "backbone", "warehouses", "parameters", "paper", "note"):
        number = heading in ("warehouses", "parameters", "paper")
        table.add_column(heading, justify="right" if number else "left", no_wrap=heading != "note", overflow="fold")
    for preset in PRESETS.values():
        made = preset_plan(preset)
        count = f"{made.parameters_after:,}"
        table.add_row(preset.name, preset.backbone, str(len(made.warehouses)), count, preset.paper or "-", preset.note)
    table.add_section()
    for peer in PEERS.values():
        table.add_row(peer.name, peer.backbone, "-", f"{peer.parameters:,}", peer.paper or "-", peer.note)
    console().print(table)
    return 0
