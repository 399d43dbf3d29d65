"""Where the results of a comparison go."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelwarehouse._files import check_replaceable, replacing
from kernelwarehouse.errors import MeasurementError


def check_writable(path: Path) -> None:
    """Refuse a path that could not be written later, before hours are spent on what it should hold."""
    with _told(path):
        check_replaceable(path)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends well."""
    with _told(path), replacing(path) as aside:
        yield aside


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MeasurementError(
            f"{path} cannot be written ({error.strerror or error}): a file name in a directory that exists is wanted"
        ) from error
