"""`kernelwarehouse detect`: find and outline objects."""

import argparse

from kernelwarehouse._extras import require
from kernelwarehouse._terminal import console
from kernelwarehouse.commands.arguments import add_debug, path
from kernelwarehouse.detection.scenes import make_scenes


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "detect",
        help="find and outline objects: Mask R-CNN on any backbone, COCO data in, COCO metrics out",
        description="Find and outline objects in pictures, with Mask R-CNN on a backbone of the zoo or of timm.",
    )
    parts = parser.add_subparsers(required=True, metavar="scenes")
    _add_scenes(parts.add_parser("scenes", help="make pictures to learn from, where no data can be downloaded"))


def _add_scenes(parser: argparse.ArgumentParser) -> None:
    add_debug(parser)
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
