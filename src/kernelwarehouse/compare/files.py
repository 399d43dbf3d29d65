"""Where the results of a comparison go."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelwarehouse._files import replacing
from kernelwarehouse.errors import MeasurementError


def check_writable(path: Path) -> None:
    """Refuse a path that could not be written later, before hours are spent on what it should hold."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise MeasurementError(f"{path} cannot be written: a file name in a directory that exists is wanted")


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends well."""
    try:
        with replacing(path) as aside:
            yield aside
    except OSError as error:
        raise MeasurementError(f"{path} cannot be written: {error}") from error
