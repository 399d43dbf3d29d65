"""`kernelwarehouse plan`: what converting a model would do."""

import argparse
import difflib
from typing import get_args

import timm
import torch

from kernelwarehouse._terminal import console
from kernelwarehouse.attention_functions import ATTENTION_FUNCTIONS
from kernelwarehouse.config import Norm, Sharing, Start, WarehouseConfig
from kernelwarehouse.errors import ConfigError, UnknownPresetError
from kernelwarehouse.planning.api import plan
from kernelwarehouse.zoo import EVERY_PRESET, Preset, preset_plan


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("plan", help="show what converting a model would do, and what it would count")
    parser.add_argument("model", help="a timm model name, or a preset of this library")
    parser.add_argument("--budget", help="cells per mixture: 1, 4, 1/2, ... (default 1; a preset has its own)")
    parser.add_argument("--in-ratio", help="cell input width as a part of the divisor (default 1; 1/2 below budget 1)")
    parser.add_argument("--out-ratio", help="the same for the output width")
    parser.add_argument("--reduction", default="1/16", help="hidden width of the attention (default %(default)s)")
    parser.add_argument("--low-rank", help="ratio of the low-rank attention (default: full rank)")
    parser.add_argument("--no-spatial-partition", action="store_true", help="cells as wide as the kernels")
    _add_choice(parser, "--norm", get_args(Norm))
    _add_choice(parser, "--attention", tuple(ATTENTION_FUNCTIONS))
    _add_choice(parser, "--start", get_args(Start))
    _add_choice(parser, "--sharing", get_args(Sharing))
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="leave static; repeatable")
    parser.add_argument("--json", metavar="FILE", help="also write the plan as JSON")
    parser.set_defaults(run=run)


def _add_choice(parser: argparse.ArgumentParser, option: str, choices: tuple[str, ...]) -> None:
    parser.add_argument(option, choices=choices, default=choices[0], help="default %(default)s")


def run(arguments: argparse.Namespace) -> int:
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
