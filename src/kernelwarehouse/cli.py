"""The `kernelwarehouse` command."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

import timm
import torch
from rich.table import Table

from kernelwarehouse.compare import add_parsers as add_compare_parser
from kernelwarehouse.config import AttentionFunction, Norm, Sharing, Start, WarehouseConfig
from kernelwarehouse.errors import ConfigError, KernelWarehouseError, UnknownPresetError
from kernelwarehouse.planning import plan
from kernelwarehouse.terminal import console
from kernelwarehouse.training.commands import add_parsers as add_training_parsers
from kernelwarehouse.zoo import EVERY_PRESET, PEERS, PRESETS, Preset, preset_plan
from kernelwarehouse.zoo.ablations import ablation_table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kernelwarehouse", description="KernelWarehouse for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_plan(commands)
    _add_zoo(commands)
    add_training_parsers(commands)
    add_compare_parser(commands)
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)
    except KernelWarehouseError as error:
        print(f"kernelwarehouse: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("plan", help="show what converting a model would do, and what it would count")
    parser.add_argument("model", help="a timm model name, or a preset of this library")
    parser.add_argument("--budget", help="cells per mixture: 1, 4, 1/2, ... (default 1; a preset has its own)")
    parser.add_argument("--in-ratio", help="cell input width as a part of the divisor (default 1; 1/2 below budget 1)")
    parser.add_argument("--out-ratio", help="the same for the output width")
    parser.add_argument("--reduction", default="1/16", help="hidden width of the attention (default %(default)s)")
    parser.add_argument("--low-rank", help="ratio of the low-rank attention (default: full rank)")
    parser.add_argument("--no-spatial-partition", action="store_true", help="cells as wide as the kernels")
    _add_choice(parser, "--norm", Norm)
    _add_choice(parser, "--attention", AttentionFunction)
    _add_choice(parser, "--start", Start)
    _add_choice(parser, "--sharing", Sharing)
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="leave static; repeatable")
    parser.add_argument("--json", metavar="FILE", help="also write the plan as JSON")
    parser.set_defaults(run=_plan)


def _add_choice(parser: argparse.ArgumentParser, option: str, kind: object) -> None:
    choices = kind.__args__  # type: ignore[attr-defined]
    parser.add_argument(option, choices=choices, default=choices[0], help="default %(default)s")


def _plan(arguments: argparse.Namespace) -> int:
    preset = EVERY_PRESET.get(arguments.model)
    if isinstance(preset, Preset):
        if arguments.budget is not None:
            raise ConfigError(f"{preset.name} has budgets of its own; --budget goes with a timm model")
        made = preset_plan(preset)
    else:
        config = WarehouseConfig(
            budget=arguments.budget or 1,
            in_ratio=arguments.in_ratio,
            out_ratio=arguments.out_ratio,
            reduction=arguments.reduction,
            low_rank=arguments.low_rank,
            spatial_partition=not arguments.no_spatial_partition,
            norm=arguments.norm,
            attention=arguments.attention,
            start=arguments.start,
            sharing=arguments.sharing,
            exclude=arguments.exclude,
        )
        if not timm.is_model(arguments.model):
            names = timm.list_models()
            near = [name for name in names if arguments.model in name][:3]
            near = near or difflib.get_close_matches(arguments.model, names, n=3)
            hint = f"; timm has {', '.join(near)}" if near else "; timm.list_models() shows what there is"
            raise UnknownPresetError(f"neither timm nor this library has a model {arguments.model!r}{hint}")
        with torch.device("meta"):
            made = plan(timm.create_model(arguments.model), config)
    console().print(made)
    if arguments.json:
        made.save(arguments.json)
    return 0


def _add_zoo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("zoo", help="list the presets with their parameters and the paper's")
    parser.add_argument("--ablations", action="store_true", help="the paper's ablations instead, with its accuracies")
    parser.set_defaults(run=_zoo)


def _zoo(arguments: argparse.Namespace) -> int:
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
