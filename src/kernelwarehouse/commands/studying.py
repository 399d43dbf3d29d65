"""`kernelwarehouse study`: run a study, and show what it found."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from kernelwarehouse._extras import require
from kernelwarehouse._terminal import console
from kernelwarehouse.commands.arguments import add_debug, path, text
from kernelwarehouse.compare.files import check_writable, written_aside
from kernelwarehouse.compare.plot import check_plot
from kernelwarehouse.errors import StudyError
from kernelwarehouse.study.jobs import by_key, tell_unused
from kernelwarehouse.study.plot import plot
from kernelwarehouse.study.results import read_results, refuse_mixed_data
from kernelwarehouse.study.runner import run_study
from kernelwarehouse.study.spec import load_study
from kernelwarehouse.study.split import make_split
from kernelwarehouse.study.table import as_csv, as_markdown, as_text, make_rows, placed


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "study",
        help="compare methods on real data over several seeds, each with settings chosen for it",
        description="Compare methods on real data: settings are chosen for each on images kept apart, then networks of "
        "several seeds are trained with them, and tested once.",
    )
    parts = parser.add_subparsers(required=True, metavar="run|table")
    _add_run(parts.add_parser("run", help="make the runs that are missing; the same command again goes on"))
    _add_table(parts.add_parser("table", help="mean, deviation and difference to the baseline, beside the paper's"))


def _add_study(parser: argparse.ArgumentParser) -> None:
    add_debug(parser)
    parser.add_argument("study", type=path, metavar="STUDY", help="a .toml file, such as studies/cifar10.toml")
    parser.add_argument(
        "--results",
        type=path,
        metavar="FILE",
        help="a line for each finished run (default: beside the study's file, with its name in .jsonl)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    parser.add_argument("--data", type=text, help="an .npz file of images, instead of the study's; or 'embedded'")
    parser.add_argument(
        "--output",
        type=path,
        metavar="DIR",
        help="for split data and running runs (default: runs/ and the study's name)",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--processes", type=int, default=cores, metavar="N", help="runs at a time, of one thread each (default: cores)"
    )
    parser.set_defaults(run=run_runs, when_interrupted="; the same command goes on where the runs were")


def _add_table(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    parser.add_argument(
        "--markdown",
        type=path,
        metavar="FILE",
        help="also write the tables as Markdown; in a page with <!-- study --> and <!-- /study -->, or with "
        "<!-- study: NAME --> and <!-- /study: NAME --> and the name of the study's file, between these",
    )
    parser.add_argument(
        "--to", type=text, metavar="METHOD", help="show differences to this method (default: the study's baseline)"
    )
    parser.add_argument("--csv", type=path, metavar="FILE", help="also write all figures, unrounded")
    parser.add_argument("--plot", type=path, metavar="FILE", help="also draw seeds, means and intervals")
    parser.set_defaults(run=run_table)


def run_runs(arguments: argparse.Namespace) -> int:
    require("train", "a study")
    study = load_study(arguments.study)
    output = arguments.output or Path("runs") / arguments.study.stem
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"{output} cannot be made a folder for the study: {error}") from error
    results = _results(arguments)
    check_writable(results)
    split = make_split(arguments.data or study.data, study.kept, study.split_seed, output)
    return 0 if run_study(study, split, output, results, arguments.processes) else 2


def run_table(arguments: argparse.Namespace) -> int:
    study = load_study(arguments.study)
    if arguments.to is not None:
        study = replace(study, baseline=arguments.to)
    for file in (arguments.markdown, arguments.csv):
        if file is not None:
            check_writable(file)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    results = read_results(_results(arguments))
    refuse_mixed_data(results, _results(arguments))
    found = by_key(results)
    unused = tell_unused(study, found, _results(arguments))
    if unused:
        console(stderr=True).print(unused, soft_wrap=True, highlight=False)
    rows = make_rows(study, found)
    page = None
    if arguments.markdown is not None:
        before = arguments.markdown.read_text(encoding="utf-8") if arguments.markdown.exists() else None
        page = placed(before, as_markdown(study, rows), arguments.study.stem)
    console().print(as_text(study, rows), end="", soft_wrap=True, highlight=False)
    if page is not None:
        with written_aside(arguments.markdown) as aside:
            aside.write_text(page, encoding="utf-8")
    if arguments.csv is not None:
        with written_aside(arguments.csv) as aside:
            aside.write_text(as_csv(rows), encoding="utf-8")
    if arguments.plot is not None:
        plot(study, rows, arguments.plot)
    return 0


def _results(arguments: argparse.Namespace) -> Path:
    return arguments.results or arguments.study.with_suffix(".jsonl")
