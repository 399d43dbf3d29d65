"""Files that are whole or not there."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernelwarehouse.errors import MeasurementError


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
