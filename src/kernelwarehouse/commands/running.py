"""What the commands that train have in common: options of a run, overrides of a recipe, arguments for a network."""

import argparse
import tomllib
from collections.abc import Sequence
from typing import Any

from kernelwarehouse.commands.arguments import path
from kernelwarehouse.errors import ConfigError, RecipeError
from kernelwarehouse.training.recipe import EngineRecipe, parse_override
from kernelwarehouse.training.run import RunOptions

WHEN_INTERRUPTED = "; the same command resumes the run from its last checkpoint"


def add_reading(parser: argparse.ArgumentParser) -> None:
    """How images are read, and on what the network runs."""
    parser.add_argument("--workers", type=int, metavar="N", help="processes that read images (default: by the cores)")
    parser.add_argument(
        "--unreadable", choices=("stop", "skip"), default="stop", help="at an image that cannot be read (default: stop)"
    )
    parser.add_argument("--device", default="", help="cpu, cuda or cuda:N (default: a GPU if there is one)")


def add_recipe_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, type=path, metavar="DIR", help="where the run is kept")
    parser.add_argument("--epochs", type=int, metavar="N", help="instead of the recipe's")
    parser.add_argument("--batch-size", type=int, metavar="N", help="instead of the recipe's; over all processes")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override any other field of the recipe, as in --set learning_rate=0.05; repeatable",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides everything random (default: 0)")
    parser.add_argument(
        "--device-batch-size",
        type=int,
        default=0,
        metavar="N",
        help="images a process takes at once, with gradients adding up (default: its whole share of a batch)",
    )


def add_model_arguments(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument(
        "--model-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"pass an argument to the network's maker, as in --model-arg {example}; repeatable",
    )


def add_reports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="after so long, the next report writes a checkpoint; the end of an epoch always does (default: 300)",
    )
    parser.add_argument(
        "--report-every", type=int, default=20, metavar="STEPS", help="steps between reports (default: 20)"
    )


def run_options(arguments: argparse.Namespace) -> RunOptions:
    return RunOptions(
        seed=arguments.seed,
        workers=arguments.workers,
        device_batch_size=arguments.device_batch_size,
        checkpoint_seconds=arguments.checkpoint_seconds,
        report_every=arguments.report_every,
        unreadable=arguments.unreadable,
    )


def recipe_overrides(
    arguments: argparse.Namespace, kind: type[EngineRecipe], own_options: Sequence[str] = ("epochs", "batch_size")
) -> dict[str, Any]:
    """What the command line overrides in a recipe of this kind: by `--set`, or by options of their own."""
    overrides = dict(parse_override(given, kind) for given in arguments.set)
    for name in own_options:
        value = getattr(arguments, name)
        if value is None:
            continue
        if name in overrides:
            raise RecipeError(
                f"{name} is given twice, by an option of its own (={value}) and by --set; use one of them"
            )
        overrides[name] = value
    return overrides


def model_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    return dict(_parse_model_argument(given) for given in arguments.model_arg)


def _parse_model_argument(given: str) -> tuple[str, Any]:
    name, equals, value = given.partition("=")
    if not equals or not name:
        raise ConfigError(f"--model-arg {given!r} must look like name=value")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value
