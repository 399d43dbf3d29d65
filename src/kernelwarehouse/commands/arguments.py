"""Kinds of arguments that several commands share."""

import argparse
from pathlib import Path


def add_debug(parser: argparse.ArgumentParser) -> None:
    """`--debug`, which may stand before a sub-command or after it."""
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def text(given: str) -> str:
    """Text with something in it: an unset variable of a shell, in quotes, comes as an empty argument."""
    if not given:
        raise argparse.ArgumentTypeError("it is empty; a name or a path is wanted")
    return given


def path(given: str) -> Path:
    return Path(text(given))
