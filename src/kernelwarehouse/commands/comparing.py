"""`kernelwarehouse compare`: networks side by side."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kernelwarehouse._terminal import console
from kernelwarehouse.commands.arguments import path, text
from kernelwarehouse.compare.files import check_writable, written_aside
from kernelwarehouse.compare.measure import QUICK, STEPS_PER_NETWORK, Cost, Setting, backbone_of, measure
from kernelwarehouse.compare.plot import check_plot, plot
from kernelwarehouse.compare.table import Row, as_csv, as_json, as_markdown, as_text, make_rows
from kernelwarehouse.errors import MeasurementError, UnknownPresetError
from kernelwarehouse.zoo import PEERS, PRESETS, PeerPreset, Preset

FORMATS = {".txt": "text", ".md": "markdown", ".csv": "csv", ".json": "json"}
"""The form of a file by its suffix."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "compare",
        help="measure networks side by side, with the paper's figures",
        description="Parameters, MACs, time and memory of networks as parts of their static backbone, measured in one "
        "run, with the paper's figures beside them.",
    )
    parser.add_argument(
        "presets", type=text, nargs="*", metavar="PRESET", help="presets of this library, or timm models"
    )
    parser.add_argument(
        "--backbone", type=text, action="append", default=[], help="all presets on a backbone, such as resnet18"
    )
    parser.add_argument("--quick", action="store_true", help="small images and batches: a look, not a measurement")
    for option, what, default in (
        ("--image-size", "side of the images", Setting.image_size),
        ("--batch-size", "images at once", Setting.batch_size),
        ("--rounds", "how often each time is taken", Setting.rounds),
        ("--threads", "threads of torch", Setting.threads),
    ):
        parser.add_argument(option, type=int, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--prepare", action="store_true", help="time inference after kernelwarehouse.prepare_inference")
    parser.add_argument("--format", choices=FORMATS.values(), default="text", help="of what is printed (default: text)")
    parser.add_argument(
        "--output",
        type=path,
        action="append",
        default=[],
        metavar="FILE",
        help=f"also write the table to a file; its name ends in {', '.join(FORMATS)}; repeatable",
    )
    parser.add_argument("--plot", type=path, metavar="FILE", help="also draw accuracy and cost against parameters")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    setting = QUICK if arguments.quick else Setting()
    given = {name: getattr(arguments, name) for name in ("image_size", "batch_size", "rounds", "threads")}
    setting = replace(
        setting, prepare=arguments.prepare, **{name: value for name, value in given.items() if value is not None}
    )
    for output in arguments.output:
        if output.suffix not in FORMATS:
            raise MeasurementError(f"table {output} has no known form; its name must end in {', '.join(FORMATS)}")
        check_writable(output)
    if arguments.plot:
        check_plot(arguments.plot)
    names = networks(arguments.presets, arguments.backbone)
    rows = make_rows(_measure_all(names, setting))
    print(_formatted(rows, setting, arguments.format), end="")
    for output in arguments.output:
        with written_aside(output) as aside:
            aside.write_text(_formatted(rows, setting, FORMATS[output.suffix]), encoding="utf-8")
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0


def networks(presets: Sequence[str], backbones: Sequence[str] = ()) -> list[str]:
    """The networks to measure: those named and those on the named backbones, each after its static backbone."""
    wanted = list(presets)
    presets_by_name: dict[str, Preset | PeerPreset] = {**PEERS, **PRESETS}
    for backbone in backbones:
        on_it = [name for name, preset in presets_by_name.items() if preset.backbone == backbone]
        if not on_it:
            known = sorted({preset.backbone for preset in presets_by_name.values()})
            raise UnknownPresetError(f"no preset is built on {backbone!r}; there are presets on {', '.join(known)}")
        wanted += on_it
    if not wanted:
        raise UnknownPresetError("nothing to compare; name presets, or a backbone with --backbone resnet18")
    by_backbone: dict[str, dict[str, None]] = {}
    for name in wanted:
        by_backbone.setdefault(backbone_of(name), {backbone_of(name): None})[name] = None
    return [name for group in by_backbone.values() for name in group]


def _measure_all(names: Sequence[str], setting: Setting) -> list[Cost]:
    out = console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    costs: list[Cost] = []
    with Progress(*columns, console=out, disable=not out.is_terminal) as progress:
        task = progress.add_task("", total=len(names) * STEPS_PER_NETWORK)
        for name in names:
            progress.update(task, description=name)
            if not out.is_terminal:
                out.print(f"measuring {name} ({len(costs) + 1} of {len(names)})", highlight=False)
            costs.append(measure(name, setting, lambda what: progress.advance(task)))
    return costs


def _formatted(rows: Sequence[Row], setting: Setting, form: str) -> str:
    match form:
        case "markdown":
            return as_markdown(rows, setting)
        case "csv":
            return as_csv(rows)
        case "json":
            return as_json(rows, setting)
    out = console()
    return as_text(rows, setting, out.width if out.is_terminal else 140)
