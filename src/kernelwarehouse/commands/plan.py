"""`kernelwarehouse plan`: what converting a model would do."""

import argparse
from typing import get_args

import torch

from kernelwarehouse._terminal import console
from kernelwarehouse.attention_functions import ATTENTION_FUNCTIONS
from kernelwarehouse.commands.arguments import path
from kernelwarehouse.config import Begin, Norm, Sharing, Start, WarehouseConfig
from kernelwarehouse.errors import ConfigError
from kernelwarehouse.planning.api import plan
from kernelwarehouse.zoo import EVERY_PRESET, Preset, build_by_name, preset_plan


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="show what converting a model would do, and what it would count",
        description="Show which layers would draw on which warehouse, and what that makes of the parameters. A preset "
        "has settings of its own; the options but --begin are for timm's models.",
    )
    parser.add_argument("model", help="a timm model name, or a preset of this library")
    group = parser.add_argument_group("settings of a timm model")
    numbers = {
        "--budget": "cells per mixture: 1, 4, 1/2, ... (default 1)",
        "--in-ratio": "cell input width as a part of the divisor (default 1; 1/2 below budget 1)",
        "--out-ratio": "the same for the output width",
        "--reduction": "hidden width of the attention (default 1/16)",
        "--low-rank": "ratio of the low-rank attention (default: full rank)",
    }
    choices = {
        "--norm": get_args(Norm),
        "--attention": tuple(ATTENTION_FUNCTIONS),
        "--start": get_args(Start),
        "--begin": get_args(Begin),
        "--sharing": get_args(Sharing),
    }
    # None of them has a default here, so that it is known which were given.
    settings = [group.add_argument(option, metavar="NUMBER", help=help) for option, help in numbers.items()]
    settings += [
        group.add_argument(option, choices=names, help=f"default {names[0]}") for option, names in choices.items()
    ]
    settings += [
        group.add_argument(
            "--no-spatial-partition",
            dest="spatial_partition",
            action="store_const",
            const=False,
            help="cells as wide as the kernels",
        ),
        group.add_argument("--exclude", action="append", metavar="PATTERN", help="leave static; repeatable"),
    ]
    parser.add_argument("--json", type=path, metavar="FILE", help="also write the plan as JSON")
    parser.set_defaults(run=run, settings={setting.dest: setting.option_strings[0] for setting in settings})


def run(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in arguments.settings if getattr(arguments, name) is not None}
    preset = EVERY_PRESET.get(arguments.model)
    if isinstance(preset, Preset):
        begin = given.pop("begin", None)
        if given:
            options = ", ".join(arguments.settings[name] for name in given)
            raise ConfigError(f"{preset.name} has settings of its own; {options} goes with a timm model")
        made = preset_plan(preset, begin)
    else:
        config = WarehouseConfig(**given)
        with torch.device("meta"):
            made = plan(build_by_name(arguments.model), config)
    console().print(made)
    if arguments.json is not None:
        made.save(arguments.json)
    return 0
