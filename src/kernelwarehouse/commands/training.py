"""The sub-commands train, eval and predict."""

import argparse

from rich.table import Table

from kernelwarehouse._extras import require
from kernelwarehouse._terminal import console
from kernelwarehouse.commands.arguments import path, text
from kernelwarehouse.commands.running import (
    WHEN_INTERRUPTED,
    add_model_arguments,
    add_reading,
    add_recipe_overrides,
    add_reports,
    model_arguments,
    recipe_overrides,
    run_options,
)
from kernelwarehouse.data import open_dataset
from kernelwarehouse.errors import ConfigError, TrainingError
from kernelwarehouse.report.run import write_run_report
from kernelwarehouse.training.api import train
from kernelwarehouse.training.distributed import is_main_process, join_processes
from kernelwarehouse.training.predict import open_trained, read_pictures
from kernelwarehouse.training.progress import Display
from kernelwarehouse.training.recipe import Recipe, load_recipe, recipe_names


def add_parsers(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the three commands; each sets `run`, a function from the parsed arguments to an exit code."""
    _add_train(
        subparsers.add_parser(
            "train",
            help="train a network; the same command again resumes the run",
            description="Train a network, and leave networks, metrics and a report in a folder. The same command again "
            "resumes a run that was ended by Ctrl-C, SIGTERM or a kill, or finds it finished.",
        )
    )
    _add_eval(
        subparsers.add_parser(
            "eval",
            help="top-1, top-5 and loss of a trained network",
            description="Evaluate the best network of a run on images of the classes that it was trained for.",
        )
    )
    _add_predict(
        subparsers.add_parser(
            "predict",
            help="the likeliest classes of pictures",
            description="Show the classes that the best network of a run finds likeliest, for each picture.",
        )
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=text,
        required=True,
        help="'embedded', an .npz file, a folder of class folders (or of train/ and val/), or a torchvision name",
    )
    parser.add_argument(
        "--data-root", type=path, default=".", metavar="DIR", help="where a torchvision set lies (default: here)"
    )
    parser.add_argument("--download", action="store_true", help="let torchvision fetch the set if it is not there")
    add_reading(parser)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a name of the zoo or of timm, such as kw1x_resnet18 or resnet18")
    _add_data(parser)
    parser.add_argument("--recipe", required=True, help=f"{', '.join(recipe_names())}, or your own .toml file")
    add_recipe_overrides(parser)
    parser.add_argument(
        "--from",
        dest="weights",
        type=path,
        metavar="DIR",
        help="start from a saved network's weights; those of a static network become the cells of its twin",
    )
    add_model_arguments(parser, "img_size=64")
    add_reports(parser)
    parser.set_defaults(run=run_train, when_interrupted=WHEN_INTERRUPTED)


def run_train(arguments: argparse.Namespace) -> int:
    require("train", "training")  # before data are opened, which may mean to fetch them
    options = run_options(arguments)
    data = open_dataset(arguments.data, root=arguments.data_root, download=arguments.download)
    folder = train(
        arguments.model,
        data,
        resolve_recipe(arguments),
        arguments.output,
        options=options,
        arguments=model_arguments(arguments),
        weights=arguments.weights,
        device=arguments.device,
    )
    if is_main_process():
        try:
            report = write_run_report(folder, data)
        except OSError as error:
            raise TrainingError(f"the run is complete, but its report cannot be written: {error}") from error
        Display().say(f"report: {report}")
    return 0


def resolve_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe for this network with what the command line overrides."""
    overrides = recipe_overrides(arguments, Recipe)
    return load_recipe(arguments.recipe).for_model(arguments.model).with_overrides(overrides)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=path, metavar="RUN", help="the folder of a run, or its best/ or last/")
    _add_data(parser)
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="over all processes (default: 64)")
    parser.set_defaults(run=run_eval)


def run_eval(arguments: argparse.Namespace) -> int:
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size (={arguments.batch_size}) must be at least 1")
    trained = open_trained(arguments.run_folder)
    data = open_dataset(arguments.data, root=arguments.data_root, download=arguments.download)
    with join_processes(arguments.device) as processes:
        result = trained.evaluate(
            data,
            processes,
            batch_size=min(max(1, arguments.batch_size // processes.world_size), len(data.validation.labels)),
            workers=arguments.workers,
            unreadable=arguments.unreadable,
        )
        if processes.is_main:
            table = Table("images", "top-1", "top-5", "loss", "unreadable")
            shares = (f"{result.top1:.2%}", f"{result.top5:.2%}", f"{result.loss:.4f}")
            table.add_row(f"{result.images:,}", *shares, str(len(result.unreadable)))
            out = console()
            out.print(table)
            for problem in result.unreadable:
                out.print(f"unreadable: {problem}", soft_wrap=True)
    return 0


def _add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=path, metavar="RUN", help="the folder of a run, or its best/ or last/")
    parser.add_argument("pictures", type=text, nargs="+", metavar="PICTURE", help="image files")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many classes to show (default: 5)")
    parser.set_defaults(run=run_predict)


def run_predict(arguments: argparse.Namespace) -> int:
    if arguments.top < 1:
        raise ConfigError(f"--top (={arguments.top}) must be at least 1")
    pictures = read_pictures(arguments.pictures)
    predictions = open_trained(arguments.run_folder).predict(pictures, arguments.top)
    out = console()
    for picture, guesses in zip(arguments.pictures, predictions, strict=True):
        table = Table("class", "probability", title=picture)
        for name, share in guesses:
            table.add_row(name, f"{share:.2%}")
        out.print(table)
    return 0
