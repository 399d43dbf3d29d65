"""`kernelwarehouse detect`: find and outline objects."""

import argparse
from pathlib import Path

from PIL import Image, ImageOps

from kernelwarehouse._extras import require
from kernelwarehouse._files import check_replaceable, replacing
from kernelwarehouse._terminal import console
from kernelwarehouse.commands.arguments import add_debug, path, text
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
from kernelwarehouse.detection.data import open_coco
from kernelwarehouse.detection.demo import DEMO_FOLDER, run_demo
from kernelwarehouse.detection.drawing import draw_detections
from kernelwarehouse.detection.evaluation import score_table
from kernelwarehouse.detection.predict import as_pixels, open_detector
from kernelwarehouse.detection.recipe import DetectionRecipe, load_schedule, schedule_names
from kernelwarehouse.detection.report import write_detection_report
from kernelwarehouse.detection.scenes import make_scenes
from kernelwarehouse.detection.training import train_detector
from kernelwarehouse.errors import ConfigError, DataError, TrainingError
from kernelwarehouse.training.distributed import is_main_process, join_processes
from kernelwarehouse.training.predict import read_pictures
from kernelwarehouse.training.progress import Display


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "detect",
        help="find and outline objects: Mask R-CNN on any backbone, COCO data in, COCO metrics out",
        description="Find and outline objects in pictures, with Mask R-CNN on a backbone of the zoo or of timm.",
    )
    parts = parser.add_subparsers(required=True, metavar="command")
    for name, add, told in (
        ("train", _add_train, "train a detector; the same command again resumes the run"),
        ("eval", _add_eval, "COCO's numbers of a trained detector"),
        ("predict", _add_predict, "draw what a trained detector finds in a picture"),
        ("demo", _add_demo, "learn to find and outline garments on generated scenes, in minutes"),
        ("scenes", _add_scenes, "make pictures to learn from, where no data can be downloaded"),
    ):
        part = parts.add_parser(name, help=told)
        add_debug(part)
        add(part)


def _add_coco(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coco",
        type=path,
        required=True,
        metavar="PATH",
        help="a folder in COCO's format, of any classes; to evaluate on, a file of annotations will do",
    )
    parser.add_argument("--images", type=path, metavar="DIR", help="where the pictures are, if not beside these")
    add_reading(parser)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backbone", help="a name of the zoo or of timm, such as kw1x_resnet50 or resnet50")
    _add_coco(parser)
    parser.add_argument(
        "--schedule", default="1x", help=f"{', '.join(schedule_names())}, or your own .toml file (default: 1x)"
    )
    parser.add_argument(
        "--backbone-checkpoint",
        dest="weights",
        type=path,
        metavar="RUN",
        help="the classification run that the backbone is from, or a folder of kernelwarehouse.save",
    )
    parser.add_argument(
        "--frozen-stages", type=int, metavar="N", help="stages not to train, instead of the schedule's; -1: train all"
    )
    add_recipe_overrides(parser)
    add_model_arguments(parser, "drop_path_rate=0.1")
    add_reports(parser)
    parser.set_defaults(run=run_train, when_interrupted=WHEN_INTERRUPTED)


def run_train(arguments: argparse.Namespace) -> int:
    require("detection", "training detectors")
    options = run_options(arguments)
    recipe = resolve_schedule(arguments)
    data = open_coco(arguments.coco, images=arguments.images)
    folder = train_detector(
        arguments.backbone,
        data,
        recipe,
        arguments.output,
        options=options,
        arguments=model_arguments(arguments),
        weights=arguments.weights,
        device=arguments.device,
    )
    if is_main_process():
        try:
            report = write_detection_report(folder, data)
        except OSError as error:
            raise TrainingError(f"the run is complete, but its report cannot be written: {error}") from error
        Display().say(f"report: {report}")
    return 0


def resolve_schedule(arguments: argparse.Namespace) -> DetectionRecipe:
    """The recipe for this backbone with what the command line overrides."""
    overrides = recipe_overrides(arguments, DetectionRecipe, ("epochs", "batch_size", "frozen_stages"))
    return load_schedule(arguments.schedule).for_model(arguments.backbone).with_overrides(overrides)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=path, metavar="RUN", help="the folder of a run, or its best/ or last/")
    _add_coco(parser)
    parser.set_defaults(run=run_eval)


