"""Files that are whole or not there."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelwarehouse.errors import MeasurementError


def check_writable(path: Path) -> None:
    """Refuse a path that could not be written later, before hours are spent on what it should hold."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise MeasurementError(f"{path} cannot be written: a file name in a directory that exists is wanted")


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends well."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield aside
        os.replace(aside, path)
    except OSError as error:
        raise MeasurementError(f"{path} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
