"""Kinds of arguments that several commands share."""

import argparse
from pathlib import Path


def text(given: str) -> str:
    """Text with something in it: an unset variable of a shell, in quotes, comes as an empty argument."""
    if not given:
        raise argparse.ArgumentTypeError("it is empty; a name or a path is wanted")
    return given


def path(given: str) -> Path:
    return Path(text(given))