def run_eval(arguments: argparse.Namespace) -> int:
    require("detection", "evaluating detectors")
    trained = open_detector(arguments.run_folder)
    data = open_coco(arguments.coco, images=arguments.images, for_training=False)
    with join_processes(arguments.device) as processes:
        scores = trained.evaluate(data, processes, workers=arguments.workers, unreadable=arguments.unreadable)
        if processes.is_main:
            out = console()
            out.print(score_table(scores))
            for problem in scores.unreadable:
                out.print(f"unreadable: {problem}", soft_wrap=True)
    return 0


def _add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=path, metavar="RUN", help="the folder of a run, or its best/ or last/")
    parser.add_argument("picture", type=text, metavar="IMAGE", help="an image file")
    parser.add_argument("--output", required=True, type=path, metavar="FILE", help="where to draw, such as out.jpg")
    parser.add_argument(
        "--threshold", type=float, default=0.5, metavar="SCORE", help="least score to be drawn (default: 0.5)"
    )
    parser.set_defaults(run=run_predict)


def run_predict(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.threshold <= 1:
        raise ConfigError(f"--threshold (={arguments.threshold}) must be from 0 to 1")
    _check_picture_name(arguments.output)
    [picture] = read_pictures([arguments.picture])
    trained = open_detector(arguments.run_folder)
    pixels = as_pixels(_upright(picture))
    found = trained.predict(pixels)
    drawn = draw_detections(pixels, found, trained.classes, threshold=arguments.threshold)
    with replacing(arguments.output) as aside:
        drawn.save(aside)
    sure = [number for number, score in enumerate(found["scores"].tolist()) if score >= arguments.threshold]
    out = console()
    for number in sure:
        box = ", ".join(f"{side:.0f}" for side in found["boxes"][number].tolist())
        name = trained.classes[int(found["labels"][number]) - 1]
        out.print(f"{name} {float(found['scores'][number]):.1%} at {box}", soft_wrap=True, highlight=False)
    out.print(f"{len(sure)} objects, drawn in {arguments.output}", soft_wrap=True, highlight=False)
    return 0


def _upright(picture: Image.Image) -> Image.Image:
    """Turned as the camera says, as viewers show it. Not so for COCO's data, whose boxes are those of stored pixels."""
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # Pillow fails in many ways on a damaged note, and without one a picture is as it is stored
        return picture


def _check_picture_name(output: Path) -> None:
    """Refuse a name that could not be written later."""
    Image.init()
    if Image.EXTENSION.get(output.suffix.lower()) not in Image.SAVE:
        raise DataError(f"{output} has no known form; its name must end in .jpg, .png or the like")
    try:
        check_replaceable(output)
    except OSError as error:
        raise DataError(f"{output} cannot be written: {error.strerror or error}") from error


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=path, default=DEMO_FOLDER, metavar="DIR", help="for scenes and runs (default: %(default)s)"
    )
    parser.set_defaults(run=lambda arguments: run_demo(arguments.output), when_interrupted=WHEN_INTERRUPTED)


def _add_scenes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=path, metavar="OUT", help="a new folder, for pictures, train.json and val.json")
    parser.add_argument("--images", type=int, default=500, metavar="N", help="scenes to train on (default: 500)")
    parser.add_argument(
        "--validation-images", type=int, metavar="N", help="scenes to validate on (default: a fifth of --images)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which scenes (default: 0)")
    parser.add_argument(
        "--size", type=int, default=128, metavar="PIXELS", help="side of the square pictures (default: 128)"
    )
    parser.set_defaults(run=run_scenes)


def run_scenes(arguments: argparse.Namespace) -> int:
    require("detection", "making scenes")
    folder = make_scenes(
        arguments.folder,
        images=arguments.images,
        validation_images=arguments.validation_images,
        seed=arguments.seed,
        size=arguments.size,
    )
    console().print(f"scenes: {folder}", soft_wrap=True, highlight=False)
    return 0
